"""Routing replay: routers of the trainer send tokens to the experts that the rollout server chose
(R3, arXiv 2510.11370). Their weights are still computed from the trainer's own logits, so that
gradients reach the routers.

megatron-core's RouterReplay is a list of all routers of a process, and of indices in the order of
their backward passes. Here each layer gets the routed experts with the pack that it computes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megavlm.data.packs.routed_experts import RoutedExperts
from megavlm.models.common import expert_sums
from megavlm.models.common.config import LanguageConfig


class ReplayedExperts(NamedTuple):
    """Routed experts of t tokens in one layer, in the form of a router's `router_replay`."""

    experts: Tensor  # [t, top-k]
    is_known: Tensor  # [t, 1]

    @classmethod
    def of(cls, routed_experts: RoutedExperts, layer: int) -> Self:
        """Return the routed experts of a layer, by its index in the whole model."""
        return cls(routed_experts.experts[:, layer], routed_experts.is_known[:, None])

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of the replayed experts and their indices, both [t, top-k]. Tokens
        without routed experts get the experts that `choose` returns.
        """
        _, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts = torch.where(self.is_known, self.experts.long(), own)
        return scores.gather(1, experts), experts


class ReplayingMoELayer(MoELayer):
    """Layer of experts whose router replays routed experts.

    replayed: Routed experts of the pack that is computed next; None if the router chooses.
    """

    replayed: ReplayedExperts | None = None
    config: LanguageConfig
    moe_layer_recompute: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Recomputed here, where the backward pass finds the routed experts of its own pack again.
        self._recomputes = self.moe_layer_recompute
        self.moe_layer_recompute = False
        if self.config.router_bias:
            # Not by moe_router_enable_expert_bias, with which megatron-core would also update it.
            del self.router.expert_bias
            bias = torch.zeros(self.config.num_moe_experts, dtype=torch.float32)
            self.router.register_buffer("expert_bias", bias)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
        replayed = self.replayed

        def compute(hidden: Tensor) -> tuple[Tensor, Tensor | None]:
            self.router.router_replay = replayed
            return super(ReplayingMoELayer, self).forward(hidden)

        if self._recomputes:
            return checkpoint(compute, False, hidden_states)
        return compute(hidden_states)


class ExpertsSpec(NamedTuple):
    """Spec of a ReplayingMoELayer. It is no ModuleSpec, because to one of a class that it does not
    know megatron-core passes no process groups.
    """

    module: type[MoELayer]
    params: dict[str, Any]
    submodules: Any

    @classmethod
    def of(cls, spec: ModuleSpec, groups: ProcessGroupCollection) -> Self:
        """Return the spec for megatron-core's spec of a layer of experts."""
        expert_sums.install()
        params = {**spec.params, "pg_collection": groups}
        return cls(ReplayingMoELayer, params, spec.submodules)
