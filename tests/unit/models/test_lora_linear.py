"""Adapters on megatron-core's linears against separate, uncut pairs in plain torch: outputs and all
gradients, for each way a linear is cut.
"""

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megavlm.models.common.lora_linear import LoRALinear, LoRAPart, Placement
from megavlm.parallel.mesh import Layout, build_mesh
from tests.support.fork import launch

pytestmark = pytest.mark.distributed
T = 6  # tokens


@dataclass(frozen=True)
class Case:
    """A layer of `columns` inputs and its parts: name, rows, rank and scale of each projection."""

    kind: Literal["rows", "columns", "fused"]
    columns: int
    parts: tuple[tuple[str, int, int, float], ...]
    num_blocks: int = 1
    bias: bool = False

    @property
    def rows(self) -> int:
        return sum(rows for _, rows, _, _ in self.parts)


QKV = Case("rows", 8, (("q", 16, 3, 2.0), ("k", 8, 2, 0.5), ("v", 8, 4, 1.5)), 4, bias=True)
CASES = {
    "qkv": QKV,
    "qkv without k": Case("rows", 8, (("q", 16, 3, 2.0), ("k", 8, 0, 1.0), ("v", 8, 1, 1.5)), 4),
    "one key-value head": Case("fused", 8, (("q", 8, 3, 2.0), ("k", 2, 2, 0.5), ("v", 2, 4, 3.0))),
    "gate and up": Case("rows", 8, (("gate", 12, 2, 2.0), ("up", 12, 3, 0.5))),
    "row-parallel": Case("columns", 12, (("down", 8, 3, 2.0),), bias=True),
}


def numbers(case: Case) -> dict[str, Tensor]:
    """Weights of the separate projections, and the input, output gradient and bias of the layer."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "x": (T, 1, case.columns),
        "upstream": (T, 1, case.rows),
        "bias": (case.rows,),
        **{f"{name}.W": (rows, case.columns) for name, rows, _, _ in case.parts},
        **{f"{name}.A": (rank, case.columns) for name, _, rank, _ in case.parts},
        **{f"{name}.B": (rows, rank) for name, rows, rank, _ in case.parts},
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def fused_rows(case: Case) -> list[tuple[int, int]]:
    """(part, row of the part) of each row of the fused layer: head after head for qkv."""
    order = []
    for block in range(case.num_blocks):
        for part, (_, rows, _, _) in enumerate(case.parts):
            size = rows // case.num_blocks
            order += [(part, block * size + row) for row in range(size)]
    return order


def fuse(case: Case, parts: list[Tensor]) -> Tensor:
    return torch.stack([parts[part][row] for part, row in fused_rows(case)])


def plain(case: Case) -> dict[str, Tensor]:
    """Separate pairs; the fused layer's output is picked row by row."""
    n = numbers(case)
    n["x"].requires_grad_()
    outputs = []
    for name, _, _, scale in case.parts:
        a, b = n[f"{name}.A"].requires_grad_(), n[f"{name}.B"].requires_grad_()
        outputs.append(n["x"] @ n[f"{name}.W"].t() + scale * (n["x"] @ a.t() @ b.t()))
    output = fuse(case, [y.permute(2, 0, 1) for y in outputs]).permute(1, 2, 0)
    (output * n["upstream"]).sum().backward()
    gradients = {key: n[key].grad for key in n if key == "x" or key.endswith((".A", ".B"))}
    results: dict[str, Any] = {"output": output.detach(), **gradients}
    return {key: value for key, value in results.items() if value is not None and value.numel()}


def cut(full: Tensor, dim: int, group: dist.ProcessGroup, blocks: int = 1) -> Tensor:
    """This rank's piece; with blocks, its piece of each."""
    pieces = [block.chunk(group.size(), dim)[group.rank()] for block in full.chunk(blocks, dim)]
    return torch.cat(pieces, dim)


def joined(mine: Tensor, dim: int, group: dist.ProcessGroup, blocks: int = 1) -> Tensor:
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine.contiguous(), group=group)
    pieces = [part.chunk(blocks, dim) for part in parts]
    return torch.cat([piece[block] for block in range(blocks) for piece in pieces], dim)


def config(tensor: int, sequence: bool) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=4,
        tensor_model_parallel_size=tensor,
        sequence_parallel=sequence,
        gradient_accumulation_fusion=False,
    )


def base_layer(
    case: Case, n: dict[str, Tensor], options: TransformerConfig, placement: Placement
) -> nn.Module:
    """megatron-core's frozen linear with this rank's slice of the fused weight."""
    weight = fuse(case, [n[f"{name}.W"] for name, *_ in case.parts])
    group, is_expert = placement.group, placement.is_expert
    if case.kind == "columns":
        layer = RowParallelLinear(
            case.columns,
            case.rows,
            config=options,
            init_method=nn.init.zeros_,
            bias=case.bias,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=is_expert,
            tp_group=group,
        )
        layer.weight.data.copy_(cut(weight, 1, group))
    else:
        layer = ColumnParallelLinear(
            case.columns,
            case.rows,
            config=options,
            init_method=nn.init.zeros_,
            bias=case.bias,
            skip_bias_add=True,
            is_expert=is_expert,
            tp_group=group,
        )
        # A gated first linear has a piece of gate and a piece of up on each rank.
        blocks = len(case.parts) if case.kind == "rows" and case.num_blocks == 1 else 1
        layer.weight.data.copy_(cut(weight, 0, group, blocks))
    if case.bias:
        bias = n["bias"] if case.kind == "columns" else cut(n["bias"], 0, group)
        layer.bias.data.copy_(bias)
    return layer.requires_grad_(False)


