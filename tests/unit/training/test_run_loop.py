"""The loop around steps: what is evaluated and saved, before and after a request to stop."""

import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from megavlm.process import STOP_SIGNALS, Stopped, stop_at_once
from megavlm.training import base_trainer, guards
from megavlm.training.base_trainer import BaseTrainer
from megavlm.training.driver import Driver
from megavlm.training.guards import SLURM_END, TimeLimit

HOUR = 3600.0


class Evaluations(Driver):
    """A driver that passes on what it is asked for. It has no data."""

    def __init__(self, do: Callable[[str], object]) -> None:
        self.do = do
        self.connection = None

    def start(self, step: int, state: object) -> None:
        self.do("start")

    def evaluate(self, step: int, refit: Callable[[], None]) -> None:
        self.do(f"evaluate {step}")


class Trainer(BaseTrainer):
    """Writes down what it is asked to do. `events`: called at the event of its name."""

    def __init__(
        self, step: int = 0, *, evaluated_step: int | None = None, **events: Callable[[], object]
    ) -> None:
        self.log: list[str] = []
        self.events = events
        config = SimpleNamespace(
            algorithm=SimpleNamespace(steps=4),
            evaluation=SimpleNamespace(before=True, every=2, after=True),
            checkpoint=SimpleNamespace(every=3),
        )
        self.train_state = SimpleNamespace(  # type: ignore[assignment]
            config=config,
            step=step,
            evaluated_step=evaluated_step,
            saver=nullcontext(),
            phases=lambda name: nullcontext(),
            progress=SimpleNamespace(begin=lambda what: None, count=lambda step, last: None),
            updater=SimpleNamespace(finish=lambda: None),
            start_step_clock=lambda: None,
            is_due=lambda every: self.train_state.step % every == 0,
        )
        self.train_state.saver.poll = lambda: None  # type: ignore[method-assign]
        self.weights = SimpleNamespace(  # type: ignore[assignment]
            push_if_changed=lambda: None, run_on_driver=lambda work: work(), refit=None
        )
        self.driver = Evaluations(self.do)

    def do(self, what: str) -> None:
        self.events.get(what.replace(" ", "_"), lambda: None)()
        self.log.append(what)

    def train_step(self) -> None:
        self.train_state.step += 1
        self.do(f"train {self.train_state.step}")

    def save(self) -> None:
        self.do(f"save {self.train_state.step}")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "any_rank", bool)


def ask(number: int = signal.SIGTERM) -> Callable[[], object]:
    return lambda: signal.raise_signal(number)


def run(trainer: Trainer, limit: TimeLimit | None = None) -> tuple[bool, list[str]]:
    return trainer.run(limit or TimeLimit(None, 0.0)), trainer.log


def test_evaluations_come_before_the_save_that_records_their_scores() -> None:
    assert run(Trainer()) == (
        True,
        ["evaluate 0", "train 1", "train 2", "evaluate 2", "train 3", "save 3", "train 4",
         "evaluate 4", "save 4"],
    )  # fmt: skip


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_request_in_a_step_saves_without_the_evaluation_that_is_due(number: int) -> None:
    trainer = Trainer(train_2=ask(number))
    assert run(trainer) == (False, ["evaluate 0", "train 1", "train 2", "save 2"])
    assert trainer.train_state.evaluated_step == 0


def test_a_request_in_an_evaluation_breaks_it_off_and_saves() -> None:
    trainer = Trainer(evaluate_4=ask())
    finished, log = run(trainer)
    assert not finished and log[-2:] == ["train 4", "save 4"]


def test_a_restart_makes_the_evaluation_that_was_broken_off_and_saves_no_step_twice() -> None:
    assert run(Trainer(4, evaluated_step=2)) == (True, ["evaluate 4"])
    assert run(Trainer(4, evaluated_step=4)) == (True, [])


def test_a_request_before_the_first_step_saves_nothing() -> None:
    assert run(Trainer(evaluate_0=ask())) == (False, [])


def test_a_request_outside_of_steps_raises_at_once() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop_at_once()
    try:
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("hours", "slurm_end", "finishes"),
    [
        (None, None, True),
        (2.0, None, False),
        (4.0, None, True),
        (4.0, 0.0, True),
        (None, 0.0, False),
    ],
)
def test_the_time_limit_leaves_two_of_the_longest_steps(
    monkeypatch: pytest.MonkeyPatch, hours: float | None, slurm_end: float | None, finishes: bool
) -> None:
    """Steps of 36 minutes, the first one late: twice that and a minute are left after step 1 of a
    limit of four hours, and not of one of two.
    """
    now = [1e9]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.delenv(SLURM_END, raising=False)
    if slurm_end is not None:
        monkeypatch.setenv(SLURM_END, str(now[0] + slurm_end))
    limit = TimeLimit(hours, now[0])
    trainer = Trainer()
    trainer.train_step = lambda: (  # type: ignore[method-assign]
        now.__setitem__(0, now[0] + 0.6 * HOUR), Trainer.train_step(trainer)
    )  # fmt: skip
    assert run(trainer, limit)[0] == finishes
    if hours == 2.0:
        assert trainer.log[-2:] == ["train 2", "save 2"]


@pytest.mark.parametrize("starts", [False, True])
def test_servers_are_waited_for_once_the_checkpoint_is_loaded(
    monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    """They start meanwhile. Those that share GPUs have started before."""
    trainer = Trainer()
    do, config = trainer.do, trainer.train_state.config
    config.rollout = SimpleNamespace(colocate=False)
    pool = SimpleNamespace(is_starting=starts, wait_for_starts=lambda: do("wait"))
    assert trainer.driver is not None
    trainer.driver.connection = SimpleNamespace(server_pool=pool)  # type: ignore[assignment]
    trainer.sync = SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setattr(trainer, "resume", lambda: do("resume"))
    pusher = SimpleNamespace(push=lambda: do("push"))
    monkeypatch.setattr(base_trainer, "WeightPusher", lambda *_: pusher)
    trainer.setup()
    assert trainer.log == ["resume", *["wait"] * starts, "start", "push"]
