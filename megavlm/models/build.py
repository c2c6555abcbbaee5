"""A rank's part of a model, built from transformers' configuration, the layout and the options."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from megavlm.families import Family, family
from megavlm.models.common.config import LanguageConfig, ModelOptions, language_config
from megavlm.models.common.draft_head import DraftHead
from megavlm.models.common.eagle3 import captured_layers
from megavlm.models.common.eagle3_head import Eagle3Head
from megavlm.models.common.language import ChunkPlace, LanguageModel
from megavlm.models.common.layout_rules import check_model_layout
from megavlm.models.common.model import ValueHead, VisionLanguageModel
from megavlm.models.common.tower import Tower
from megavlm.parallel import platform
from megavlm.parallel.mesh import Mesh


def build_model(
    hf_config: Any, mesh: Mesh, options: ModelOptions | None = None
) -> list[VisionLanguageModel]:
    """Build this rank's `layout.virtual` chunks of the model on its device, randomly initialised.

    hf_config: transformers' configuration.

    Raises ValueError for a layout that the model does not support.
    """
    options = options or ModelOptions()
    parts = family(hf_config.model_type)
    architecture = parts.architecture(hf_config)
    check_model_layout(
        architecture,
        mesh.layout,
        options,
        vocab_size=hf_config.text_config.vocab_size,
        recompute_layers=options.recompute_layers if options.recompute == "full" else 1,
    )
    config = language_config(architecture, mesh.layout, options)
    if options.draft_head and parts.draft_head == "eagle3":
        config.captured_layers = captured_layers(config.num_layers)
    builder = _Builder(hf_config, parts, config, mesh, options)
    return [builder.chunk(chunk) for chunk in range(mesh.layout.virtual)]


@dataclass(frozen=True)
class _Builder:
    hf_config: Any
    parts: Family
    config: LanguageConfig
    mesh: Mesh
    options: ModelOptions

    def chunk(self, index: int) -> VisionLanguageModel:
        mesh, options, count = self.mesh, self.options, self.mesh.layout.virtual
        place = ChunkPlace(
            is_first=mesh.pipeline_rank == 0 and index == 0,
            is_last=mesh.is_last_stage and index == count - 1,
            index=index if count > 1 else None,
        )
        language_model = LanguageModel(
            self.config,
            self.hf_config,
            place,
            rotary=self.parts.rotary(self.hf_config),
            groups=mesh.groups,
            has_output=options.head != "values",
        )
        value_head = None
        if place.is_last and options.head != "tokens":
            value_head = ValueHead(self.config.hidden_size, options.dtype)
        draft_head = None
        if place.is_last and options.draft_head:
            head = Eagle3Head if self.parts.draft_head == "eagle3" else DraftHead
            draft_head = head(self.config, place, mesh.groups)
            _mark_experts(draft_head)
        _mark_experts(language_model)
        model = VisionLanguageModel(
            self.config,
            language_model,
            visual=_tower(self.hf_config, self.parts, options) if place.is_first else None,
            value_head=value_head,
            draft_head=draft_head,
            is_last=place.is_last,
        )
        return model.to(platform.device())


def _mark_experts(module: nn.Module) -> None:
    """Mark the parameters of experts, so that their gradients are summed over the ranks that hold
    the same experts.

    megatron-core marks them only if the expert axis is above 1. Without the mark, tensor ranks
    would each keep their own part of a gradient: they hold the same experts and see different
    tokens.
    """
    for name, parameter in module.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]  # megatron-core's mark


def _tower(hf_config: Any, parts: Family, options: ModelOptions) -> Tower:
    tower: Tower = parts.tower(hf_config).to(options.dtype)
    tower.recompute = options.recompute_tower
    tower.requires_grad_(not options.freeze_tower)
    for merger in tower.mergers():
        merger.requires_grad_(not options.freeze_merger)
    return tower
