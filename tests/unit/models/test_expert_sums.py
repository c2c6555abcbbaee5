"""Sums over the experts of a token: megatron-core's results, in a fixed order."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megavlm.models.common import expert_sums
from megavlm.models.common.config import ModelOptions
from tests.parity.cases import packs_of
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.reference import distinct_images
from tests.parity.runs import Run
from tests.parity.table import LAYOUTS
from tests.support.fork import launch


def routed(num_tokens: int, num_experts: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, the map of their experts, and the experts' weights."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(k).indices, True)
    return torch.randn(num_tokens, 5, generator=generator), chosen, scores * chosen


@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(17, 6, 3), (9, 4, 1), (0, 4, 2)])
def test_equals_megatrons(num_tokens: int, num_experts: int, k: int) -> None:
    found = []
    for module in (moe_utils, expert_sums):
        tokens, chosen, probs = routed(num_tokens, num_experts, k)
        tokens.requires_grad_(), probs.requires_grad_()
        copies, weights, index = module.permute(tokens, chosen, probs=probs)
        total = module.unpermute((copies * weights[:, None]).sin(), index, tokens.shape)
        total.cos().sum().backward()
        found.append((copies, weights, index, total, tokens.grad, probs.grad))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_experts_of_a_token_are_added_in_their_order() -> None:
    """In float32: 1e8 + 1 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1."""
    values = torch.tensor([[1e8], [1.0], [-1e8]])
    index = torch.tensor([0, 0, 0])
    sums = {
        expert_sums.unpermute(values[list(order)], index, torch.Size([1, 1])).item()
        for order in ((0, 1, 2), (0, 2, 1))
    }
    assert sums == {0.0, 1.0}


class Additions(TorchDispatchMode):
    """Names of operations that add several values to one place, which a GPU does with atomics."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.rstrip("_") in ("scatter_add", "scatter_reduce", "index_add"):
            dim, index = args[1:3]
            index = (index.movedim(dim, -1) if index.dim() > 1 else index).sort().values
            if (index[..., 1:] == index[..., :-1]).any():
                self.found.add(f"{name} {tuple(args[0].shape)}")
        return func(*args, **(kwargs or {}))


def additions(folder: Path, config: Any) -> tuple[set[str], set[str]]:
    """Return the additions of a forward pass, and of a forward and backward pass."""
    ranks, cases = LAYOUTS["one rank"], inputs_of(folder).sequences("branches")
    run = Run.start(folder, config, ranks, ModelOptions(), distinct_images(cases))
    packs = packs_of([cases], config, ranks)
    with Additions() as forward:
        run.logits(packs)
    with Additions() as both:
        run.backward(packs)
    return forward.found, both.found


@pytest.mark.distributed
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_a_forward_pass_has_no_additions_whose_order_a_gpu_chooses(family: str) -> None:
    """The backward pass has them where segments share keys and states, and nowhere in experts."""
    folder = model_folder(family)
    ((forward, both),) = launch(1, additions, folder, inputs_of(folder).config)
    assert not forward
    assert {name.split()[0] for name in both} == {"index_add"}
