"""Metrics of a run: metrics.jsonl and evaluations.jsonl in its folder, and TensorBoard events.

A training step writes one record. The meaning of each name:

    step                     1 for the first update
    time                     Unix seconds at which the record was written
    loss                     training loss, mean over the step's updates
    episodes                 number of episodes; an episode of one turn is a response
    reward                   mean reward of the step's responses
    reward/<category>        the same, of the prompts of one category
    reward/part/<name>       mean of a part of the reward, before its weight
    reward_failures          responses whose reward could not be computed
    accuracy                 share of responses that are correct
    accuracy/<category>      the same, of the prompts of one category
    turns                    mean responses per episode, where there are several
    curriculum_stage         from 1
    response_length          mean tokens per response
    truncated_share          share of responses that ran into the token limit
    groups_without_signal    share of groups whose rewards are all equal
    kl_reference             KL to the reference per token, nats (estimator of the recipe)
    entropy                  mean entropy of the policy per token, nats
    clip_share               share of tokens at which the policy loss is clipped; clip_low_share,
                             clip_high_share, clip_dual_share: by each bound
    ratio_mean, ratio_max    probability ratio of policy and sampling policy, over tokens
    importance_mean          mean importance weight of trainer against rollout log-probs
    importance_corrected_share   share of tokens whose weight is truncated or masked
    rejected_share           share of tokens in rejected sequences
    rollout_train_kl         KL of the rollout engine from the trainer per token, nats
    stale_share              share of tokens that older weights sampled (rollout.oversample)
    stale_steps              age in steps of the oldest of these weights
    rollout_max_difference   largest log-prob difference of the two engines, nats
    kl_coefficient           adaptive KL coefficient
    value_loss, value_clip_share, value_mean     of a critic
    explained_variance       share of the returns' variance that the critic's values explain
    gradient_norm            before clipping; mean over updates
    learning_rate            of the last update; critic_*: the same for a separate critic
    skipped_updates          updates whose gradient was not finite and was not applied
    updates_without_signal   updates without any advantage or loss signal, which were skipped
    sync_bytes, sync_tensors     sent by the trainer in weight syncs since the last step
    sync_checked             tensors on server ranks whose checksums were compared
    sync_servers             servers that have the last synced weights
    skipped_bad              rows skipped so far because they cannot be used
    skipped_long             rows skipped so far because their prompts are too long
    tokens_per_second        tokens trained on, prompts included, over seconds/total
    seconds/<phase>          data, rollout, reward, plan, vision, reference, old_logprobs,
                             advantages, update, sync, checkpoint, ...
    seconds/total            the whole step, without evaluation and checkpoint
    memory_gib               peak memory of the driver's device (of its process on a CPU)

Shares are in 0..1. A value that is not finite is written as null. An evaluation is a separate
record (its fields: megavlm/evaluation/result.py) at the number of updates before it; 0 is the
start. Its seconds are in that record.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.utils.tensorboard import SummaryWriter

from megavlm.observability.records import (
    append_record,
    keep_records,
    read_records,
    write_records,
)

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"


def reward_points(run_dir: Path | str) -> list[tuple[int, float]]:
    """Return (step, reward) of each step that has one."""
    return [
        (record["step"], record["reward"])
        for record in read_records(Path(run_dir) / METRICS_FILE)
        if record.get("reward") is not None
    ]


def evaluation_scalars(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return an evaluation as metrics: `evaluation/<measure>`, `evaluation/<measure>/<category>`,
    and `evaluation/failures`, the number of responses whose reward failed.
    """
    scalars = {}
    for name, measure in evaluation.items():
        if name == "failures":
            scalars[f"evaluation/{name}"] = float(sum(measure.values()))
        elif isinstance(measure, Mapping):
            scalars[f"evaluation/{name}"] = measure["overall"]["share"]
            for category, share in measure["by_category"].items():
                scalars[f"evaluation/{name}/{category}"] = share["share"]
    return scalars


class MetricsWriter:
    """Writer of a run's metrics; used by one process, the driver."""

    def __init__(self, folder: Path | str, start_step: int = 0) -> None:
        """Open the files of a run.

        start_step: number of updates already done. Records of an earlier process beyond that step
        are deleted, so that no step is there twice; with 0 all records are deleted.
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS_FILE, EVALUATIONS_FILE):
            keep_records(
                self.folder / name,
                lambda record: start_step > 0 and record["step"] <= start_step,
            )
        self._last_step = start_step
        # TensorBoard ignores what older event files hold from this step on.
        purge_step = start_step + 1 if start_step else 0
        self._events = SummaryWriter(str(self.folder / "tensorboard"), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one training step. Steps must rise."""
        assert step > self._last_step, f"step {step} after step {self._last_step}"
        self._last_step = step
        values = {name: float(value) for name, value in metrics.items()}
        record = {"step": step, "time": round(time.time(), 3), **values}
        append_record(self.folder / METRICS_FILE, record)
        self._scalars(step, values)

    def write_evaluation(self, step: int, evaluation: Mapping[str, Any]) -> None:
        """Write an evaluation after `step` updates, in place of an earlier one of that step."""
        path = self.folder / EVALUATIONS_FILE
        others = [record for record in read_records(path) if record["step"] != step]
        record = {"step": step, "time": round(time.time(), 3), **evaluation}
        write_records(path, [*others, record])
        self._scalars(step, evaluation_scalars(evaluation))

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
