"""The families that megavlm trains, by the `model_type` of a model folder's config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megavlm.models.common.config import LanguageConfig, ModelOptions, language_config
from megavlm.models.common.language import LanguageModel
from megavlm.models.common.layout_rules import check_model_layout
from megavlm.models.common.mapping import Entry
from megavlm.models.common.model import VisionLanguageModel
from megavlm.models.common.rotary import MultimodalRotary
from megavlm.models.common.tower import Tower
from megavlm.models.common.value_head import ValueHead
from megavlm.models.qwen2_5_vl import config as qwen2_5_vl_config
from megavlm.models.qwen2_5_vl import mapping as qwen2_5_vl_mapping
from megavlm.models.qwen2_5_vl import vision as qwen2_5_vl_vision
from megavlm.models.qwen2_vl import config as qwen2_vl_config
from megavlm.models.qwen2_vl import mapping as qwen2_vl_mapping
from megavlm.models.qwen2_vl import vision as qwen2_vl_vision
from megavlm.models.qwen3_vl import config as qwen3_vl_config
from megavlm.models.qwen3_vl import mapping as qwen3_vl_mapping
from megavlm.models.qwen3_vl import vision as qwen3_vl_vision
from megavlm.parallel import platform
from megavlm.parallel.mesh import Mesh


@dataclass(frozen=True)
class Family:
    """`architecture` and `rotary` read transformers' configuration, `tower` its vision part."""

    architecture: Callable[[Any], dict[str, Any]]
    rotary: Callable[[Any], MultimodalRotary]
    tower: Callable[[Any], Tower]
    mapping: Callable[[Any], list[Entry]]


def _family(config: Any, vision: Any, mapping: Any) -> Family:
    return Family(config.architecture, config.rotary, vision.VisionTower, mapping.mapping)


QWEN3_VL = _family(qwen3_vl_config, qwen3_vl_vision, qwen3_vl_mapping)
FAMILIES = {
    "qwen2_vl": _family(qwen2_vl_config, qwen2_vl_vision, qwen2_vl_mapping),
    "qwen2_5_vl": _family(qwen2_5_vl_config, qwen2_5_vl_vision, qwen2_5_vl_mapping),
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
}


def family(model_type: str) -> Family:
    if model_type not in list(FAMILIES):  # a config.json may hold anything, also what has no hash
        raise ValueError(
            f"model_type {model_type!r} is not supported: use one of {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[model_type]


def build_model(
    hf_config: Any, mesh: Mesh, options: ModelOptions | None = None
) -> list[VisionLanguageModel]:
    """This rank's chunks of the model, randomly initialised, on its device: one, or
    `layout.virtual` of them. `hf_config`: transformers' configuration.

    ValueError for a layout that the model cannot have.
    """
    options = options or ModelOptions()
    parts = family(hf_config.model_type)
    architecture = parts.architecture(hf_config)
    vocab_size = hf_config.text_config.vocab_size
    check_model_layout(
        architecture,
        mesh.layout,
        options,
        vocab_size=vocab_size,
        recompute_layers=options.recompute_layers if options.recompute == "full" else 1,
    )
    levels = len(getattr(hf_config.vision_config, "deepstack_visual_indexes", []))
    config = language_config(architecture, mesh.layout, options, deepstack_levels=levels)
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
    _mark_experts(language_model)
    model = VisionLanguageModel(
        config,
        language_model,
        visual=_tower(hf_config, parts, options) if is_first else None,
        value_head=value_head,
        is_last=is_last,
    )
    return model.to(platform.device())


def _mark_experts(language_model: LanguageModel) -> None:
    """Gradients of experts are summed over the ranks that hold the same ones. megatron-core knows
    that with an expert axis above 1 only; without one the tensor ranks, which hold the same experts
    and see other tokens, would each keep their own part.
    """
    for name, parameter in language_model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # megatron-core's mark


def _tower(hf_config: Any, parts: Family, options: ModelOptions) -> Tower:
    tower = parts.tower(hf_config.vision_config).to(options.dtype)
    tower.recompute = options.recompute_tower
    tower.requires_grad_(not options.freeze_tower)
    for merger in tower.mergers():
        merger.requires_grad_(not options.freeze_merger)
    return tower
