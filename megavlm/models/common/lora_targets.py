"""Linear layers that can have adapters, by their names in the whole model.

A name is the path of a module, with the layer's number in the whole model. The experts of a layer
are adapted together and share one name, `...layers.3.mlp.experts.linear_fc1`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megavlm.config.lora import LANGUAGE, VISION
from megavlm.models.common.components import lora_component
from megavlm.models.common.language import layer_kinds
from megavlm.models.common.lora_grouped import ExpertRanks
from megavlm.models.common.lora_linear import Placement
from megavlm.models.common.model import VisionLanguageModel
from megavlm.models.common.tower import Tower
from megavlm.models.linear_attention.fused_rows import group_rows, join_gated
from megavlm.models.linear_attention.gated_delta_net import GatedDeltaNet

Parts = tuple[tuple[str, int], ...]  # name and number of rows of each HF projection in a layer


@dataclass(frozen=True)
class LoRATarget:
    """Linear layer of this rank: `attribute` of the module `owner`.

    parts: HF projections of the layer, in the order of the mapping table's entry.
    num_blocks, order: Arguments of LoRALinear.
    experts: Set if the layer is a grouped linear over this rank's experts.
    """

    name: str
    owner: Any
    attribute: str
    parts: Parts
    placement: Placement
    num_blocks: int = 1
    order: Tensor | None = None
    experts: ExpertRanks | None = None


def choose(targets: Sequence[str], names: Mapping[str, str], *, has_tower: bool) -> set[str]:
    """Return the names that `targets` match.

    names: Maps the name of every linear layer of the whole model to its component. The tower's
        layers are in it only if `has_tower`; only ranks with the tower check targets in it.

    Raises ValueError for a target without a match.
    """
    chosen: set[str] = set()
    for target in targets:
        found = {
            name
            for name, component in names.items()
            if target == component or fnmatchcase(name, target)
        }
        if not found and (has_tower or not target.startswith(("vision.", VISION))):
            paths = sorted({re.sub(r"\.\d+\b", ".*", name) for name in names})
            raise ValueError(
                f"lora.targets has {target!r}, but it matches nothing in this model: it has "
                f"{', '.join(sorted(set(names.values())))}, and the paths {', '.join(paths)}."
            )
        chosen |= found
    return chosen


def linear_names(config: TransformerConfig, tower: Tower | None) -> dict[str, str]:
    """Return the name and component of every linear layer of the whole model that can have
    adapters. The tower's layers are included if this rank has the tower.
    """
    names = []
    for index, kind in enumerate(layer_kinds(config)):
        layer = f"{LANGUAGE}decoder.layers.{index}"
        linears = ("in_proj", "out_proj") if kind.is_linear else ("linear_qkv", "linear_proj")
        names += [f"{layer}.self_attention.{linear}" for linear in linears]
        mlps = [f"{layer}.mlp.experts"] if kind.has_experts else [f"{layer}.mlp"]
        if kind.has_experts and config.moe_shared_expert_intermediate_size:
            mlps.append(f"{layer}.mlp.shared_experts")
        names += [f"{mlp}.linear_{fc}" for mlp in mlps for fc in ("fc1", "fc2")]
    if tower is not None:
        names += [f"{VISION}{name}" for name in _tower_linears(tower)]
    return {name: part for name in names if (part := lora_component(name))}


def adapted_layers(model: VisionLanguageModel, chosen: set[str]) -> Iterator[LoRATarget]:
    """Yield this rank's chosen linear layers."""
    groups = model.language_model.pg_collection
    for layer in model.language_model.decoder.layers:
        name = f"{LANGUAGE}decoder.layers.{layer.layer_number - 1}"
        is_linear = isinstance(layer.self_attention, GatedDeltaNet)
        find = _linear_attention_targets if is_linear else _attention_targets
        found = [*find(layer.self_attention, f"{name}.self_attention")]
        mlp, mlp_name = layer.mlp, f"{name}.mlp"
        if isinstance(layer.mlp, MoELayer):
            experts = f"{name}.mlp.experts"
            for target in _expert_targets(layer.mlp.experts, experts, groups):
                if f"{experts}.{target.attribute}" in chosen:
                    yield target
            mlp, mlp_name = layer.mlp.shared_experts, f"{name}.mlp.shared_experts"
        if mlp is not None:
            placement = {"group": mlp.tp_group, "sequence": layer.config.sequence_parallel}
            found += _mlp_targets(mlp, mlp_name, **placement)
        yield from (target for target in found if target.name in chosen)
    if model.visual is not None:
        for target in _tower_targets(model.visual, groups.tp):
            if target.name in chosen:
                yield target


