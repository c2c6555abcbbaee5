"""A step whose groups arrive in a stream of batches is the step that has them all at once, up to
the order of sums: in its gradients, its updates and its metrics, under every layout and with every
algorithm.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megavlm.config.load import load
from megavlm.inference.errors import RolloutServerError
from megavlm.rollout.buffer import StreamBatch
from megavlm.rollout.trajectory import Group
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS, Ranks
from tests.support.fork import launch
from tests.support.levels import slow
from tests.support.trainers import ARRIVAL, GROUP, Source, recipe, trainer_of, write_files

pytestmark = pytest.mark.distributed

STEPS = 2
KL_IN_REWARD = {"kl_in": "reward", "kl_estimator": "k1"}


def train(recipe: Path, overrides: Sequence[str]) -> Any:
    """Return this rank's first moments, which are sums of gradients, and parameters after the
    steps, and the driver's metrics.
    """
    config = load(recipe, overrides)
    trainer = trainer_of(config)
    updaters = [trainer.train_state.updater]
    if getattr(trainer, "critic", None) is not None:
        updaters.append(trainer.critic.updater)
    records: list[dict[str, float]] = []
    if trainer.driver is not None:
        trainer.driver.recorder.record_step = lambda step, metrics, *_: records.append(metrics)
    for _ in range(STEPS):
        trainer.train_step()
    states = {
        f"{updater_number} {number} {name}": value
        for updater_number, updater in enumerate(updaters)
        for number, part in enumerate(updater.optimizer.chained_optimizers)
        if part.optimizer is not None
        for index, state in enumerate(part.optimizer.state.values())
        for name, value in {f"{index} {key}": x for key, x in state.items()}.items()
        if "exp_avg" in name and "sq" not in name
    }
    weights = {
        name: p.detach()
        for chunk in trainer.train_state.model
        for name, p in chunk.named_parameters()
        if p.requires_grad
    }
    return states, weights, records


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("streaming"))


def norm(arrays: Iterable[Any]) -> float:
    return math.sqrt(sum(float((x.astype(np.float64) ** 2).sum()) for x in arrays))


def compare(recipe: Path, ranks: Ranks) -> list[dict[str, float]]:
    """Train serially and in a stream of batches, and compare all ranks. Returns the metrics of the
    streamed batches.
    """
    serial, stream = (
        launch(ranks.world_size, train, recipe, [f"rollout.streaming={is_streamed}"])
        for is_streamed in ("false", "true")
    )
    for rank, (ours, theirs) in enumerate(zip(stream, serial, strict=True)):
        # Adam divides by the size of a gradient, and so enlarges the rounding of the smallest.
        for found, expected, most in zip(ours[:2], theirs[:2], (1e-6, 1e-5), strict=True):
            assert found.keys() == expected.keys() and len(found) > 3
            off = norm(found[name] - value for name, value in expected.items())
            whole = norm(expected.values())
            assert whole > 0 and off <= most * whole, (rank, off / whole)
    ours, theirs = stream[0][2], serial[0][2]
    assert len(ours) == STEPS
    assert [metrics["waves"] for metrics in ours] == [1, len(ARRIVAL)]
    for found, expected in zip(ours, theirs, strict=True):
        for name, value in expected.items():
            if not name.startswith(("seconds/", "tokens_per", "flops", "memory", "trainer_idle")):
                assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    assert ours[0]["gradient_norm"] > 0.01
    result: list[dict[str, float]] = ours
    return result


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2_5_vl", "PP2"),
        *slow(
            ("qwen2_5_vl", "CP2xDP2"),
            ("qwen2_5_vl", "PP2 virtual 2"),
            ("qwen3_vl", "TP2+SPxPP2"),
            ("qwen3_vl_moe", "EP2xPP2"),
        ),
    ],
)
def test_a_step_in_a_stream_is_the_step(
    files: Path, tmp_path: Path, family: str, layout: str
) -> None:
    """With a trained tower, and old log-probs of a second minibatch."""
    ranks = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    options = {"freeze_tower": False, "freeze_merger": False}
    algorithm = GROUP | {"minibatches": 2}
    made = recipe(files, tmp_path, family, ranks, model=options, algorithm=algorithm)
    compare(made, ranks)


ALGORITHMS: dict[str, dict[str, Any]] = {
    "token mean": {},
    "sequence mean": {"loss_aggregation": "sequence_mean"},
    "sequence sum, cut responses left out": {
        "loss_aggregation": "sequence_sum", "mask_truncated": True,
    },
    "constant": {"loss_aggregation": "constant", "normalize_by_std": False},
    "old log-probs of the rollout": {"old_logprobs": "rollout", "importance": "none"},
    "KL in the reward": {**KL_IN_REWARD, "advantage_estimator": "rloo"},
    "three updates of two epochs": {"minibatches": 3, "epochs": 2, "kl_target": 0.1},
    "gspo": {"policy_loss": "gspo", "loss_aggregation": "sequence_mean"},
    "reinforce++": {**KL_IN_REWARD, "advantage_estimator": "reinforce_plus_plus"},
    "reinforce++ baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline", "minibatches": 2,
    },
    "ppo": {"name": "ppo", "kl_in": "reward", "critic_warmup_steps": 0},
    "ppo with a shared critic": {"name": "ppo", "critic": "shared", "critic_warmup_steps": 1},
}  # fmt: skip


IN_QUICK = ("reinforce++", "three updates of two epochs")


@pytest.mark.parametrize(
    "name",
    [
        *IN_QUICK,
        *slow(*(name for name in ALGORITHMS if name not in IN_QUICK)),
    ],
)
def test_every_algorithm_takes_streaming(files: Path, tmp_path: Path, name: str) -> None:
    ranks = LAYOUTS["DP2"]
    made = recipe(files, tmp_path, "qwen2_5_vl", ranks, algorithm=GROUP | ALGORITHMS[name])
    compare(made, ranks)


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(
            {"optimizer": {"megatron": {"overlap_grad_reduce": True}}}, id="reduced while it runs"
        ),
        pytest.param({"lora": {"rank": 4, "alpha": 8.0}}, id="adapters", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_reduced_once(files: Path, tmp_path: Path, sections: Any) -> None:
    ranks = LAYOUTS["DP2"]
    optimizer = {"lr": 1e-3, "warmup_steps": 0, "clip_grad": 0.0} | sections.pop("optimizer", {})
    made = recipe(files, tmp_path, "qwen2_5_vl", ranks, optimizer=optimizer, **sections)
    compare(made, ranks)


def events_of_a_step(recipe: Path) -> Any:
    """Return what the trainer does in its second step, between the streamed batches that it asks
    for.
    """
    trainer = trainer_of(load(recipe, ["rollout.streaming=true"]))
    trainer.train_step()
    source, phases, events = trainer.source, trainer.train_state.phases, list[str]()
    stream = source.stream

    def noted(*args: Any) -> Iterator[StreamBatch[Group]]:
        for number, streamed in enumerate(stream(*args)):
            gradient = max(
                float(buffer.grad_data.abs().max())
                for chunk in trainer.train_state.updater.chunks
                for buffer in chunk.buffers
            )
            # Before the first streamed batch they are the last step's.
            events.append(f"wave {number + 1}" + ", after gradients" * (number > 0 < gradient))
            yield streamed

    source.stream, phases._begun = noted, events.append
    trainer.train_step()
    return events


def test_the_trainer_has_worked_on_a_wave_before_the_next_one_arrives(
    files: Path, tmp_path: Path
) -> None:
    (events,) = launch(1, events_of_a_step, recipe(files, tmp_path, "qwen2_5_vl", Ranks()))
    work = ["plan", "vision", "reference", "old logprobs", "advantages", "update"]
    of_batches = [
        event
        for number in range(len(ARRIVAL))
        for event in (f"wave {number + 1}" + ", after gradients" * (number > 0), *work)
    ]
    assert events[: len(of_batches)] == of_batches
    assert events[len(of_batches) :][:3] == ["advantages", "update", "sync"]


class Faulty(Source):
    """fault: A function of a streamed batch's number and groups, called before the streamed batch
    arrives.
    """

    fault: Any = staticmethod(lambda number, groups: None)

    def stream(self, *args: Any) -> Iterator[StreamBatch[Group]]:
        for number, streamed in enumerate(super().stream(*args)):
            self.fault(number, streamed.groups)
            yield streamed


def after_a_fault(recipe: Path, fault: str) -> Any:
    """Return the metrics of a step with a fault and of the next, whether the first changed the
    weights, and the steps that count.
    """
    trainer = trainer_of(load(recipe, ["rollout.streaming=true"]), Faulty)
    driver, state, records = trainer.driver, trainer.train_state, list[dict[str, float]]()
    driver.recorder.record_step = lambda step, metrics, *_: records.append(metrics)
    trainer.train_step()

    def fail(number: int, groups: Sequence[Group]) -> None:
        if state.step != 1 or number != 2:
            return
        if fault == "server":
            raise RolloutServerError("all servers are lost")
        for episode in groups[0].episodes:
            (response,) = episode.responses
            episode.responses[:] = [
                replace(response, logprobs=np.full_like(response.logprobs, math.nan))
            ]

    trainer.source.fault = fail
    before = [p.detach().clone() for p in state.model[0].parameters()]
    try:
        trainer.train_step()
    except RolloutServerError as error:
        records.append({"error": str(error)})  # type: ignore[dict-item]
    is_same = all(map(torch.equal, before, state.model[0].parameters()))
    if fault != "server":
        trainer.train_step()
    return records[1:], is_same, state.step


def test_an_error_within_a_step_leaves_the_weights(files: Path, tmp_path: Path) -> None:
    made = recipe(files, tmp_path, "qwen2_5_vl", Ranks())
    (((error,), is_same, step),) = launch(1, after_a_fault, made, "server")
    assert error == {"error": "all servers are lost"} and is_same and step == 1


def test_one_wave_without_finite_gradients_skips_the_update(files: Path, tmp_path: Path) -> None:
    made = recipe(files, tmp_path, "qwen2_5_vl", Ranks())
    (((skipped, following), is_same, step),) = launch(1, after_a_fault, made, "nan")
    assert skipped["skipped_updates"] == 1 and is_same and step == 3
    assert following["skipped_updates"] == 0 and 0.01 < following["gradient_norm"] < 1e3
