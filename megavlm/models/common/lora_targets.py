"""Linears that adapters can be put on, by their names in the whole model.

A name is a module's path, with the number that a layer has in the whole model. The experts of a
layer are adapted together and share a name, `...layers.3.mlp.experts.linear_fc1`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megavlm.config.lora import COMPONENTS, LANGUAGE, VISION
from megavlm.models.common.components import lora_component
from megavlm.models.common.lora_linear import Placement
from megavlm.models.common.model import VisionLanguageModel
from megavlm.models.common.tower import Tower


@dataclass(frozen=True)
class Site:
    """Linear of this rank: `attribute` of `owner`. `parts`: HF projections in it and the rows of
    each, in the order of the mapping table's entry; `num_blocks` as in LoRALinear.
    """

    name: str
    owner: Any
    attribute: str
    parts: tuple[tuple[str, int], ...]
    placement: Placement
    num_blocks: int = 1


def choose(targets: Sequence[str], names: Mapping[str, str], *, has_tower: bool) -> set[str]:
    """Return the names that `targets` match. `names`: every linear of the whole model and its
    component; the tower's only where `has_tower`, and ranks with the tower check targets in it.

    Raises ValueError for a target that is neither a component nor a full path, for one without a
    match, and for no target.
    """
    if not targets:
        raise ValueError(f"lora.targets is empty: name components ({', '.join(COMPONENTS)}).")
    chosen: set[str] = set()
    for target in targets:
        if target not in COMPONENTS and not target.startswith((LANGUAGE, VISION)):
            raise ValueError(
                f"lora.targets holds {target!r}, but the same leaf name can be in the language "
                f"model and in the tower: name a component ({', '.join(COMPONENTS)}) or a full "
                f"path such as {LANGUAGE}decoder.layers.*.self_attention.linear_qkv."
            )
        found = {
            name
            for name, component in names.items()
            if target == component or fnmatchcase(name, target)
        }
        if not found and (has_tower or not target.startswith(("vision.", VISION))):
            paths = sorted({re.sub(r"\.\d+\b", ".*", name) for name in names})
            raise ValueError(
                f"lora.targets holds {target!r}, which matches nothing in this model: it has "
                f"{', '.join(sorted(set(names.values())))}, and the paths {', '.join(paths)}."
            )
        chosen |= found
    return chosen


def linear_names(config: TransformerConfig, tower: Tower | None) -> dict[str, str]:
    """Return the name and component of every linear that adapters can be put on, in the whole
    model; the tower's where this rank has it.
    """
    has_experts = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    assert isinstance(has_experts, list), "a family names its expert layers one by one"
    names = []
    for index in range(config.num_layers):
        layer = f"{LANGUAGE}decoder.layers.{index}"
        names += [f"{layer}.self_attention.linear_{kind}" for kind in ("qkv", "proj")]
        mlp = f"{layer}.mlp.experts" if has_experts[index] else f"{layer}.mlp"
        names += [f"{mlp}.linear_{kind}" for kind in ("fc1", "fc2")]
    if tower is not None:
        names += [f"{VISION}{name}" for name in _tower_linears(tower)]
    return {name: kind for name in names if (kind := lora_component(name))}


def sites(model: VisionLanguageModel, chosen: set[str]) -> Iterator[Site]:
    """Yield this rank's chosen linears. Raises ValueError where experts are one grouped matrix."""
    for layer in model.language_model.decoder.layers:
        name = f"{LANGUAGE}decoder.layers.{layer.layer_number - 1}"
        for site in _attention_sites(layer.self_attention, f"{name}.self_attention"):
            if site.name in chosen:
                yield site
        if not isinstance(layer.mlp, MoELayer):
            placement = {"group": layer.mlp.tp_group, "sequence": layer.config.sequence_parallel}
            for site in _mlp_sites(layer.mlp, f"{name}.mlp", **placement):
                if site.name in chosen:
                    yield site
        elif linears := chosen & {f"{name}.mlp.experts.linear_fc{i}" for i in (1, 2)}:
            yield from _expert_sites(layer.mlp.experts, f"{name}.mlp.experts", linears)
    if model.visual is not None:
        group = model.language_model.pg_collection.tp
        for site in _tower_sites(model.visual, group):
            if site.name in chosen:
                yield site


def _attention_sites(attention: Any, name: str) -> Iterator[Site]:
    config, group = attention.config, attention.pg_collection.tp
    head = attention.hidden_size_per_attention_head
    heads, groups = config.num_attention_heads, config.num_query_groups
    fused = groups < group.size()
    if not fused:
        heads, groups = heads // group.size(), groups // group.size()
    qkv = (("q_proj", heads * head), ("k_proj", groups * head), ("v_proj", groups * head))
    yield Site(
        f"{name}.linear_qkv",
        attention,
        "linear_qkv",
        qkv,
        Placement("fused" if fused else "rows", group, config.sequence_parallel),
        num_blocks=groups,
    )
    yield Site(
        f"{name}.linear_proj",
        attention,
        "linear_proj",
        (("o_proj", config.hidden_size),),
        Placement("columns", group, config.sequence_parallel),
    )


def _mlp_sites(mlp: Any, name: str, **placement: Any) -> Iterator[Site]:
    assert mlp.config.gated_linear_unit, "every family's MLP has a gate"
    rows = mlp.linear_fc1.weight.size(0) // 2
    first, second = (
        (("gate_proj", rows), ("up_proj", rows)),
        (("down_proj", mlp.config.hidden_size),),
    )
    yield Site(f"{name}.linear_fc1", mlp, "linear_fc1", first, Placement("rows", **placement))
    yield Site(f"{name}.linear_fc2", mlp, "linear_fc2", second, Placement("columns", **placement))


def _expert_sites(experts: Any, name: str, linears: set[str]) -> Iterator[Site]:
    if not isinstance(experts, SequentialMLP):
        raise ValueError(
            f"lora.targets chooses {name}, whose experts are one grouped matrix "
            f"({type(experts).__name__}), which adapters cannot be put on: use sequential experts "
            f"(moe_grouped_gemm=false) or leave language.experts out."
        )
    first = experts.ep_group.rank() * experts.num_local_experts
    for index, expert in enumerate(experts.local_experts):
        placement = {"group": experts.tp_group, "is_expert": True}
        for site in _mlp_sites(expert, f"{name}.{first + index}", **placement):
            if f"{name}.{site.attribute}" in linears:
                yield site


def _tower_linears(tower: Tower) -> list[str]:
    """Return names within the tower; the patch embedding's, a convolution in HF, is among them and
    has no component.
    """
    return [name for name, module in tower.named_modules() if isinstance(module, nn.Linear)]


def _tower_sites(tower: Tower, group: dist.ProcessGroup) -> Iterator[Site]:
    for name in _tower_linears(tower):
        path, _, leaf = name.rpartition(".")
        owner: Any = tower.get_submodule(path)
        part = (leaf, getattr(owner, leaf).out_features)
        yield Site(f"{VISION}{name}", owner, leaf, (part,), Placement(None, group))
