"""The families that megavlm trains, by the `model_type` of a model folder's config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megavlm.models.common.language import LanguageModel
from megavlm.models.common.mapping import Entry
from megavlm.models.common.model import VisionLanguageModel
from megavlm.models.common.rotary import MultimodalRotary
from megavlm.models.common.tower import Tower
from megavlm.models.qwen2_5_vl import config as qwen2_5_vl
from megavlm.models.qwen2_5_vl.mapping import mapping as qwen2_5_vl_mapping
from megavlm.models.qwen2_5_vl.vision import VisionTower as Qwen2_5_VLTower
from megavlm.parallel import platform
from megavlm.parallel.mesh import Mesh


@dataclass(frozen=True)
class Family:
    transformer_config: Callable[..., TransformerConfig]
    rotary: Callable[[Any], MultimodalRotary]
    tied_embeddings: Callable[[Any], bool]
    tower: Callable[[Any], Tower]
    mapping: Callable[[Any], list[Entry]]


FAMILIES = {
    "qwen2_5_vl": Family(
        transformer_config=qwen2_5_vl.transformer_config,
        rotary=qwen2_5_vl.rotary,
        tied_embeddings=qwen2_5_vl.tied_embeddings,
        tower=Qwen2_5_VLTower,
        mapping=qwen2_5_vl_mapping,
    ),
}


def family(model_type: str) -> Family:
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported: use one of {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[model_type]


def build_model(
    hf_config: Any,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    sequence: bool = False,
    freeze_tower: bool = True,
    freeze_merger: bool = True,
) -> VisionLanguageModel:
    """This rank's part of the model, randomly initialised, on its device. `hf_config`:
    transformers' configuration.
    """
    parts = family(hf_config.model_type)
    config = parts.transformer_config(hf_config, mesh, dtype=dtype, sequence=sequence)
    language_model = LanguageModel(
        config,
        vocab_size=hf_config.text_config.vocab_size,
        max_sequence_length=hf_config.text_config.max_position_embeddings,
        tied_embeddings=parts.tied_embeddings(hf_config),
        rotary=parts.rotary(hf_config),
        groups=mesh.groups,
    )
    visual = parts.tower(hf_config.vision_config).to(dtype)
    visual.requires_grad_(not freeze_tower)
    visual.merger.requires_grad_(not freeze_merger)
    return VisionLanguageModel(config, visual, language_model).to(platform.device())
