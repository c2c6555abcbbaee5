"""The gated delta rule and its convolution on trees, against the recurrence itself and against
transformers' layer on separate sequences, in fp64.
"""

import inspect
from collections.abc import Iterator
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.models.linear_attention.chunked_rule import chunk_gated_delta_rule
from megavlm.models.linear_attention.delta_rule import tree_convolution, tree_delta_rule
from megavlm.models.linear_attention.tree_scan import make_tree_scan
from tests.support.forests import FORESTS, Shape, random_shape

HEADS, VALUE_HEADS, KEY, VALUE = 2, 4, 8, 6
WIDTH = 4


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the code would compute in fp32 is computed in fp64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def random_inputs(total: int, strength: float = 0.5) -> tuple[Tensor, ...]:
    """q, k, v, log decay and beta of `total` tokens."""
    q, k = (torch.randn(total, HEADS, KEY) for _ in range(2))
    decay = -strength * torch.rand(total, VALUE_HEADS).exp()
    beta = torch.rand(total, VALUE_HEADS)
    inputs = (q, k, torch.randn(total, VALUE_HEADS, VALUE), decay, beta)
    return tuple(x.requires_grad_() for x in inputs)


def recurrence(inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token, by the definition; state [value heads, K, V]."""
    q, k, v, decay, beta = inputs
    q, k = (
        (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(2, 1)
        for x in (q, k)
    )
    outputs = [v.new_zeros(0, VALUE_HEADS, VALUE)]
    for t in range(len(v)):
        state = state * decay[t].exp()[:, None, None]
        told = torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t], (v[t] - told) * beta[t][:, None])
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state)[None] * KEY**-0.5)
    return torch.cat(outputs), state


@pytest.mark.parametrize("sizes", [[5], [3, 70, 1, 64, 129]], ids=str)
def test_the_rule_equals_the_recurrence(sizes: list[int]) -> None:
    """Outputs, final states and all gradients, those of initial and final states too."""
    torch.manual_seed(0)
    bounds = [*accumulate(sizes, initial=0)]
    inputs = random_inputs(bounds[-1])
    states = torch.randn(len(sizes), VALUE_HEADS, KEY, VALUE, requires_grad=True)
    pieces = [
        recurrence(tuple(x[first:end] for x in inputs), state)
        for (first, end), state in zip(pairwise(bounds), states, strict=True)
    ]
    expected = torch.cat([p[0] for p in pieces]), torch.stack([p[1] for p in pieces])
    output, final = chunk_gated_delta_rule(
        *(x[None] for x in inputs),
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.tensor(bounds),
    )
    assert final is not None
    same((output[0], final), expected, (*inputs, states))


def test_strong_decay_loses_no_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, where the running sum of log decays is large and the stretches between the later
    tokens, which forget little, are short.
    """
    torch.manual_seed(0)
    q, k, v, decay, beta = random_inputs(64, strength=8.0)
    inputs = (q, k, v, torch.cat([decay[:32], 0.02 * decay[32:]]), beta)
    bounds = torch.tensor([0, 64])
    arguments = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": bounds}
    exact, _ = chunk_gated_delta_rule(*(x[None] for x in inputs), **arguments)
    monkeypatch.undo()
    single, _ = chunk_gated_delta_rule(*(x[None].float() for x in inputs), **arguments)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=5e-7 * exact.abs().max().item())


@pytest.mark.parametrize("name", FORESTS)
def test_a_tree_equals_its_sequences(name: str) -> None:
    check_forest(FORESTS[name])


def test_random_trees() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(8):
        check_forest([random_shape(generator) for _ in range(2)])


def check_forest(shapes: list[Shape]) -> None:
    """Each token's convolution and output, in a sequence that is its path."""
    torch.manual_seed(0)
    parents, sizes = [], []
    for shape in [*shapes, [(5, -1)]]:  # padding behind the trees
        first = len(parents)
        parents += [parent + first if parent >= 0 else -1 for _, parent in shape]
        sizes += [size for size, _ in shape]
    bounds = [*accumulate(sizes, initial=0)]
    total = bounds[-1]
    inputs = random_inputs(total)
    x, weight = torch.randn(total, 3, requires_grad=True), torch.randn(3, WIDTH, requires_grad=True)
    scan = make_tree_scan(parents, bounds, WIDTH)
    outputs = tree_delta_rule(*inputs, scan, chunk_gated_delta_rule)
    convolved = tree_convolution(x, weight, scan)

    expected, expected_convolved = [], []
    for segment, (first, end) in enumerate(pairwise(bounds)):
        path, ancestor = list(range(first, end)), parents[segment]
        while ancestor >= 0:
            path = [*range(*bounds[ancestor : ancestor + 2]), *path]
            ancestor = parents[ancestor]
        state = torch.zeros(VALUE_HEADS, KEY, VALUE)
        output, _ = recurrence(tuple(y[path] for y in inputs), state)
        expected.append(output[first - end :])
        padded = F.pad(x[path].T[None], (WIDTH - 1, 0))
        convolution = F.conv1d(padded, weight[:, None], groups=3)[0].T
        expected_convolved.append(convolution[first - end :])
    same(
        (outputs, convolved),
        (torch.cat(expected), torch.cat(expected_convolved)),
        (*inputs, x, weight),
    )


def same(
    ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], parameters: tuple[Tensor, ...]
) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    weights = [torch.randn_like(a) for a in ours]
    gradients = [
        torch.autograd.grad(
            sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)), parameters
        )
        for outputs in (ours, theirs)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_the_scan_of_the_documented_example() -> None:
    scan = make_tree_scan([-1, 0, 0], [0, 3, 4, 6], 3)
    assert scan.taps.tolist() == [[6, 0, 1, 2, 2, 4], [6, 6, 0, 1, 1, 2]]
    assert [level.bounds.tolist() for level in scan.levels] == [[0, 3], [0, 1, 3]]


def test_the_torch_rule_takes_the_kernels_arguments() -> None:
    """Names and order of flash-linear-attention 0.6.0's `chunk_gated_delta_rule`."""
    theirs = (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel "
        "use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu "
        "chunk_indices cp_context"
    ).split()
    ours = list(inspect.signature(chunk_gated_delta_rule).parameters)
    assert ours == [name for name in theirs if name in ours]
