"""Gated DeltaNet's chunked kernel in bf16, over a tree, against PyTorch's operations in fp32.

    python -m tests.gpu.linear_attention

Reports the errors of outputs and of each input's gradient, relative to the exact ones, of the
kernel and, as a measure, of inputs and gradients that are rounded alone. Segments start from their
parents' states, so initial states and bounds of sequences take part.
"""

import torch
from torch import Tensor

from megavlm.models.linear_attention.chunked_rule import chunk_gated_delta_rule
from megavlm.models.linear_attention.delta_rule import (
    Rule,
    backward_refusal,
    choose_rule,
    tree_delta_rule,
)
from megavlm.models.linear_attention.tree_scan import make_tree_scan
from megavlm.parallel import platform
from tests.gpu import model, shapes
from tests.gpu.lines import report

# Of a kernel in bf16, relative to the exact result. A state or a gradient that is lost makes 0.2.
KERNEL_ERROR = 0.02
Errors = dict[str, float]
NAMES = ("output", "query", "key", "value", "decay", "beta")
PARENTS = (-1, 0, 0, 0, 2, 2, -1)
LENGTHS = (130, 64, 1, 65, 3, 200, 17)


def measure() -> dict[str, Errors]:
    """Return the errors of the machine's kernel and of rounding."""
    heads, size = ((2, 4), 16) if shapes.is_tiny() else ((16, 32), 128)
    inputs = random_inputs(heads, size)
    exact = outputs_and_gradients([x.float() for x in inputs], chunk_gated_delta_rule)
    return {
        "kernel": errors(outputs_and_gradients(inputs, choose_rule()), exact),
        "rounding": errors([x.bfloat16() for x in exact], exact),
    }


def random_inputs(heads: tuple[int, int], size: int) -> list[Tensor]:
    """Return query, key, value, log decay and beta as the layer makes them: bf16, but the decay."""
    generator = torch.Generator().manual_seed(0)
    tokens, (groups, values) = sum(LENGTHS), heads
    query, key = (torch.randn(tokens, groups, size, generator=generator) for _ in range(2))
    value = torch.randn(tokens, values, size, generator=generator)
    strength = torch.linspace(0.01, 1.0, values)
    decay = -strength * torch.rand(tokens, values, generator=generator)
    beta = torch.rand(tokens, values, generator=generator)
    rounded = [x.bfloat16() for x in (query, key, value)]
    return [x.to(platform.device()) for x in (*rounded, decay, beta.bfloat16())]


def outputs_and_gradients(inputs: list[Tensor], rule: Rule) -> list[Tensor]:
    """Return outputs [T, heads, V], and the gradient of each input of a random sum of them where
    the kernel has a backward pass.
    """
    bounds = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    scan = make_tree_scan(PARENTS, bounds, 4, platform.device())
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    query, key, value, decay, beta = leaves
    output = tree_delta_rule(query, key, value, decay, beta, scan, rule)
    if backward_refusal():
        return [output.detach()]
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(weight.to(output))
    return [output.detach(), *(x.grad for x in leaves if x.grad is not None)]


def errors(found: list[Tensor], exact: list[Tensor]) -> Errors:
    pairs = zip(NAMES, found, exact, strict=False)  # the output alone without a backward pass
    return {name: float((x.float() - y).norm() / y.norm()) for name, x, y in pairs}


def main() -> None:
    model.prepare()
    found = measure()
    if reason := backward_refusal():
        report("delta rule, forward only", reason=reason)
    for name, error in found["kernel"].items():
        fault = None if error <= KERNEL_ERROR else f"off by {error:.1e}, at most {KERNEL_ERROR:.0e}"
        report(
            "delta rule", fault=fault, tensor=name, error=error, rounding=found["rounding"][name]
        )


if __name__ == "__main__":
    main()