def _attention_targets(attention: Any, name: str) -> Iterator[LoRATarget]:
    config, group = attention.config, attention.pg_collection.tp
    head = attention.hidden_size_per_attention_head
    heads, groups = config.num_attention_heads, config.num_query_groups
    order = None
    if config.attention_output_gate:
        if heads > groups:  # otherwise a group has one query, gate, key and value, as in HF
            rows = (2 * heads * head, groups * head, groups * head)
            order = join_gated(groups, head, torch.arange(sum(rows)).split(rows))
        heads *= 2  # q_proj has a gate for each query head
    fused = groups < group.size() or order is not None
    if not fused:
        heads, groups = heads // group.size(), groups // group.size()
    qkv = (("q_proj", heads * head), ("k_proj", groups * head), ("v_proj", groups * head))
    yield LoRATarget(
        f"{name}.linear_qkv",
        attention,
        "linear_qkv",
        qkv,
        Placement("fused" if fused else "rows", group, config.sequence_parallel),
        num_blocks=groups,
        order=order,
    )
    yield LoRATarget(
        f"{name}.linear_proj",
        attention,
        "linear_proj",
        (("o_proj", config.hidden_size),),
        Placement("columns", group, config.sequence_parallel),
    )


def _linear_attention_targets(layer: GatedDeltaNet, name: str) -> Iterator[LoRATarget]:
    group, groups = layer.pg_collection.tp, layer.num_key_heads
    q, k, v, *others = (groups * rows for rows in layer.group_rows)
    rows = (q + k + v, *others)
    order = group_rows(groups, (q, k, v), torch.arange(sum(rows)).split(rows))
    names = [f"in_proj_{part}" for part in ("qkv", "z", "b", "a")]
    yield LoRATarget(
        f"{name}.in_proj",
        layer,
        "in_proj",
        tuple(zip(names, rows, strict=True)),
        Placement("fused", group, layer.config.sequence_parallel),
        order=order,
    )
    yield LoRATarget(
        f"{name}.out_proj",
        layer,
        "out_proj",
        (("out_proj", layer.config.hidden_size),),
        Placement("columns", group, layer.config.sequence_parallel),
    )


def _mlp_targets(mlp: Any, name: str, **placement: Any) -> Iterator[LoRATarget]:
    first, second = _gated_parts(mlp.config, mlp.linear_fc1.weight)
    where, order, size = Placement("rows", **placement), None, placement["group"].size()
    if mlp.config.fused_gate_up:
        rows = mlp.linear_fc1.weight.size(0) * size
        first = (("gate_up_proj", rows),)
        if size > 1:  # a rank has a piece of the gate and one of up
            where = Placement("fused", **placement)
            order = torch.arange(rows).view(2, size, -1).transpose(0, 1).flatten()
    yield LoRATarget(f"{name}.linear_fc1", mlp, "linear_fc1", first, where, order=order)
    yield LoRATarget(
        f"{name}.linear_fc2", mlp, "linear_fc2", second, Placement("columns", **placement)
    )


def _gated_parts(config: TransformerConfig, fc1_weight: Tensor) -> tuple[Parts, Parts]:
    """Return the parts of both linear layers of an MLP with a gate."""
    assert config.gated_linear_unit, "every family's MLP has a gate"
    rows = fc1_weight.size(0) // 2
    return (("gate_proj", rows), ("up_proj", rows)), (("down_proj", config.hidden_size),)


def _expert_targets(
    experts: Any, name: str, groups: ProcessGroupCollection
) -> Iterator[LoRATarget]:
    placement: dict[str, Any] = {"group": experts.tp_group, "is_expert": True}
    if isinstance(experts, SequentialMLP):
        start = experts.ep_group.rank() * experts.num_local_experts
        for number, expert in enumerate(experts.local_experts, start):
            yield from _mlp_targets(expert, f"{name}.{number}", **placement)
        return
    ranks = ExpertRanks(groups.ep, groups.expt_dp)
    first, second = _gated_parts(experts.config, experts.linear_fc1.weight0)
    for linear, parts, where in (
        ("linear_fc1", first, Placement("rows", **placement)),
        ("linear_fc2", second, Placement("columns", **placement)),
    ):
        yield LoRATarget(f"{name}.{linear}", experts, linear, parts, where, experts=ranks)


def _tower_linears(tower: Tower) -> list[str]:
    """Return the names of all linear layers in the tower. The patch embedding, a convolution in HF,
    is among them; it has no component, so that it cannot be a target.
    """
    return [name for name, module in tower.named_modules() if isinstance(module, nn.Linear)]


def _tower_targets(tower: Tower, group: dist.ProcessGroup) -> Iterator[LoRATarget]:
    for name in _tower_linears(tower):
        path, _, leaf = name.rpartition(".")
        owner: Any = tower.get_submodule(path)
        found = tower.projections(name)
        rows = getattr(owner, leaf).out_features // len(found)
        parts = tuple((part, rows) for part in found)
        yield LoRATarget(f"{VISION}{name}", owner, leaf, parts, Placement(None, group))