def adapted(
    case: Case, n: dict[str, Tensor], options: TransformerConfig, placement: Placement
) -> LoRALinear:
    group = placement.group
    cut_rows = group.size() if case.kind == "rows" else 1
    layer = LoRALinear(
        base_layer(case, n, options, placement),
        name="layer",
        parts=[LoRAPart(name, rows // cut_rows, r, scale) for name, rows, r, scale in case.parts],
        placement=placement,
        num_blocks=max(case.num_blocks // cut_rows, 1),
    )
    with torch.no_grad():
        for part, a, b in layer.pairs():
            whole_a, whole_b = n[f"{part.name}.A"], n[f"{part.name}.B"]
            a.copy_(cut(whole_a, 1, group) if case.kind == "columns" else whole_a)
            b.copy_(cut(whole_b, 0, group) if case.kind == "rows" else whole_b)
    return layer


def run(case: Case, tensor: int, sequence: bool) -> dict[str, Tensor]:
    """Whole outputs and gradients, put together over the ranks."""
    group = build_mesh(Layout(tensor=tensor)).groups.tp
    n = numbers(case)
    layer = adapted(case, n, config(tensor, sequence), Placement(case.kind, group, sequence))

    by_columns = case.kind == "columns"
    rows_of_output = len(case.parts) if case.kind == "rows" and case.num_blocks == 1 else 1
    x = cut(n["x"], 2, group) if by_columns else n["x"]
    x = cut(x, 0, group) if sequence and not by_columns else x
    x.requires_grad_()
    output, bias = layer(x)
    assert (bias is not None) == case.bias
    upstream = n["upstream"] if by_columns else cut(n["upstream"], 2, group, rows_of_output)
    upstream = cut(upstream, 0, group) if sequence and by_columns else upstream
    (output * upstream).sum().backward()
    for parameter in layer.parameters():  # what megatron-core's finalize_model_grads does
        if getattr(parameter, "sequence_parallel", False) and parameter.requires_grad:
            dist.all_reduce(parameter.grad, group=group)

    results = {}
    if by_columns:
        results["output"] = joined(output, 0, group) if sequence else output
        results["x"] = joined(x.grad, 2, group)
    else:
        results["output"] = joined(output, 2, group, rows_of_output)
        results["x"] = joined(x.grad, 0, group) if sequence else x.grad
    gradients = layer.lora_A.grad.split([part.rank for part in layer.parts])
    for part, gradient in zip(layer.parts, gradients, strict=True):
        if part.rank:
            b = layer.lora_B[part.name].grad
            results[f"{part.name}.A"] = joined(gradient, 1, group) if by_columns else gradient
            results[f"{part.name}.B"] = joined(b, 0, group) if case.kind == "rows" else b

    with torch.no_grad():
        layer.weight.copy_(layer.merged_weight())
        layer.enabled = False
        merged = layer(x)[0]
        results["merged"] = merged - output
    return results


@pytest.mark.parametrize(
    ("name", "tensor", "sequence"),
    [
        (name, tensor, sequence)
        for name, case in CASES.items()
        for tensor, sequence in ((1, False), (2, False), (2, True))
        if tensor > 1 or case.kind != "fused"
    ],
)
def test_equals_separate_pairs(name: str, tensor: int, sequence: bool) -> None:
    case = CASES[name]
    expected = plain(case)
    for result in launch(tensor, run, case, tensor, sequence):
        assert abs(result.pop("merged")).max() < 1e-5 * expected["output"].abs().max()
        assert result.keys() == expected.keys()
        for key, value in expected.items():
            difference = (torch.from_numpy(result[key]) - value).abs().max()
            assert difference <= 1e-5 * value.abs().max(), key


def run_experts(tensor: int) -> dict[str, Tensor]:
    """An expert's two linears over the expert tensor axis; tokens are gathered before and summed
    after, as the dispatcher does.
    """
    group = build_mesh(Layout(expert_tensor=tensor)).groups.expt_tp
    first, second = CASES["gate and up"], CASES["row-parallel"]
    n, m = numbers(first), numbers(second)
    layers = [
        adapted(case, values, config(1, False), Placement(case.kind, group, is_expert=True))
        for case, values in ((first, n), (second, m))
    ]
    x, y = n["x"].requires_grad_(), cut(m["x"], 2, group).requires_grad_()
    up, _ = layers[0](copy_to_tensor_model_parallel_region(x, group=group))
    down, _ = layers[1](y)
    down = reduce_from_tensor_model_parallel_region(down, group=group)
    loss = (up * cut(n["upstream"], 2, group, 2)).sum() + (down * m["upstream"]).sum()
    loss.backward()
    results = {"up": joined(up, 2, group, 2), "down": down, "up x": x.grad}
    results["down x"] = joined(y.grad, 2, group)
    gate, up_a = layers[0].lora_A.grad.split([2, 3])
    results |= {"gate.A": gate, "up.A": up_a, "down.A": joined(layers[1].lora_A.grad, 1, group)}
    for name, b in layers[0].lora_B.items():
        results[f"{name}.B"] = joined(b.grad, 0, group)
    results["down.B"] = layers[1].lora_B["down"].grad
    return results


@pytest.mark.parametrize("tensor", [1, 2])
def test_experts_leave_communication_to_the_dispatcher(tensor: int) -> None:
    up, down = plain(CASES["gate and up"]), plain(CASES["row-parallel"])
    expected = {
        **{key: value for key, value in {**up, **down}.items() if "." in key},
        "up": up["output"],
        "up x": up["x"],
        "down": down["output"],
        "down x": down["x"],
    }
    for result in launch(tensor, run_experts, tensor):
        assert result.keys() == expected.keys()
        for key, value in expected.items():
            difference = (torch.from_numpy(result[key]) - value).abs().max()
            assert difference <= 1e-5 * value.abs().max(), key
