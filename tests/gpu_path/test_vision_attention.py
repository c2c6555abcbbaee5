"""A vision tower's attention on a GPU, one variable-length kernel, against that on a CPU."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from megavlm.data.media.image_processing import Grid
from megavlm.models.common.vision_layers import Segments, attend
from megavlm.models.qwen2_5_vl.vision import window_lengths
from megavlm.parallel import platform
from tests.support import kernels
from tests.support.towers import make_pair, make_patches, relative
from tests.unit.models.test_towers import BATCHES, every_family

CPU = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of segments of each call of the kernel, on a machine with a GPU."""
    found: list[int] = []

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        found.append(len(args[3]) - 1)
        return kernels.varlen_attn(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    return found


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("grids", BATCHES.values(), ids=BATCHES)
def test_one_kernel_for_all_lengths(
    monkeypatch: pytest.MonkeyPatch, calls: list[int], grids: Sequence[Grid], windows: bool
) -> None:
    """Outputs and gradients are those of the dense form."""
    monkeypatch.setattr(kernels, "DTYPES", {torch.float64})
    segments = Segments.frames(grids, CPU)
    if windows:
        segments = Segments.pack(grids, lambda h, w: window_lengths(h, w, 2, 4), CPU)
    generator = torch.Generator().manual_seed(0)
    shape = (sum(segments.lengths), 2, 8)
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(4)]
    *qkv, gradient = [x.requires_grad_() for x in inputs]
    results = []
    for has_gpu in (True, False):
        monkeypatch.setattr(platform, "has_gpu", lambda value=has_gpu: value)
        output = attend(*qkv, segments)
        results.append((output, *torch.autograd.grad(output, qkv, gradient)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    assert calls == [len(segments.lengths)]


@every_family
def test_towers_in_bf16(calls: list[int], monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """The kernel gets what it takes, once a block, whatever the sizes of the images, and rounds as
    the computation without it does.
    """
    tower, grids = make_pair(family).ours, BATCHES["images and videos"]
    patches = make_patches(grids)
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(platform, "has_gpu", lambda: False)
            exact = tower(patches, grids)
            tower.bfloat16()
            without = tower(patches, grids).float()
        assert not calls
        ours = tower(patches, grids).float()
    assert len(calls) == len(tower.blocks)
    assert relative(ours, exact) < 1.5 * relative(without, exact)
    assert len(calls) == len(tower.blocks)


def test_float32_is_dense(calls: list[int]) -> None:
    """The kernel does not compute in it."""
    query = torch.randn(8, 2, 8)
    attend(query, query, query, Segments.frames([(1, 2, 4)], CPU))
    assert calls == []
