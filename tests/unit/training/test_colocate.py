"""Who has the memory of shared GPUs, phase by phase: what leaves goes before anything comes."""

import itertools
from typing import Any

import pytest

from megavlm.training import colocate
from megavlm.training.colocate import CRITIC, RESIDENT, SharedMemory

POLICY = ("parameters", "gradients", "optimizer")


class Recorder:
    """Stands in for the servers' memory and for a part of the trainer's."""

    def __init__(self, log: list[str], name: str = "") -> None:
        self.log, self.name = log, name

    def release(self, tags: list[str]) -> None:
        self.log += [f"-{tag}" for tag in tags]

    def resume(self, tags: list[str], *, starts: bool) -> None:
        self.log += [f"+{tag}" for tag in tags] + ["may start"] * starts

    def to_host(self) -> None:
        self.log.append(f"-{self.name}")

    def to_device(self) -> None:
        self.log.append(f"+{self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    monkeypatch.setattr(colocate, "barrier", lambda mesh: log.append("all"))
    return log


def shared(
    log: list[str], names: tuple[str, ...] = POLICY, *, keeps_weights: bool = True
) -> SharedMemory:
    parts: Any = {name: Recorder(log, name) for name in names}
    servers: Any = Recorder(log)
    mesh: Any = None
    return SharedMemory(parts, servers, mesh, keeps_weights=keeps_weights)


def test_the_order_of_a_step(log: list[str]) -> None:
    gpus = shared(log)
    for phase in ("push", "push", "generate", "train"):
        gpus.switch(phase)
    assert " ".join(log).split(" all") == [
        "-optimizer -gradients",
        " +weights",
        " -parameters",
        " +kv_cache +cuda_graph may start",
        " -cuda_graph -kv_cache -weights",
        " +parameters +gradients +optimizer",
        "",
    ]


def test_weights_that_were_released_without_a_copy_are_pushed_again(log: list[str]) -> None:
    gpus = shared(log, keeps_weights=False)
    seen = []
    for phase in ("push", "generate", "train", "push"):
        gpus.switch(phase)
        seen.append(gpus.needs_push)
    assert seen == [False, False, True, False]
    assert not shared(log).needs_push, "the servers have a copy"


def test_a_critic_is_there_in_training_alone(log: list[str]) -> None:
    gpus = shared(log, (*POLICY, *CRITIC))
    gpus.switch("push")
    assert log[:-3] == [f"-{name}" for name in reversed((*POLICY[1:], *CRITIC))]
    del log[:]
    gpus.switch("generate")
    assert not [entry for entry in log if "critic" in entry]
    gpus.switch("train")
    assert log[-4:-1] == [f"+{name}" for name in CRITIC]


@pytest.mark.parametrize("critic", [(), CRITIC])
def test_never_more_than_a_phase_needs(log: list[str], critic: tuple[str, ...]) -> None:
    names = (*POLICY, *critic)
    for path in itertools.product(RESIDENT, repeat=3):
        gpus, held = shared(log, names), set(names)
        for phase in path:
            del log[:]
            gpus.switch(phase)
            for entry in log:
                if entry[0] == "-":
                    held.remove(entry[1:])
                elif entry[0] == "+":
                    held.add(entry[1:])
                    assert held <= set(RESIDENT[phase]), (path, phase)
            assert held == set(RESIDENT[phase]) - (set(CRITIC) - set(critic)), (path, phase)
