"""An SGLang server of a run on this machine, and ports that no other run takes."""

import errno
import random
import secrets
import socket
import weakref
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server_args import ServerArgs, ServerOptions, command_line
from megavlm.inference.server_process import ServerProcess

HOST = "127.0.0.1"
# Seconds to end after SIGTERM. If a server is killed while it releases GPU memory, the memory may
# stay allocated. On a CPU there is nothing to release, and waiting for SGLang would take 9 s.
STOP_TIMEOUT = {"cuda": 30.0, "cpu": 0.0}
KERNEL_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
SERVER_PORTS = range(20000, 22000)  # SGLang 0.5.23 takes internal ports from 22000 on


class ManagedServer(ServerProcess):
    """SGLang server on this machine with random API keys.

    log_path: File for the server's output; see ServerProcess. host, port: Address to listen on; a
    port of None claims a free one (ClaimedPort). first_gpu: First GPU; other ranks take the next
    GPUs. first_core: First core to which ranks are bound on a CPU. start_timeout: Seconds to become
    healthy, which the server pool waits for.
    """

    node = 0  # trainer node that it shares memory with, for the pool of rank 0, which is there

    def __init__(
        self,
        options: ServerOptions,
        *,
        log_path: str | Path,
        host: str = HOST,
        port: int | None = None,
        first_gpu: int = 0,
        first_core: int = 0,
        start_timeout: float = 300.0,
    ) -> None:
        if port is None:
            self._claim = ClaimedPort()
            port = self._claim.number
        # Its ranks meet there seconds later: SGLang would choose one of 8,000 ports, as others do.
        self._meeting = ClaimedPort()
        meeting: ServerArgs = {"nccl_port": self._meeting.number}
        gpu: ServerArgs = {} if options.device == "cpu" else {"base_gpu_id": first_gpu}
        super().__init__(
            host,
            port,
            command_line({**meeting, **gpu, **options.arguments()}),
            options.environment(first_core),
            # hex, because a key that starts with "-" would be parsed as an option
            keys=(secrets.token_hex(32), secrets.token_hex(32)),
            log_path=log_path,
            stop_timeout=STOP_TIMEOUT[options.device],
        )
        self.start_timeout = start_timeout
        self.tensor_parallel, self.device = options.tensor_parallel, options.device

    def launch(self) -> None:
        """Start the processes. Raises RolloutServerError if the port is in use."""
        require_free(self.port)
        super().launch()

    @property
    def too_late(self) -> str:
        """Return the error of a server that does not become healthy in time."""
        return (
            f"the SGLang server on port {self.port} was not healthy after {self.start_timeout:g} s "
            "(rollout.start_timeout)"
        )


def own_address(peer: str) -> str:
    """Return the address of this machine that is on the way to another, given by name or number."""
    found = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)
    family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def free_port() -> int:
    """Return a TCP port on which nothing on this machine listens now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class ClaimedPort:
    """Free TCP port of this machine that no other run can claim while this object exists.

    A server starts to listen about 20 s after its port was chosen, and several runs may start at
    the same time. `number` is below the range from which the kernel picks ports, so it stays free
    until the server listens, and across restarts. If no such port is free, the kernel picks one.

    ports: Ports to choose from.
    """

    def __init__(self, ports: Sequence[int] = SERVER_PORTS) -> None:
        kernels = int(KERNEL_PORT_RANGE.read_text().split()[0])
        below = [port for port in ports if port < kernels]
        chosen = random.SystemRandom().sample(below, len(below))  # unseeded: runs must differ
        # An abstract socket name, with a leading null byte, is freed when the process ends
        # (unix(7)).
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        weakref.finalize(self, holder.close)
        self.number = next(
            port for port in chain(chosen, iter(free_port, None)) if _claim(holder, port)
        )


def _claim(holder: socket.socket, port: int) -> bool:
    try:
        require_free(port)
        holder.bind(f"\0megavlm-port-{port}")
    except RolloutServerError:
        return False
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def require_free(port: int) -> None:
    """Raise RolloutServerError if something listens on `port`, at any address of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore sockets in TIME_WAIT
        try:
            probe.bind(("", port))
        except OSError as error:
            raise RolloutServerError(
                f"port {port}, of a rollout server, is in use on this machine ({error.strerror}); "
                "stop what listens there, or choose another by rollout.port (null: a free one)."
            ) from error
