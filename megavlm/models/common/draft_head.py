"""Draft head: the layer with which a rollout server guesses further tokens (multi-token prediction,
`mtp.*` of Qwen3.5; `eagle3_head` has the other kind). It is trained to predict what the policy
predicts, and changes nothing in it.

A token n of a pack, except the first of its tree, has a slot of the head. The slot's input is the
embedding of n and the hidden states of n's parent, the token before n. It attends to the slots
of n's ancestors, and predicts the token after n, as the policy does at n. So the tree of a pack
serves the head, too, and each slot is computed once. A slot's position is the number of tokens
before the parent in its sequence. Servers count so in images, too, where the policy's M-RoPE counts
in another way.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2) for the layer, SGLang 0.5.23
(speculative/eagle_worker_v2.py, models/qwen3_5_mtp.py) for its inputs and positions.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from megavlm.data.packs.context_parallel import SegmentRun
from megavlm.data.packs.packing import Pack, ancestors_of
from megavlm.models.common.config import LanguageConfig
from megavlm.models.common.language import (
    ChunkPlace,
    LayerKind,
    layer_kinds,
    layer_spec,
    whole_norm,
)
from megavlm.models.common.logprobs import Scoring, likeliest_tokens, token_scores
from megavlm.models.common.pack_layout import PackLayout
from megavlm.models.common.rotary import MultimodalRotary

# The policy's likeliest tokens of which the head learns the probabilities; all others are one. A
# server drafts the likeliest token, so that tokens further back need not be told apart.
NUM_TOKENS = 32


class DraftHead(MegatronModule):
    """Draft head of a language model, on its last pipeline stage. It has no embedding and no output
    layer of its own.
    """

    config: LanguageConfig

    def __init__(
        self, config: LanguageConfig, place: ChunkPlace, groups: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        size, norm = config.hidden_size, whole_norm()
        self.fc = nn.Linear(self.num_inputs * size, size, bias=False, dtype=config.params_dtype)
        # megatron-core's mark of weights that see a part of the tokens on each tensor rank
        weight: Any = self.fc.weight
        weight.sequence_parallel = config.sequence_parallel
        self._build_layer(place, groups)
        self.norm = norm(config, size, eps=config.layernorm_epsilon)
        self.groups = groups

    @property
    def num_inputs(self) -> int:
        """Number of hidden states and embeddings of a token that `fc` reads."""
        return 2

    def _build_layer(self, place: ChunkPlace, groups: ProcessGroupCollection) -> None:
        config, norm = self.config, whole_norm()
        self.embedding_norm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.hidden_norm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)
        kind = LayerKind(layer_kinds(config)[-1].has_experts, is_linear=False)
        self.layer = build_module(
            layer_spec(config, kind, groups),
            config=config,
            pg_collection=groups,
            vp_stage=place.index,
        )

    def _joined(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """Return the layer's input [t, 1, H] from the inputs of slots."""
        normed = [self.embedding_norm(embeddings), self.hidden_norm(states)]
        joined: Tensor = self.fc(torch.cat(normed, dim=-1))
        return joined

    def forward(
        self, states: Tensor, embeddings: Tensor, pack: Pack, rotary: MultimodalRotary
    ) -> Tensor:
        """Return the hidden states [t, 1, H] that predict the token after each token. With sequence
        parallelism, this and both inputs are a tensor rank's slice of them. Collective over the
        tensor and context axes.

        states: Last hidden states of the policy, normalised; for an EAGLE-3 head the captured ones,
        [t, 1, captured x H]. embeddings: Embeddings of tokens and images, before the first layer.
        Neither has a graph.
        """
        layout, parents, positions = slots(pack)
        with torch.no_grad():
            rank, count = 0, len(states)
            if self.config.sequence_parallel:
                states = gather_from_sequence_parallel_region(states, group=self.groups.tp)
                rank = self.groups.tp.rank()
            if self.groups.cp.size() > 1:
                states = gather_from_sequence_parallel_region(states, group=self.groups.cp)
                states = states[pack.gather_index]
            states = states[parents][rank * count : (rank + 1) * count]
        angles = None
        if self.config.apply_rope_fusion:
            angles = rotary(positions)
        else:
            layout.rotary = rotary.tables(positions, states.dtype)
        output, _ = self.layer(
            hidden_states=self._joined(states, embeddings),
            attention_mask=None,
            context=None,
            rotary_pos_emb=angles,
            packed_seq_params=layout,
        )
        normed: Tensor = self.norm(output)
        return normed


