"""A trainer of a tiny model on one rank: the passes and records of its steps, the KL coefficient,
and the loop around them.

One process builds the trainer and puts it through all cases, as building takes longer than a case.
"""

import math
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megavlm.config.algorithm import GRPO, PPO
from megavlm.config.load import load
from megavlm.data.packs.packing import Pack
from megavlm.process import STOP_SIGNALS, Stopped, stop_at_once
from megavlm.training import base_trainer
from megavlm.training.guards import SLURM_END, TimeLimit
from megavlm.training.policy_trainer import start_kl
from megavlm.training.streaming import StepGroups
from megavlm.training.weight_push import WeightPusher
from tests.parity.table import Ranks
from tests.support.fork import launch
from tests.support.trainers import PROMPTS, RESPONSES, NoServers, recipe, trainer_of, write_files
from tests.unit.training.test_run_on_driver import Sync

KEYS = (
    "algorithm.steps=4", "checkpoint.every=3", "evaluation.before=true", "evaluation.every=2",
    "evaluation.after=true",
)  # fmt: skip
REWARD = {"kl_in": "reward", "kl_estimator": "k1"}
# Settings, and the minibatches that each kind of log-probs is computed for; `*`: by the reference.
AT_THE_REFERENCE = [
    ({}, ["old: b"]),
    ({"old_logprobs": "rollout"}, ["reference: b"]),
    ({"kl_coefficient": 0.0}, ["old: b"]),
    (REWARD, ["old: b"]),
]
MOVED = [({}, ["reference*: ab", "old: b"]), (REWARD, ["reference*: ab", "old: ab"])]
HOUR = 3600.0
LIMITS = [
    (None, None, True),
    (2.0, None, False),
    (4.0, None, True),
    (4.0, 0.0, True),
    (None, 0.0, False),
]
KL = {"kl_target": 0.05, "kl_horizon": 10 * PROMPTS * RESPONSES}  # ten steps


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_files(tmp_path_factory.mktemp("trainer"))
    data = {"test_files": [str(folder / "rows.parquet")]}
    path = recipe(folder, folder, "qwen2_5_vl", Ranks(), data=data)
    return launch(1, all_cases, path)[0]


def all_cases(path: Path) -> dict[str, Any]:
    trainer = trainer_of(load(path, KEYS))
    seen = {"at the reference": [passes(trainer, settings) for settings, _ in AT_THE_REFERENCE]}
    seen["records"] = records(trainer)
    seen["moved"] = [passes(trainer, settings) for settings, _ in MOVED]
    seen["kl"] = [coefficients(trainer, *case) for case in ADAPTED]
    seen["stops"] = [run(trainer, train_2=asking(number)) for number in STOP_SIGNALS]
    seen["limits"] = [within(trainer, hours, end) for hours, end, _ in LIMITS]
    seen |= {
        "whole": run(trainer),
        "in an evaluation": run(trainer, evaluate_4=asking()),
        "before a step": run(trainer, evaluate_0=asking()),
        "evaluation left": run(trainer, 4, 2),
        "nothing left": run(trainer, 4, 4),
        "setups": [set_up(trainer, is_starting) for is_starting in (False, True)],
    }
    return seen


def passes(trainer: Any, settings: dict[str, Any]) -> list[str]:
    """Make a step's passes without a graph. Returns which packs have which log-probs then."""
    trainer.settings = GRPO(
        **{"kl_coefficient": 0.1, "minibatches": 2, "prompts_per_step": PROMPTS, **settings}
    )
    kept, reference = trainer.reference, trainer.reference
    trainer.reference = reference if trainer.settings.has_reference else None
    batch = trainer.share(trainer.plan(StepGroups(trainer.settings), next(trainer.stream())))
    features, started = trainer.encode(batch), []
    with kept.in_place():
        trainer.add_logprobs("values", batch, features, first=0)  # of the weights at the start
    started = [pack.columns.values for pack in batch.packs]
    unrouted: list[Pack] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pack, "without_routed_experts", lambda pack: (unrouted.append(pack), pack)[1])
        trainer.add_reference_logprobs(batch, features)
        assert trainer.is_reference or trainer.reference is None or unrouted, "it routes for itself"
        trainer.add_old_logprobs(batch, features)
    trainer.reference = kept
    made = []
    for name in ("reference", "old"):
        found = {
            letter: [getattr(pack.columns, f"{name}_logprobs") for pack in packs]
            for letter, packs in zip("ab", batch.minibatches, strict=True)
        }
        packs = "".join(letter for letter, values in found.items() if values[0] is not None)
        values = [value for each in found.values() for value in each]
        of_start = all(map(torch.equal, started, values)) if packs == "ab" else False
        made += [f"{name}{'*' * of_start}: {packs}"] * bool(packs)
    return made


