"""Vision-language model over packs of trees: a vision tower, a megatron-core language model and its
heads. An object is the part of the model that one pipeline stage (or one chunk of it) holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megavlm.data.media.image_processing import Grids, ProcessedImage
from megavlm.data.packs.packing import Pack
from megavlm.data.packs.routed_experts import RoutedExperts
from megavlm.models.common.config import LanguageConfig
from megavlm.models.common.deepstack import StageLayout, join_levels, split_levels
from megavlm.models.common.draft_head import DraftHead, draft_divergence
from megavlm.models.common.language import LanguageModel
from megavlm.models.common.logprobs import Scoring, TokenScores, token_scores
from megavlm.models.common.tower import Tower
from megavlm.models.common.vision_merge import encode_share, gather_shares, put_features

Features = Mapping[str, Tensor]  # image key -> [tokens, (1 + levels) x H]


class ValueHead(nn.Module):
    """Head of a critic: maps hidden states [N, H] to values [N] in fp32. Its weights start at zero,
    so that an untrained critic returns 0.

    learns_alone: The hidden states get no gradient from the head if this is true.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.learns_alone = False

    def forward(self, hidden: Tensor) -> Tensor:
        if self.learns_alone:
            hidden = hidden.detach()
        return F.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(1)


class VisionLanguageModel(MegatronModule):
    """Vision-language model. Only the first stage has the tower, and only the last the heads."""

    model_type = ModelType.encoder_or_decoder  # read by megatron-core's schedules
    config: LanguageConfig

    def __init__(
        self,
        config: LanguageConfig,
        language_model: LanguageModel,
        *,
        visual: Tower | None,
        value_head: ValueHead | None,
        draft_head: DraftHead | None,
        is_last: bool,
    ) -> None:
        super().__init__(config=config)
        self.language_model = language_model
        self.visual = visual
        self.value_head = value_head
        self.draft_head = draft_head
        self.is_last = is_last
        # Attributes of a model chunk that megatron-core reads.
        self.pre_process = visual is not None
        self.vp_stage = language_model.vp_stage
        self.share_embeddings_and_output_weights = (
            language_model.share_embeddings_and_output_weights
        )
        self.shared_embedding_or_output_weight = language_model.shared_embedding_or_output_weight

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Store the tensor that the previous stage sent. megatron-core's schedules call this."""
        (self._received,) = input_tensor

    @property
    def num_levels(self) -> int:
        return self.config.deepstack_levels

    def encode(
        self,
        grids: Sequence[Grids],
        shares: Sequence[Sequence[int]],
        mine: Sequence[ProcessedImage],
    ) -> list[Tensor]:
        """Return the features [tokens, (1 + levels) x H] of each distinct image. Collective over
        the ranks of the first stage that share a microbatch; each encodes its share of the images.

        grids: Grids of all images.
        shares: Indices of the images that each rank encodes.
        mine: The images of this rank's share.
        """
        if not grids:
            return []
        assert self.visual is not None, "only the first stage has a tower"
        groups = self.language_model.pg_collection
        local = encode_share(self.visual, mine)
        return gather_shares(
            self.visual, local, grids, shares, group=groups.tp_cp, context_group=groups.cp
        )

    def forward(
        self, pack: Pack, features: Features, scoring: Scoring | None
    ) -> Tensor | TokenScores:
        """Return the hidden states for the next stage. The last stage returns the scores of the
        pack's targets [N], or without `scoring` their logits [N, V/tp].

        The inputs of the draft head (embeddings and captured hidden states) go with the hidden
        states to the last stage, in passes with a loss.
        """
        drafts = self.config.draft_head and scoring is not None and scoring.entropy
        rows, kept = self._slice(pack)
        first = self.language_model.first_layer
        layout = StageLayout.of(
            pack, vision_rows=rows, first_level=first, routed_experts=self._routed_experts(pack)
        )
        if self.pre_process:
            hidden, levels = self._embed(pack, features, kept)
            inputs = [hidden.detach()]  # of the draft head
        else:
            hidden, levels = self._received, None
            num_rows = len(pack.token_ids) // self._num_slices
            if drafts:
                count = 1 + sum(layer < first for layer in self.config.captured_layers)
                hidden, passed_on = hidden.tensor_split([-count * num_rows])
                inputs = [*passed_on.detach().split(num_rows)]
            if pack.images and first < self.num_levels:
                hidden, levels = split_levels(hidden, num_rows)
        layout.captured = {} if drafts else None
        hidden = self.language_model(hidden, levels, pack.positions, layout)
        if layout.captured is not None:
            inputs += layout.captured.values()
            layout.captured = None
        if not self.is_last:
            sent = join_levels(hidden, levels, layout, self.language_model.next_layer)
            return torch.cat([sent, *inputs]) if drafts else sent
        targets = self._at_targets(hidden, pack)
        scores = self._score(targets, pack, scoring)
        if not drafts:
            return scores
        assert self.draft_head is not None and scoring is not None
        assert isinstance(scores, TokenScores)
        embeddings, *captured = inputs
        drafted = self.draft_head(
            torch.cat(captured, dim=-1) if captured else hidden.detach(),
            embeddings,
            pack,
            self.language_model.rotary,
        )
        divergence = draft_divergence(
            self._at_targets(drafted, pack),
            targets,
            self.language_model.output_weight(),
            pack.target_ids,
            scoring=scoring,
            group=self._tensor_group,
        )
        return replace(scores, draft_divergence=divergence)

    def _embed(
        self, pack: Pack, features: Features, kept: slice | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return this rank's hidden states [t, 1, H] before the first layer, and the DeepStack
        levels of its image tokens.
        """
        embeddings, levels = self.language_model.embed(pack.token_ids), None
        if pack.images:
            rows = torch.cat([features[key] for key in pack.images])[pack.feature_index]
            merged, *deeper = rows.split(rows.size(1) // (1 + self.num_levels), dim=1)
            embeddings = put_features(embeddings, pack.vision_index, merged)
            if deeper:
                levels = self._levels(torch.stack(deeper).to(embeddings.dtype), kept)
        if self.config.sequence_parallel:
            embeddings = scatter_to_sequence_parallel_region(embeddings, group=self._tensor_group)
        return embeddings, levels

    def _levels(self, levels: Tensor, kept: slice | None) -> Tensor:
        """Return levels [levels, m, H] as rows [levels x kept, 1, H] of this rank's slice."""
        if kept is not None:
            # Each rank uses its slice, so the gradient of the whole is a sum over the tensor axis.
            levels = copy_to_tensor_model_parallel_region(levels, group=self._tensor_group)
            levels = levels[:, kept]
        return levels.flatten(0, 1).unsqueeze(1)

    def _slice(self, pack: Pack) -> tuple[Tensor, slice | None]:
        """Return the rows [m] of image tokens among this rank's hidden states, and with sequence
        parallelism the slice of the pack's image tokens that they are.
        """
        if self._num_slices == 1 or not self.num_levels:
            return pack.vision_index, None
        size = len(pack.token_ids) // self._num_slices
        start = size * self._tensor_group.rank()
        # Counted on the host: reading the tensor would wait for the GPU.
        kept = slice(pack.vision_before(start), pack.vision_before(start + size))
        return pack.vision_index[kept] - start, kept

    def _routed_experts(self, pack: Pack) -> RoutedExperts | None:
        """Return the routed experts of this rank's hidden states."""
        if pack.routed_experts is None or self._num_slices == 1:
            return pack.routed_experts
        size = len(pack.token_ids) // self._num_slices
        start = size * self._tensor_group.rank()
        return pack.routed_experts.select(slice(start, start + size))

    def _at_targets(self, hidden: Tensor, pack: Pack) -> Tensor:
        """Return the final hidden states [N, H] that predict the pack's targets, on every tensor
        rank. In the backward pass each rank must provide their whole gradient.
        """
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self._tensor_group
            )
        return hidden.squeeze(1)[pack.source_index]

    def _score(self, hidden: Tensor, pack: Pack, scoring: Scoring | None) -> Tensor | TokenScores:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        logprobs, entropy, values, divergence = empty, empty, empty, None
        if self.value_head is not None:
            values = self.value_head(hidden)
        if self.language_model.post_process:
            # The output layer is vocabulary-parallel: each rank's gradient is a part of a sum over
            # the tensor axis, which this copy computes in the backward pass.
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self._tensor_group)
            weight = self.language_model.output_weight()
            if scoring is None:
                return hidden @ weight.t()
            logprobs, entropy, divergence = token_scores(
                hidden,
                weight,
                pack.target_ids,
                scoring=scoring,
                group=self._tensor_group,
                kept=pack.kept,
                teacher=pack.teacher,
            )
        return TokenScores(logprobs, entropy, values, divergence)

    @property
    def _tensor_group(self) -> dist.ProcessGroup:
        return self.language_model.pg_collection.tp

    @property
    def _num_slices(self) -> int:
        return self._tensor_group.size() if self.config.sequence_parallel else 1

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        state = self.language_model.sharded_state_dict(
            f"{prefix}language_model.", sharded_offsets, metadata
        )
        for name, module in (("visual", self.visual), ("value_head", self.value_head)):
            if module is None:
                continue
            part = make_sharded_tensors_for_checkpoint(
                module.state_dict(keep_vars=True), "", {}, sharded_offsets
            )
            add_prefix_for_sharding(part, f"{prefix}{name}.")
            state |= {f"{prefix}{name}.{key}": tensor for key, tensor in part.items()}
        if self.draft_head is not None:
            state |= self.draft_head.sharded_state_dict(
                f"{prefix}draft_head.", sharded_offsets, metadata
            )
        return state
