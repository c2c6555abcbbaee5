"""One update of a model: gradients over packs, then an optimizer step if there is a signal."""

from collections.abc import Sequence

from megavlm.data.packing import Pack
from megavlm.models.common.logprobs import Scoring
from megavlm.parallel.collectives import reduce_measures
from megavlm.parallel.mesh import Mesh
from megavlm.training.forward_backward import LossFunction, VisionFeatures, forward_backward
from megavlm.training.guards import SkipCounter
from megavlm.training.optimizer import Updater


def update(
    updater: Updater,
    packs: Sequence[Pack],
    features: VisionFeatures,
    scoring: Scoring,
    loss_function: LossFunction,
    mesh: Mesh,
    skips: SkipCounter,
    step: int,
    *,
    value_head_alone: bool = False,
) -> dict[str, float]:
    """Measures summed over all ranks, of one optimizer step or of none.

    There is none where a gradient is not finite (`skipped_updates`; RuntimeError after too many in
    a row), and none where the loss measures `signal` and no token has any: Adam divides by the
    gradient's size, and would make a whole step of rounding, or of what earlier gradients left in
    its moments (`updates_without_signal`). The schedule stands still with it.

    `value_head_alone`: nothing else moves.
    """
    updater.zero_gradients()
    reports = forward_backward(updater.chunks, packs, features, scoring, loss_function)
    measures = reduce_measures(reports, mesh)
    skipped = not updater.gradients_are_finite()
    skips.record(skipped, step + 1)
    idle = not skipped and measures.get("signal", 1.0) == 0
    measures["skipped_updates"] = float(skipped)
    measures["updates_without_signal"] = float(idle)
    measures["learning_rate"] = updater.learning_rate
    if skipped or idle:
        return measures | {"gradient_norm": float("nan") if skipped else 0.0}
    return measures | {"gradient_norm": updater.step(value_head_alone=value_head_alone)}