def test_the_reference_is_computed_once_the_policy_has_left_it(seen: Any) -> None:
    assert seen["at the reference"] == [expected for _, expected in AT_THE_REFERENCE]
    assert seen["moved"] == [expected for _, expected in MOVED]


def records(trainer: Any) -> list[dict[str, float]]:
    """Make a step after a first push, one more, and one without a push. Returns their metrics."""
    found: list[dict[str, float]] = []
    driver, state = trainer.driver, trainer.train_state
    driver.recorder.record_step = lambda step, metrics, *_: found.append(metrics)
    driver.planner.utilization = lambda passes, seconds: dict(passes)
    trainer.settings = state.config.algorithm
    trainer.passed_tokens.clear()
    trainer.weights = WeightPusher(state, Sync([]), None, None)  # type: ignore[arg-type]
    trainer.weights.push()
    for _ in range(3):
        trainer.train_step()
        if state.step == 2:
            trainer.weights = NoServers(state, None, None, None)
    return found


def test_metrics_of_a_step_count_what_was_sent_and_computed(seen: Any) -> None:
    names = ("sync_bytes", "sync_checked", "sync_servers")
    first, second, third = seen["records"]
    assert [first[name] for name in names] == [14, 6, 1]
    assert [second[name] for name in names] == [7, 3, 1]
    assert not [name for name in third if name.startswith("sync")]
    assert "reference" not in first and second["reference"] == third["reference"] == 1.0


# Settings, the KL of each step, the coefficient of each step and the next one.
ADAPTED = [
    (KL, [0.5, 0.5, 0.0], [0.1, 0.1 * 1.02, 0.1 * 1.02**2, 0.1 * 1.02**2 * 0.98]),
    (KL, [math.nan, 0.5], [0.1, 0.1, 0.1 * 1.02]),
    (KL, [math.inf, 0.5], [0.1, 0.1, 0.1 * 1.02]),
    ({}, [0.5, 0.0], [0.1] * 3),
]


def coefficients(trainer: Any, settings: dict[str, Any], measured: list[float], _: Any) -> Any:
    trainer.settings = replace(trainer.train_state.config.algorithm, **settings)
    trainer.state, used = {"kl_coefficient": 0.1}, []
    for kl in measured:
        metrics = {"kl_reference": kl}
        trainer.adapt_kl(metrics)
        used.append(metrics.get("kl_coefficient", 0.1))
    return [*used, trainer.state["kl_coefficient"]]


def test_the_kl_coefficient_follows_its_target(seen: Any) -> None:
    """A KL that is not finite changes nothing, and without a target it stays."""
    for found, (_, _, expected) in zip(seen["kl"], ADAPTED, strict=True):
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changed", "coefficient"),
    [({}, 0.13), ({"kl_coefficient": 0.2}, 0.2), ({"kl_target": None}, 0.1), ({"lam": 0.9}, 0.13)],
)
def test_a_resume_goes_on_with_the_adapted_one_unless_the_recipe_has_another(
    changed: dict[str, Any], coefficient: float
) -> None:
    state: dict[str, float] = {}
    settings = {"kl_coefficient": 0.1, "kl_target": 0.05}
    start_kl(PPO(**settings), state)
    state["kl_coefficient"] = 0.13
    start_kl(PPO(**settings | changed), state)
    assert state["kl_coefficient"] == coefficient


