"""A real server over two nodes, both this machine at loopback addresses of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from megavlm.data.processor import Processor
from megavlm.families import family_of
from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server import ClaimedPort
from megavlm.inference.server_args import ServerOptions, command_line
from megavlm.inference.server_process import ADMIN_KEY, API_KEY, ServerProcess
from megavlm.process import STACKS, STACKS_WANTED
from megavlm.slurm.servers import TICK
from tests.conftest import DATA
from tests.parity.reference import Reference
from tests.sglang.conftest import PLAIN, Served, model_folder
from tests.sglang.test_weights import after_push, differences
from tests.support.timeouts import scaled

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("127.0.0.1", "127.0.0.2")
START = scaled(600)  # seconds

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang"), pytest.mark.timeout(1800)]


class Nodes:
    """Processes that run the servers of two nodes, with one rank of a server on each."""

    def __init__(self, folder: Path, run: Path, stack: ExitStack) -> None:
        keys = ("readers", "administrator")
        self.claims = [ClaimedPort(), ClaimedPort()]
        port, store = (claim.number for claim in self.claims)
        options = ServerOptions(folder, "float32", "cpu", tensor_parallel=2, cache_images=False)
        address = ServerProcess(HOSTS[0], port, [], {}, keys, run / "unused", 0)  # is not launched
        self.served = Served(
            folder, Processor(folder, DATA, family_of(folder)), address, tensor_parallel=2
        )
        self.supervisors = []
        for rank, host in enumerate(HOSTS):
            place = [str(run), host, str(port), "1", "1", *command_line(options.arguments())]
            among = ["--nnodes", "2", "--node-rank", str(rank)]
            among += ["--dist-init-addr", f"{HOSTS[0]}:{store}"]
            environment = options.environment(first_core=rank)
            environment |= {API_KEY: keys[0], ADMIN_KEY: keys[1]}
            path = os.pathsep.join([str(ROOT), environment["PYTHONPATH"]])
            command = [sys.executable, "-P", "-m", "megavlm.slurm.servers", *place, *among]
            process = subprocess.Popen(command, env=environment | {"PYTHONPATH": path})
            stack.callback(process.kill)  # the kernel then ends its server
            self.supervisors.append(process)

    def mains(self) -> list[psutil.Process]:
        """Return the first process of the server on each node that has one."""
        children = (psutil.Process(process.pid).children() for process in self.supervisors)
        return [child for of_node in children for child in of_node]

    def wait(self, old: list[psutil.Process]) -> list[psutil.Process]:
        """Wait until the server answers, whose processes are all others than `old`."""
        deadline = time.monotonic() + START
        while True:
            assert time.monotonic() < deadline
            time.sleep(0.2)
            mains = self.mains()
            if len(mains) == 2 and not {*mains} & {*old}:
                try:
                    self.served.get("/model_info")
                    return mains
                except WeightSyncError:
                    pass  # it does not listen yet


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(model_folder(PLAIN), tmp_path / "run", stack)


@pytest.mark.slow
def test_a_server_over_two_nodes(nodes: Nodes, tmp_path: Path) -> None:
    """It answers as one on a node, takes weights on both, and starts again as a whole."""
    served, mains = nodes.served, nodes.wait(old=[])
    before = differences(served, Reference(served.folder), "default", seed=0)
    assert max(before.values()) < 1e-4, before
    for version, kind in enumerate(("distributed", "disk")):
        after = after_push(served, kind, version, tmp_path)
        assert max(after.values()) < 1e-4, after
        if version == 0:
            mains[1].kill()
            mains = nodes.wait(old=mains)
            assert served.get("/model_info")["weight_version"] == "default"
            (ended,) = (tmp_path / "run").glob("*.ended")
            assert ended.read_bytes()
    late = nodes.supervisors[1]  # it looks after the other, as one on a busy node may
    late.send_signal(signal.SIGSTOP)
    (tmp_path / "run" / STACKS / STACKS_WANTED).write_text("yes")
    time.sleep(3 * TICK)
    late.send_signal(signal.SIGCONT)
    for process, host in zip(nodes.supervisors, HOSTS, strict=True):
        assert process.wait(scaled(180)) == 0
        log = (tmp_path / f"run/rollout_server_{host}_0.log").read_text()
        assert "most recent call first" in log
