"""The bias that requests of a batch share gives the logits of SGLang's dense matrix."""

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.inference import server_support
from megavlm.inference.server_support.megavlm_bias import SharedBias, merging, shared_bias

SUPPRESSED = {"3": -1e9, "7": -1e9}
VOCABULARY = 16


def shared(size: int, bias: dict[str, float] = SUPPRESSED) -> SharedBias:
    return SharedBias(bias, size, VOCABULARY, "cpu")


def applied(bias: Any, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Do as SGLang does with the bias of a batch."""
    logits = torch.randn(size, VOCABULARY, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits.add_(bias)
    return logits


def merge_as_sglang(left: Any, right: Any, size: int, other_size: int) -> Any:
    zeros = (torch.zeros(n, VOCABULARY) for n in (size, other_size))
    pair = [x if x is not None else z for x, z in zip((left, right), zeros, strict=True)]
    return torch.cat(pair)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_added_as_the_matrix_is(dtype: torch.dtype) -> None:
    assert torch.equal(applied(shared(4), 4, dtype), applied(shared(4).dense(), 4, dtype))
    assert (applied(shared(4), 4).softmax(-1)[:, [3, 7]] == 0).all()


def test_requests_that_end_and_join_keep_it_shared() -> None:
    merge = merging(merge_as_sglang)
    kept = shared(4)[torch.tensor([0, 2, 3])]
    joined = merge(kept, shared(2), 3, 2)
    assert isinstance(joined, SharedBias) and joined.size == 5
    assert torch.equal(joined.dense(), shared(5).dense())


@pytest.mark.parametrize("other", [None, {"5": 2.0}])
def test_another_bias_or_none_makes_it_dense(other: dict[str, float] | None) -> None:
    merge = merging(merge_as_sglang)
    right = None if other is None else shared(2, other)
    joined = merge(shared(3), right, 3, 2)
    wanted = torch.zeros(5, VOCABULARY)
    wanted[:3, [3, 7]] = -1e9
    if other:
        wanted[3:, 5] = 2.0
    assert torch.equal(joined, wanted)
    assert torch.equal(applied(joined, 5), applied(wanted, 5))


@pytest.mark.parametrize(
    ("biases", "found"),
    [
        ([SUPPRESSED, dict(SUPPRESSED)], SUPPRESSED),
        ([SUPPRESSED, None], None),
        ([None, None], None),
        ([SUPPRESSED, {"3": -1e9}], None),
        ([], None),
        ([{}, {}], None),
    ],
)
def test_only_equal_biases_are_shared(biases: Any, found: Any) -> None:
    assert shared_bias(biases) == found


def test_sglang_finds_the_plugin_on_a_server_s_path(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(server_support.__file__).parent
    monkeypatch.syspath_prepend(str(folder))
    (found,) = entry_points(group="sglang.srt.plugins", name="megavlm_bias")
    assert found.load().__name__ == "install"
    sys.modules.pop("megavlm_bias")