class Slots(NamedTuple):
    """Slots of the tokens that this rank holds. The first token of a tree has no slot: the layout
    has it as a segment that no other segment continues, and as its own parent.
    """

    layout: PackLayout
    parents: Tensor  # [t] index of each token's parent in the pack
    positions: Tensor  # [3, t]


def slots(pack: Pack) -> Slots:
    """Return the slots of a pack."""
    bounds, parents, place = [0], list[int](), list[int]()
    previous = torch.arange(-1, pack.num_tokens - 1)
    positions = torch.arange(-1, pack.num_tokens - 1)
    before = list[int]()  # tokens before each segment in its sequence
    for segment, parent in enumerate(pack.parents):
        first, end = pack.segment_bounds[segment : segment + 2]
        if parent < 0:
            previous[first] = first
            parents.append(-1)
            bounds.append(first + 1)
            before.append(0)
        else:
            start, stop = pack.segment_bounds[parent : parent + 2]
            previous[first] = stop - 1
            before.append(before[parent] + stop - start)
        positions[first:end] += before[segment] - first
        place.append(len(parents))
        parents.append(-1 if parent < 0 else place[parent])
        bounds.append(end)
    runs = list[SegmentRun]()
    for segment, first, end in pack.runs:
        is_root = pack.parents[segment] < 0 and first == pack.segment_bounds[segment]
        if is_root:
            runs.append(SegmentRun(place[segment] - 1, first, first + 1))
        if first + is_root < end:
            runs.append(SegmentRun(place[segment], first + is_root, end))
    device = pack.token_index.device
    sizes = torch.tensor(bounds).diff()
    layout = PackLayout(
        token_index=pack.token_index,
        gather_index=pack.gather_index,
        runs=tuple(runs),
        segment_ids=torch.arange(len(sizes)).repeat_interleave(sizes).to(device),
        ancestors=ancestors_of(parents).to(device),
        parents=tuple(parents),
        segment_bounds=tuple(bounds),
        tree_bounds=pack.tree_bounds,
    )
    held = positions.clamp(min=0).to(device)[pack.token_index]
    return Slots(layout, previous.to(device)[pack.token_index], held.expand(3, -1))


def draft_divergence(
    drafted_NH: Tensor,
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_ids_N: Tensor,
    *,
    scoring: Scoring,
    group: dist.ProcessGroup,
) -> Tensor:
    """Return the KL divergence [N] of the head from the policy at targets, in nats, over the
    policy's NUM_TOKENS likeliest tokens with all others as one. Only `drafted_NH` gets a gradient.
    Collective over `group`, the tensor axis.

    drafted_NH, hidden_NH: Hidden states of the head and of the policy.

    Suppressed tokens have probability 0 in the policy, but not in the head: a server drafts the
    head's likeliest token, which must not be one of them.
    """
    weight_VH = weight_VH.detach()
    policy = likeliest_tokens(
        hidden_NH.detach(), weight_VH, NUM_TOKENS, scoring=scoring, group=group
    )
    _, _, divergence_N = token_scores(
        copy_to_tensor_model_parallel_region(drafted_NH, group=group),
        weight_VH,
        target_ids_N,
        scoring=replace(scoring, suppressed_ids=()),
        group=group,
        teacher=policy,
    )
    assert divergence_N is not None
    return divergence_N
