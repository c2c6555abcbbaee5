"""Metrics of a run: metrics.jsonl and evaluations.jsonl in its folder, and TensorBoard events.

A training step writes one record. What a name means is fixed here and nowhere else:

    step                     1 for the first update
    time                     Unix seconds at which the record was written
    loss                     what was minimised, mean over the step's updates
    episodes                 that were played; those of one turn are responses
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
    ratio_mean, ratio_max    of the probabilities of policy and sampling policy, over tokens
    importance_mean          weight that corrects the loss for the rollout engine's log-probs
    importance_corrected_share   share of tokens whose weight is cut or masked
    rejected_share           share of tokens of sequences that are left out
    rollout_train_kl         KL of the rollout engine from the trainer per token, nats
    stale_share              share of tokens that older weights sampled (rollout.oversample)
    stale_steps              by how many steps the oldest of them are older
    rollout_max_difference   largest log-prob difference of the two engines, nats
    kl_coefficient           where it adapts
    value_loss, value_clip_share, value_mean     of a critic
    explained_variance       share of the returns' variance that the critic's values explain
    gradient_norm            before clipping; mean over updates
    learning_rate            that of the last update; critic_*: the same of a critic of its own
    skipped_updates          updates whose gradient was not finite and was not applied
    updates_without_signal   updates whose gradient was nothing but rounding and was not applied
    sync_bytes, sync_tensors     that left the ranks that send, in the pushes since the last step
    sync_checked             tensors on servers' ranks whose checksums were compared in them
    sync_servers             that have the weights of the last of them
    skipped_bad              rows left out so far because they cannot be used
    skipped_long             rows left out so far because their prompts are too long
    tokens_per_second        tokens trained on, prompts included, over seconds/total
    seconds/<phase>          data, rollout, reward, plan, vision, reference, old_logprobs,
                             advantages, update, sync, checkpoint, ...
    seconds/total            the whole step, without evaluation and checkpoint
    memory_gib               peak memory of the driver's device (of its process on a CPU)

Shares lie in 0..1. A value that is not finite is written as null. An evaluation is a record of its
own (see megavlm/evaluation/result.py for its fields) at the number of updates done before it: 0 is
the start. Its seconds are in that record.
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


def evaluation_scalars(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """`evaluation/greedy` and so on, overall, and `evaluation/greedy/<category>`;
    `evaluation/failures`: answers whose reward failed.
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
    """Writes a run's metrics; used by one process, the driver."""

    def __init__(self, folder: Path | str, start_step: int = 0) -> None:
        """Opens the files of a run.

        start_step: the number of updates already done. What an earlier process wrote beyond that
        step is dropped, so that no step is there twice; with 0 everything is.
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS_FILE, EVALUATIONS_FILE):
            keep_records(
                self.folder / name,
                lambda record: start_step > 0 and record["step"] <= start_step,
            )
        self._last_step = start_step
        # Tells TensorBoard to forget what older event files hold from this step on.
        purge_step = start_step + 1 if start_step else 0
        self._events = SummaryWriter(str(self.folder / "tensorboard"), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One training step. Steps must rise."""
        assert step > self._last_step, f"step {step} after step {self._last_step}"
        self._last_step = step
        values = {name: float(value) for name, value in metrics.items()}
        record = {"step": step, "time": round(time.time(), 3), **values}
        append_record(self.folder / METRICS_FILE, record)
        self._scalars(step, values)

    def write_evaluation(self, step: int, evaluation: Mapping[str, Any]) -> None:
        """An evaluation after `step` updates; one of the same step is replaced."""
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
