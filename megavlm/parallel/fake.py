"""A fake rank and tensors without memory, with which a laptop can build a model of any layout to
see the parameters of each rank.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Make this process rank `rank` of `world_size` in torch's fake process group. Its collectives
    return at once and do not change their tensors, so nothing may be computed within the context.

    Only for processes without a process group: megatron-core's groups are global, and the groups of
    a training run would be lost.
    """
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    assert not dist.is_initialized(), "this process has a process group: use a new process"
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Create every new tensor on the meta device, whatever device the code asks for."""
    with torch.device("meta"), _MetaOnly():
        yield


# Initialisation that is skipped: meta tensors have no values, and torch needs a millisecond each.
_DRAWS = (torch.nn.init.normal_, torch.nn.init.uniform_, torch.nn.init.kaiming_uniform_)


class _MetaOnly(TorchFunctionMode):
    """Replaces the explicit devices in megatron-core's calls by the meta device."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in _DRAWS:
            return kwargs["tensor"]
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        if function is torch.Tensor.to:  # nn.Module.to passes the device by position
            args = tuple("meta" if isinstance(x, torch.device) else x for x in args)
        return function(*args, **kwargs)