def run(
    trainer: Any,
    step: int = 0,
    evaluated_step: int | None = None,
    limit: TimeLimit | None = None,
    **events: Callable[[], object],
) -> Any:
    """Run the loop with steps that only count. Returns whether it finished, what it did, and the
    step that was evaluated last. events: Called at the event of their name.
    """
    state, log = trainer.train_state, []
    state.step, state.evaluated_step = step, evaluated_step
    trainer.weights = WeightPusher(state, Sync([]), None, None)  # type: ignore[arg-type]

    def do(what: str) -> None:
        events.get(what.replace(" ", "_"), lambda: None)()
        log.append(what)

    def train_step() -> None:
        state.step += 1
        do(f"train {state.step}")

    trainer.train_step, trainer.save = train_step, lambda: do(f"save {state.step}")
    trainer.driver.evaluate = lambda step, refit: do(f"evaluate {step}")
    return trainer.run(limit or TimeLimit(None, 0.0)), log, state.evaluated_step


def asking(number: int = signal.SIGTERM) -> Callable[[], object]:
    return lambda: signal.raise_signal(number)


def test_evaluations_come_before_the_save_that_records_their_scores(seen: Any) -> None:
    finished, log, _ = seen["whole"]
    assert finished and log == [
        "evaluate 0", "train 1", "train 2", "evaluate 2", "train 3", "save 3", "train 4",
        "evaluate 4", "save 4",
    ]  # fmt: skip


def test_a_request_in_a_step_saves_without_the_evaluation_that_is_due(seen: Any) -> None:
    stopped = (False, ["evaluate 0", "train 1", "train 2", "save 2"], 0)
    assert seen["stops"] == [stopped] * len(STOP_SIGNALS)


def test_a_request_in_an_evaluation_breaks_it_off_and_saves(seen: Any) -> None:
    finished, log, _ = seen["in an evaluation"]
    assert not finished and log[-2:] == ["train 4", "save 4"]


def test_a_restart_makes_the_evaluation_that_was_broken_off_and_saves_no_step_twice(
    seen: Any,
) -> None:
    assert seen["evaluation left"] == (True, ["evaluate 4"], 4)
    assert seen["nothing left"] == (True, [], 4)


def test_a_request_before_the_first_step_saves_nothing(seen: Any) -> None:
    assert seen["before a step"] == (False, [], None)


def test_a_request_outside_of_steps_raises_at_once() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop_at_once()
    try:
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def within(trainer: Any, hours: float | None, slurm_end: float | None) -> Any:
    """Run the loop in a time limit. Steps take 36 minutes, the first one is late."""
    now = [1e9]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now[0])
        patch.delenv(SLURM_END, raising=False)
        if slurm_end is not None:
            patch.setenv(SLURM_END, str(now[0] + slurm_end))
        passes = lambda: now.__setitem__(0, now[0] + 0.6 * HOUR)  # noqa: E731
        steps = {f"train_{step}": passes for step in range(1, 5)}
        return run(trainer, limit=TimeLimit(hours, now[0]), **steps)


def test_the_time_limit_leaves_two_of_the_longest_steps(seen: Any) -> None:
    """Twice 36 minutes and one more are left after step 1 of a limit of four hours, and not of one
    of two.
    """
    assert [finished for finished, _, _ in seen["limits"]] == [expected for *_, expected in LIMITS]
    assert seen["limits"][1][1][-2:] == ["train 2", "save 2"]


def set_up(trainer: Any, is_starting: bool) -> list[str]:
    """Set the trainer up anew, with servers of which some may still start."""
    log: list[str] = []
    pool = SimpleNamespace(is_starting=is_starting, wait_for_starts=lambda: log.append("wait"))
    pusher = SimpleNamespace(push=lambda: log.append("push"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base_trainer, "WeightPusher", lambda *_: pusher)
        patch.setattr(trainer, "resume", lambda: log.append("resume"))
        patch.setattr(trainer, "sync", Sync([]))
        patch.setattr(trainer.driver, "connection", SimpleNamespace(server_pool=pool, memory=None))
        patch.setattr(trainer.driver, "start", lambda *_: log.append("start"))
        trainer.setup()
    return log


def test_servers_are_waited_for_once_the_checkpoint_is_loaded(seen: Any) -> None:
    """They start meanwhile. Those that share GPUs have started before."""
    assert seen["setups"] == [["resume", *["wait"] * starts, "start", "push"] for starts in (0, 1)]
