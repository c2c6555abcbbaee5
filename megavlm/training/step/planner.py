"""The planner of steps: packs and images for each rank, and the FLOPs of the step planned last."""

from collections.abc import Mapping, Sequence
from typing import Any

from megavlm.config.schema import Config
from megavlm.data.packs.trees import Tree
from megavlm.data.processor import Processor, Prompt
from megavlm.families import family
from megavlm.models.cost import ModelCost
from megavlm.parallel import platform
from megavlm.parallel.mesh import Mesh
from megavlm.training.step.image_plan import plan_images
from megavlm.training.step.rank_images import image_places
from megavlm.training.step.step_plan import (
    PackShape,
    StepPlan,
    plan_step,
    schedule_of,
    shown_images,
)
from megavlm.training.utilization import StepFlops, utilization


class StepPlanner:
    """Planner of steps for a layout, by modelled FLOPs. Driver only.

    rows: Sources of the rows of the step planned last.
    """

    rows: list[str]

    def __init__(self, config: Config, hf_config: Any, mesh: Mesh, processor: Processor) -> None:
        self._mesh, self._pack_tokens = mesh, config.data.pack_tokens
        self._merge_size = processor.merge_size
        parts = family(hf_config.model_type)
        self._cost = ModelCost.of(parts.mapping(hf_config), parts.architecture(hf_config))
        text = hf_config.get_text_config()
        self._output_cost = 2.0 * text.vocab_size * text.hidden_size  # per target token
        self.shape = PackShape(
            vision_token_ids=processor.vision_token_ids,
            multiple=mesh.layout.tensor if config.parallel.sequence else 1,
            context_size=mesh.layout.context,
        )

    def plan(
        self,
        minibatches: Sequence[Sequence[Tree]],
        prompts: Sequence[Prompt],
        drawn: Sequence[Prompt],
        *,
        tower_trained: bool,
        is_first: bool = True,
        loss_scales: Sequence[float] | None = None,
    ) -> StepPlan:
        """Return the plan of a step or of one of its streamed batches: the trees of each minibatch,
        packed and balanced over the data ranks, and the images of `prompts`. drawn: The original
        prompts; ranks read their images from the data files again, so that rank 0 need not send
        their pixels. is_first: False for later streamed batches of a step. loss_scales: See
        StepPlan.
        """
        if is_first:
            self.rows, self._flops = [], StepFlops(0.0, 0.0)
        self.rows += [prompt.row.source for prompt in drawn]
        images = {image.key: image for prompt in prompts for image in prompt.images}
        trees = [tree for group in minibatches for tree in group]
        self._tower_trained = tower_trained
        self._flops += StepFlops.of(self._cost, trees, images, self._output_cost)
        grids = {key: image.grids for key, image in images.items()}
        ranks = plan_step(
            minibatches,
            num_ranks=self._mesh.data_size,
            max_tokens=self._pack_tokens,
            schedule=schedule_of(self._mesh.layout, self._cost),
            cost=lambda tree: self._cost.segments(tree, images),
        )
        layout, places = self._mesh.layout, image_places(drawn)
        return StepPlan(
            minibatches=ranks,
            images=plan_images(
                [shown_images(minibatches) for minibatches in ranks],
                grids,
                {key: self._cost.item(image) for key, image in images.items()},
                slots=layout.tensor * layout.context,
                # A trained tower encodes a pack's images at once, so this many patches fit in
                # memory.
                round_patches=self._pack_tokens * self._merge_size**2,
            ),
            num_tokens=sum(tree.num_tokens for tree in trees),
            sources={key: places.get(image.digest, image) for key, image in images.items()},
            tower_trained=tower_trained,
            shape=self.shape,
            loss_scales=loss_scales,
        )

    def utilization(
        self, passes: Mapping[str, float], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return FLOPs per second and modelled seconds of the step planned last. passes: Forward
        passes of the language model, by phase. seconds: Measured seconds by phase, from
        `Phases.take`.
        """
        work = self._flops.by_phase(passes, tower_trained=self._tower_trained)
        return utilization(work, seconds, platform.peak_flops(), self._mesh.world_size)
