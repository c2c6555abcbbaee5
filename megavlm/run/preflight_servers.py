"""Checks of a run's servers before it starts: ports that are free, weights that can get there."""

import socket
from urllib.parse import urlsplit

from megavlm.config.schema import Rollout
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server import require_free


def check_ports(rollout: Rollout) -> None:
    """Those that servers of ours are given."""
    if rollout.mode != "managed" or rollout.port is None:
        return
    for index in range(rollout.servers):
        try:
            require_free(rollout.port + index)
        except RolloutServerError as error:
            raise ValueError(str(error)) from error


def check_handles(rollout: Rollout) -> None:
    """On rank 0's machine: handles to its GPUs' memory go to servers on this machine alone."""
    if rollout.mode != "external" or rollout.sync != "tensor":
        return
    remote = [url for url in rollout.urls if not is_here(str(urlsplit(url).hostname))]
    if not remote:
        return
    from megavlm.parallel import platform  # torch takes seconds, and few runs come here

    if platform.has_gpu():
        raise ValueError(
            f"rollout.urls holds {remote[0]}, which is not on this machine, and "
            "rollout.sync=tensor hands servers the addresses of GPU memory, which can be read on "
            "the machine of the trainer's rank 0 alone: set rollout.sync=distributed, or disk"
        )


def is_here(host: str) -> bool:
    """Whether a name or an address is one of this machine's: a socket can be bound to it. A name
    that means nothing is not; the fleet says then that nobody answers.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
                return True
            except OSError:
                pass
    return False
