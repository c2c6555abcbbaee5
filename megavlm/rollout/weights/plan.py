"""Which tensors a push sends, and in which portions."""

from collections.abc import Iterator, Sequence

from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megavlm.models.common.loading import local_tensors
from megavlm.models.common.mapping import Entry

Item = tuple[Entry, Tensor]  # a Megatron tensor's entry, and this rank's shard of it


def plan(entries: Sequence[Entry], model: MegatronModule, *, full: bool) -> list[Item]:
    """The tensors that training can change (`full`: all), in the order of `entries`, on this rank.

    A tensor is trained where its storage is that of a parameter that requires grad.
    """
    trained = {p.data_ptr() for p in model.parameters() if p.requires_grad}
    local = {tensor.key: tensor.data for tensor in local_tensors(model)}
    return [
        (entry, local[entry.megatron].detach())
        for entry in entries
        if entry.megatron in local and (full or local[entry.megatron].data_ptr() in trained)
    ]


def portions(items: Sequence[Item], num_ranks: int, max_bytes: int) -> Iterator[list[Item]]:
    """Runs of items whose full tensors take at most `max_bytes`; a single item may take more."""
    run: list[Item] = []
    size = 0
    for entry, shard in items:
        item_size = shard.nbytes * (1 if entry.shard.dim is None else num_ranks)
        if run and size + item_size > max_bytes:
            yield run
            run, size = [], 0
        run.append((entry, shard))
        size += item_size
    if run:
        yield run
