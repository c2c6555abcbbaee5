"""The families that megavlm trains, by the `model_type` of a model folder's config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megavlm.models.common.config import LanguageConfig, ModelOptions, language_config
from megavlm.models.common.language import LanguageModel
from megavlm.models.common.mapping import Entry
from megavlm.models.common.model import VisionLanguageModel
from megavlm.models.common.rotary import MultimodalRotary
from megavlm.models.common.tower import Tower
from megavlm.models.common.value_head import ValueHead
from megavlm.models.qwen2_5_vl import config as qwen2_5_vl
from megavlm.models.qwen2_5_vl.mapping import mapping as qwen2_5_vl_mapping
from megavlm.models.qwen2_5_vl.vision import VisionTower as Qwen2_5_VLTower
from megavlm.parallel import platform
from megavlm.parallel.mesh import Mesh


@dataclass(frozen=True)
class Family:
    """`architecture` and `rotary` read transformers' configuration, `tower` its vision part."""

    architecture: Callable[[Any], dict[str, Any]]
    rotary: Callable[[Any], MultimodalRotary]
    tower: Callable[[Any], Tower]
    mapping: Callable[[Any], list[Entry]]


FAMILIES = {
    "qwen2_5_vl": Family(
        architecture=qwen2_5_vl.architecture,
        rotary=qwen2_5_vl.rotary,
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
    hf_config: Any, mesh: Mesh, options: ModelOptions | None = None
) -> list[VisionLanguageModel]:
    """This rank's chunks of the model, randomly initialised, on its device: one, or
    `layout.virtual` of them. `hf_config`: transformers' configuration.
    """
    options = options or ModelOptions()
    parts = family(hf_config.model_type)
    levels = len(getattr(hf_config.vision_config, "deepstack_visual_indexes", []))
    config = language_config(
        parts.architecture(hf_config), mesh.layout, options, deepstack_levels=levels
    )
    chunks = mesh.layout.virtual
    return [_chunk(hf_config, parts, config, mesh, options, chunk) for chunk in range(chunks)]


def _chunk(
    hf_config: Any,
    parts: Family,
    config: LanguageConfig,
    mesh: Mesh,
    options: ModelOptions,
    chunk: int,
) -> VisionLanguageModel:
    num_chunks = mesh.layout.virtual
    is_first = mesh.pipeline_rank == 0 and chunk == 0
    is_last = mesh.is_last_stage and chunk == num_chunks - 1
    language_model = LanguageModel(
        config,
        vocab_size=hf_config.text_config.vocab_size,
        max_sequence_length=hf_config.text_config.max_position_embeddings,
        tied_embeddings=bool(hf_config.tie_word_embeddings),
        rotary=parts.rotary(hf_config),
        groups=mesh.groups,
        is_first=is_first,
        is_last=is_last,
        chunk=chunk if num_chunks > 1 else None,
        has_output=options.head != "values",
    )
    value_head = None
    if is_last and options.head != "tokens":
        value_head = ValueHead(config.hidden_size, options.dtype)
    model = VisionLanguageModel(
        config,
        language_model,
        visual=_tower(hf_config, parts, options) if is_first else None,
        value_head=value_head,
        is_last=is_last,
    )
    return model.to(platform.device())


def _tower(hf_config: Any, parts: Family, options: ModelOptions) -> Tower:
    tower = parts.tower(hf_config.vision_config).to(options.dtype)
    tower.recompute = options.recompute_tower
    tower.requires_grad_(not options.freeze_tower)
    for merger in tower.mergers():
        merger.requires_grad_(not options.freeze_merger)
    return tower
