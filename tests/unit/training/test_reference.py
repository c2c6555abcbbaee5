"""The reference's weights change places with the policy's by few copies, through memory that is
allocated once.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megavlm.parallel import offload, platform
from megavlm.parallel.offload import HostCopy
from megavlm.training.reference import ReferenceWeights

COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
VIEWS = {"detach", "view", "slice", "alias"}


class CopyCounter(TorchDispatchMode):
    """Counts the bytes that are copied; `others`: operators that are neither copies nor views."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes, self.others = 0, set[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in COPIES:
            self.num_bytes += result.nbytes
        elif function.overloadpacket.__name__ not in VIEWS:
            self.others.add(str(function))
        return result


def model() -> nn.Module:
    """Parameters of several dtypes and of sizes that fit no block."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Module()
    shapes = {"a": (5, 7), "b": (33,), "c": (3, 3, 3), "scalar": (), "none": (0, 4), "frozen": (9,)}
    for index, (name, shape) in enumerate(shapes.items()):
        dtype = (torch.bfloat16, torch.float32, torch.float64)[index % 3]
        values = torch.randn(shape, generator=generator).to(dtype)
        module.register_parameter(name, nn.Parameter(values, requires_grad=name != "frozen"))
    return module


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(module: nn.Module, expected: dict[str, Tensor]) -> bool:
    return all(p.equal(expected[name]) for name, p in module.named_parameters())


@pytest.mark.parametrize("block", [2**28, 64, 16])
def test_both_are_bit_for_bit_themselves(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Wherever the blocks of host memory end."""
    monkeypatch.setattr(offload, "BLOCK_BYTES", block)
    module = model()
    start = values(module)
    weights = ReferenceWeights([module])
    for _ in range(2):
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data.mul_(-1.7)
        policy = values(module)
        assert not same(module, start)
        with weights.in_place():
            assert same(module, start)
        assert same(module, policy)


def test_the_policy_comes_back_after_an_error() -> None:
    module = model()
    weights = ReferenceWeights([module])
    module.a.data.zero_()
    policy = values(module)
    with pytest.raises(RuntimeError), weights.in_place():
        raise RuntimeError
    assert same(module, policy)


def test_three_copies_a_step_and_no_new_memory() -> None:
    """The policy to the host, the reference to the device, the policy back."""
    module = model()
    weights = ReferenceWeights([module])
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    with CopyCounter() as counter, weights.in_place():
        pass
    assert counter.num_bytes == 3 * trained
    assert counter.others == set()


@pytest.mark.parametrize("has_gpu", [True, False])
def test_host_memory_is_pinned_where_a_gpu_is(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    """In blocks of a power of two bytes, which torch's allocator of pinned memory does not round
    up.
    """
    requests: list[tuple[int, bool]] = []

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        requests.append((size, pin_memory))
        return torch.zeros(size, dtype=dtype)

    monkeypatch.setattr(platform, "has_gpu", lambda: has_gpu)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(offload, "BLOCK_BYTES", 64)
    HostCopy([nn.Parameter(torch.ones(25)), nn.Parameter(torch.ones(3))])
    assert requests == [(64, has_gpu), (64, has_gpu)]  # 112 and 16 bytes
