"""One rank of a cluster that does not exist, and tensors that take no memory: enough to build a
model of any layout on a laptop and look at what each rank would hold.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Within it this process is rank `rank` of `world_size`, in torch's fake process group, whose
    collectives return at once and leave their tensors as they are. Nothing may be computed there.

    It is for processes without a process group: megatron-core's groups are global, and those of a
    training run would be lost.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    assert not dist.is_initialized(), "this process has ranks already: use a fresh one"
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Within it every new tensor is on the meta device, whatever device the code asks for."""
    with torch.device("meta"), _MetaOnly():
        yield


# There is nothing to draw, and on a meta tensor torch would take a millisecond for each.
_DRAWS = (torch.nn.init.normal_, torch.nn.init.uniform_, torch.nn.init.kaiming_uniform_)


class _MetaOnly(TorchFunctionMode):
    """Code that names a device, as megatron-core does, is given the meta device."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in _DRAWS:
            return kwargs["tensor"]
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        if function is torch.Tensor.to:  # which nn.Module.to calls with the device in its place
            args = tuple("meta" if isinstance(x, torch.device) else x for x in args)
        return function(*args, **kwargs)
