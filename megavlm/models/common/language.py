"""The language model: one stage of megatron-core's GPTModel over packs, with positions given per
token.
"""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megavlm.models.common.config import LanguageConfig
from megavlm.models.common.layers import layer_specs
from megavlm.models.common.pack_layout import PackLayout
from megavlm.models.common.rotary import MultimodalRotary


class LanguageModel(GPTModel):
    """The layers of a pipeline stage (of one chunk of it), with the embedding on the first and the
    final norm and output layer on the last.
    """

    def __init__(
        self,
        config: LanguageConfig,
        *,
        vocab_size: int,
        max_sequence_length: int,
        tied_embeddings: bool,
        rotary: MultimodalRotary,
        groups: ProcessGroupCollection,
        is_first: bool,
        is_last: bool,
        chunk: int | None,
        has_output: bool,
    ) -> None:
        """`chunk`: of the stage, where it has several. `has_output`: whether the last stage scores
        tokens; a critic does not.
        """
        super().__init__(
            config=config,
            transformer_layer_spec=layer_specs(config, groups, chunk),
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=tied_embeddings and has_output,
            position_embedding_type="none",
            scatter_embedding_sequence_parallel=False,  # image features go in first
            pg_collection=groups,
            vp_stage=chunk,
        )
        self.rotary = rotary
        if is_last and not has_output:
            del self.output_layer
            self.post_process = False  # of GPTModel: no output layer to save

    @property
    def first_layer(self) -> int:
        """Index of this chunk's first layer in the whole model."""
        return self.decoder.layers[0].layer_number - 1

    @property
    def next_layer(self) -> int:
        """Index of the layer that follows this chunk's last."""
        return self.decoder.layers[-1].layer_number

    def embed(self, token_ids: Tensor) -> Tensor:
        """[t] to [t, 1, H], whole on every rank of the tensor axis."""
        return self.embedding(input_ids=token_ids[None], position_ids=None)

    def forward(
        self, hidden: Tensor, levels: Tensor | None, positions: Tensor, layout: PackLayout
    ) -> Tensor:
        """hidden [t, 1, H] through this chunk's layers; under sequence parallelism [t / tp, 1, H].

        levels: DeepStack features for this chunk's layers and later ones (`deepstack`).
        """
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # A recomputed region gives no gradients unless one of its inputs asks for them; with
            # adapters on a frozen embedding none would.
            hidden = hidden.detach().requires_grad_()
        self.decoder.set_input_tensor(hidden)
        return self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            context=levels,
            rotary_pos_emb=self.rotary(positions),
            packed_seq_params=layout,
        )

    def output_weight(self) -> Tensor:
        """This rank's rows of the output layer [V/tp, H]."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight
