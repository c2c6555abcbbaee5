"""FlexAttention traced as on a GPU: one graph for packs of all shapes, with the numbers of the
dense backend. It runs operator by operator, as torch has no compiled backward on a CPU (nor, in
2.13, a C++ forward for dynamic lengths with a mask that reads tensors).
"""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from megavlm.data.packs.packing import make_pack
from megavlm.models.common import attention_backends
from megavlm.models.common.attention_backends import flex, sdpa
from megavlm.models.common.pack_layout import PackLayout
from megavlm.parallel import platform
from tests.support.forests import FORESTS, forest, random_shape

SCALE, HEAD_DIM = 0.3, 16
PASSES = (True, False)  # with and without gradients, as in a step
NUM_GRAPHS = 4  # the mask, attention in each kind of pass, and its backward


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The counter of what torch compiles."""
    import torch._dynamo  # here: it takes as long as torch itself
    from torch._dynamo.testing import CompileCounterWithBackend

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    # It refuses tensors with gradients on a CPU.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = functools.partial(torch.compile, backend=counter)
    monkeypatch.setattr(torch, "compile", compiled)
    caches = (attention_backends._compiled, attention_backends._compiled_flex)
    with torch._dynamo.config.patch(disable=False):
        yield counter
    for cache in caches:
        cache.cache_clear()
    torch.compiler.reset()


def packs(context_size: int) -> Iterator[PackLayout]:
    """Every rank's part of packs of few tokens and of several blocks of 128."""
    forests = list(FORESTS.values())
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        trees = [random_shape(generator) for _ in range(1 + seed % 3)]
        forests.append([[(20 * size, parent) for size, parent in shape] for shape in trees])
    for shapes in forests:
        pack = make_pack(forest(shapes), vision_token_ids=(), context_size=context_size)
        for rank in range(context_size):
            yield PackLayout.of(pack.part(rank))


def inputs(layout: PackLayout) -> tuple[list[Tensor], Tensor]:
    """Query, key and value, and the gradient of the output."""
    generator = torch.Generator().manual_seed(layout.num_tokens)
    sizes = ((len(layout.token_index), 4), (layout.num_tokens, 2), (layout.num_tokens, 2))
    tensors = [torch.randn(*size, HEAD_DIM, generator=generator) for size in sizes]
    return tensors, torch.randn(*sizes[0], HEAD_DIM)


def difference(layout: PackLayout, *, with_gradients: bool) -> float:
    """Return the largest difference from the dense backend."""
    tensors, gradient = inputs(layout)
    tensors = [x.requires_grad_(with_gradients) for x in tensors]
    results: list[Any] = []
    for backend in (flex, sdpa):
        with torch.set_grad_enabled(with_gradients):
            output = backend(*tensors, layout, SCALE)
        gradients = torch.autograd.grad(output, tensors, gradient) if with_gradients else ()
        results.append((output.detach(), *gradients))
    return max(float((x - y).abs().max()) for x, y in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("context_size", [1, 4])
def test_one_graph_serves_all_packs(compilations: Any, context_size: int) -> None:
    """Forward and backward, on every rank; torch gives up after eight graphs."""
    for layout in packs(context_size):
        for with_gradients in PASSES:
            assert difference(layout, with_gradients=with_gradients) < 1e-5
    assert compilations.frame_count == NUM_GRAPHS
