"""FLOPs of a step by phase, as `models.cost` models them, compared with the measured seconds.

Not covered: a separate critic, communication, pipeline bubbles, recomputation, padding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from megavlm.data.media.image_processing import ProcessedImage
from megavlm.data.packs.trees import Tree
from megavlm.models.cost import LANGUAGE_SHARE, TOWER_SHARE, ModelCost


@dataclass(frozen=True)
class StepFlops:
    """Forward FLOPs of a step on all ranks. language: FLOPs of the language model with its output
    layer, each prompt counted once. tower: FLOPs of the vision tower, each image counted once.
    """

    language: float
    tower: float

    def __add__(self, other: Self) -> Self:
        return type(self)(self.language + other.language, self.tower + other.tower)

    @classmethod
    def of(
        cls,
        cost: ModelCost,
        trees: Sequence[Tree],
        images: Mapping[str, ProcessedImage],
        output: float,
    ) -> Self:
        """Return the FLOPs of a step's trees. output: FLOPs of the output layer per target
        token.
        """
        each = {key: cost.item(image) for key, image in images.items()}
        language = sum(
            cost.tree(tree, images) - sum(each[key] for key in tree.images) for tree in trees
        )
        targets = sum(
            len(segment.token_ids)
            for tree in trees
            for segment in tree.segments
            if segment.is_target
        )
        return cls(language + output * targets, sum(each.values()))

    def by_phase(self, passes: Mapping[str, float], *, tower_trained: bool) -> dict[str, Self]:
        """Return the FLOPs of each computing phase. passes: Forward passes of the language model,
        by phase. A frozen tower runs in the phase `vision`, a trained tower in each pass.
        """
        work = {
            phase: type(self)(count * self.language, count * self.tower if tower_trained else 0.0)
            for phase, count in passes.items()
        }
        return work if tower_trained else work | {"vision": type(self)(0.0, self.tower)}


def utilization(
    work: Mapping[str, StepFlops], seconds: Mapping[str, float], peak: float | None, ranks: int
) -> dict[str, float]:
    """Return the metric `flops_per_second` of the update and, for a known GPU, `mfu` and
    `modelled/<phase>`.

    work: FLOPs by phase, on all ranks. seconds: Measured seconds, as `seconds/<phase>`. peak: Peak
    FLOPs per second of each rank's GPU; None if not known.
    """
    update = work["update"].language + work["update"].tower
    metrics = {"flops_per_second": update / seconds["seconds/update"]}
    if peak is None:
        return metrics
    metrics["mfu"] = metrics["flops_per_second"] / (peak * ranks)
    for phase, flops in work.items():
        if modelled := flops.language / LANGUAGE_SHARE + flops.tower / TOWER_SHARE:
            metrics[f"modelled/{phase}"] = modelled / (peak * ranks)
    return metrics
