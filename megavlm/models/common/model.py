"""A vision tower and a megatron-core language model as one, over packs of trees."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megavlm.data.packing import Pack
from megavlm.data.processor import Picture
from megavlm.models.common.attention import PackLayout
from megavlm.models.common.language import LanguageModel
from megavlm.models.common.logprobs import Scoring, TokenScores, token_scores
from megavlm.models.common.tower import Tower
from megavlm.models.common.vision_merge import encode_pictures, put_features

Features = Mapping[str, Tensor]  # picture key -> [tokens, H]


class VisionLanguageModel(MegatronModule):
    model_type = ModelType.encoder_or_decoder  # asked for by megatron-core's schedules

    def __init__(
        self, config: TransformerConfig, visual: Tower, language_model: LanguageModel
    ) -> None:
        super().__init__(config=config)
        self.visual = visual
        self.language_model = language_model

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.language_model.set_input_tensor(input_tensor)

    def encode(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        """Features of distinct pictures, encoded by the ranks of the tensor axis together."""
        if not pictures:
            return {}
        weight = next(self.visual.parameters())
        features = encode_pictures(
            self.visual,
            [picture.patches.to(weight.device) for picture in pictures],
            [picture.grid for picture in pictures],
            merge_size=self.visual.merge_size,
            feature_size=self.visual.feature_size,
            group=self.language_model.pg_collection.tp,
        )
        return {picture.key: feature for picture, feature in zip(pictures, features, strict=True)}

    def hidden(self, pack: Pack, features: Features) -> Tensor:
        """Hidden states that predict the pack's targets [N, H]."""
        embeddings = self.language_model.embed(pack.token_ids)
        if pack.pictures:
            together = torch.cat([features[key] for key in pack.pictures])
            embeddings = put_features(embeddings, pack.vision_index, together)
        layout = PackLayout(
            segment_ids=pack.segment_ids, ancestors=pack.ancestors, tree_bounds=pack.tree_bounds
        )
        return self.language_model(embeddings, pack.positions, layout)[pack.source_index]

    def forward(self, pack: Pack, features: Features, scoring: Scoring) -> TokenScores:
        """Log-probability and entropy of the pack's targets [N]."""
        return token_scores(
            self.hidden(pack, features),
            self.language_model.output_weight(),
            pack.target_ids,
            scoring=scoring,
            group=self.language_model.pg_collection.tp,
        )

    def logits(self, pack: Pack, features: Features) -> Tensor:
        """Whole logits at the pack's targets [N, V], without a graph: for inspection and proofs,
        never for training.
        """
        with torch.no_grad():
            local = self.hidden(pack, features) @ self.language_model.output_weight().t()
            group = self.language_model.pg_collection.tp
            parts = [torch.empty_like(local) for _ in range(group.size())]
            dist.all_gather(parts, local.contiguous(), group=group)
            return torch.cat(parts, dim=-1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        language = self.language_model.sharded_state_dict(
            f"{prefix}language_model.", sharded_offsets, metadata
        )
        visual = make_sharded_tensors_for_checkpoint(
            self.visual.state_dict(keep_vars=True), "", {}, sharded_offsets
        )
        add_prefix_for_sharding(visual, f"{prefix}visual.")
        return {**{f"{prefix}visual.{name}": tensor for name, tensor in visual.items()}, **language}
