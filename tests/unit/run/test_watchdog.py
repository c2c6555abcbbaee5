"""The watchdog: what is progress, which rank is named, and real ranks that hang."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megavlm.inference.server_support.megavlm_weights import join
from megavlm.observability.phases import Phases
from megavlm.parallel.collectives import receive_from_driver, send_each
from megavlm.parallel.mesh import Layout, build_mesh, own_store
from megavlm.parallel.watchdog import (
    SERVERS_GROUP,
    RankReport,
    Watchdog,
    behind,
    waits_for_others,
)
from megavlm.process import STACKS, STACKS_WANTED, ExitCode
from tests.support.fork import launch
from tests.support.timeouts import scaled
from tests.unit.run.test_launcher import FAKE_TRAINING, train

SECONDS = 0.4
LARGE = 2**24  # a message that gloo does not send before it is received


class Ranks:
    """Two ranks of one process. ended: what their watchdogs ended them with."""

    def __init__(self) -> None:
        self.phases = [Phases(), Phases()]
        self.store = dist.HashStore()
        self.ended: list[str] = []
        self.fired = threading.Event()
        self.servers = SimpleNamespace(work_seen=0, write_stacks=lambda: None)

    def end(self, sentence: str) -> None:
        self.ended.append(sentence)
        self.fired.set()

    def are_seen(self) -> bool:
        """Return whether both watchdogs have seen all signs of progress of their ranks."""
        signs = sum(phases.beats for phases in self.phases)
        return self.store.add("megavlm/watchdog/signs", 0) == signs


@contextmanager
def watched(folder: Path, seconds: float = SECONDS) -> Iterator[Ranks]:
    ranks = Ranks()
    with ExitStack() as stack:
        for rank, phases in enumerate(ranks.phases):
            one = Watchdog(
                seconds, phases, folder, ranks.end, store=ranks.store, rank=rank, world_size=2
            )
            if rank == 0:
                one.servers = ranks.servers
            stack.enter_context(one)
        yield ranks


def beat(ranks: Ranks) -> None:
    ranks.phases[1].beat()


def work(ranks: Ranks) -> None:
    ranks.servers.work_seen += 1


@pytest.mark.parametrize("sign", [beat, work])
def test_progress_of_one_rank_or_of_a_server_is_progress_of_all(
    tmp_path: Path, sign: Callable[[Ranks], None]
) -> None:
    with watched(tmp_path) as ranks:
        for _ in range(8):
            sign(ranks)
            assert not ranks.fired.wait(SECONDS / 4), "the other rank waits for this one"
        assert ranks.fired.wait(scaled(120))


def test_stacks_of_all_ranks_are_written_and_the_oldest_sign_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = tmp_path / STACKS_WANTED  # of servers on other nodes, which look at it
    wanted.touch()
    with watched(tmp_path) as ranks, ranks.phases[1]("update"):
        while not ranks.are_seen():  # on a loaded machine rank 1's watchdog may look late
            ranks.phases[0].beat()
            assert not ranks.fired.wait(SECONDS / 4)
        ranks.phases[0].beat()  # so that rank 1 has the older sign
        assert ranks.fired.wait(scaled(120))
    assert wanted.read_text()
    assert all("rank 1 is behind, in phase update for" in sentence for sentence in ranks.ended)
    for rank in range(2):
        assert "test_stacks_of_all_ranks" in (tmp_path / f"rank_{rank}.txt").read_text()
        assert f"megavlm: stacks of rank {rank}:\n" in capfd.readouterr().err or rank


def test_zero_turns_it_off(tmp_path: Path) -> None:
    with watched(tmp_path, seconds=0.0) as ranks:
        assert not ranks.fired.wait(SECONDS)
    assert not list(tmp_path.iterdir())


WAITING = RankReport("sync", 900.0, True, "broadcast (mesh.py:1)")
WORKING = RankReport("reward", 600.0, False, "score (pool.py:7)")


@pytest.mark.parametrize(
    ("reports", "sentence"),
    [
        ({0: WORKING, 1: WAITING}, "rank 0 is behind, in phase reward for 10 min 00 s, at score"),
        ({0: WAITING}, "rank 1 gave no answer"),
        ({1: WAITING, 0: WAITING}, "all ranks wait for each other; rank 1 has waited longest"),
    ],
)
def test_the_rank_that_does_not_wait_is_behind(
    reports: dict[int, RankReport], sentence: str
) -> None:
    """However much longer the others have waited, as they do for the driver."""
    assert behind(reports, 2).startswith(sentence)


def is_seen_to_wait(how: str, waits: bool, seen: Path) -> bool:
    """Return whether a rank is ever seen to wait for the other one, which comes to it then."""
    mesh = build_mesh(Layout())
    waiting = 1 if how == "receives" else 0
    data = bytes(4 * LARGE)
    minute = timedelta(minutes=1)
    servers = join(own_store(), "servers", mesh.rank, 2, "gloo", minute, SERVERS_GROUP)
    if mesh.rank != waiting:
        while not seen.exists():
            time.sleep(0.01)
        if how == "sends":
            receive_from_driver(mesh)
        elif how == "receives":
            send_each({1: data}, mesh)
        else:
            dist.barrier(servers if how == "servers" else None)
        return waits
    main, found = threading.get_ident(), list[bool]()

    def look() -> None:
        deadline = time.monotonic() + (scaled(120) if waits else 0.5)
        while not any(found) and time.monotonic() < deadline:
            found.append(waits_for_others(main))
            time.sleep(0.01)
        seen.touch()

    assert not waits_for_others(main)
    looking = threading.Thread(target=look)
    looking.start()
    with ThreadPoolExecutor(1) as pool:
        if how == "sends":
            send_each({1: data}, mesh)
        elif how == "receives":
            receive_from_driver(mesh)
        elif how == "collective":
            dist.barrier()
        else:
            pool.submit(dist.barrier, servers if how == "servers" else None).result()
    looking.join()
    return any(found)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "waits"),
    [
        ("collective", True),
        ("sends", True),
        ("receives", True),
        ("another thread", True),
        ("servers", False),
    ],
)
def test_a_rank_waits_for_others_in_a_collective_or_for_a_message(
    how: str, waits: bool, tmp_path: Path
) -> None:
    """A checkpoint has a thread of its own. Where a thread waits for rollout servers, it is this
    rank that has to get an answer of them.
    """
    assert launch(2, is_seen_to_wait, how, waits, tmp_path / "seen") == [waits, waits]


@pytest.mark.slow
@pytest.mark.parametrize("holds_interpreter", [False, True])
def test_a_rank_that_hangs_in_a_call_of_c_is_named(
    write_recipe: Callable[..., Path], tmp_path: Path, holds_interpreter: bool
) -> None:
    """Where it holds the interpreter's lock, its rank cannot answer, and C writes its stack."""
    done = train(write_recipe(run={"watchdog": 3.0}), 9 if holds_interpreter else 8)
    assert done.returncode == ExitCode.HUNG, done.stderr
    assert done.stderr.count("no progress for 3.0 s (run.watchdog)") == 1
    named = "rank 1 gave no answer" if holds_interpreter else "rank 1 is behind, in phase update"
    assert named in done.stderr
    stacks = {path.name for path in (tmp_path / "run" / STACKS).iterdir()}
    assert stacks >= {"rank_0.txt"} | (set() if holds_interpreter else {"rank_1.txt"})
    source = (FAKE_TRAINING / "sitecustomize.py").read_text().splitlines()
    (line,) = [number for number, text in enumerate(source, 1) if "library.sleep(" in text]
    assert f"line {line} in hang\n" in done.stderr, "the stack of rank 1 while it hangs"
    assert done.stderr.count("in hang\n") >= 2, "the stacks of both ranks"
