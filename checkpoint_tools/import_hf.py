"""Import of a HuggingFace folder as a checkpoint, with or without adapters."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_tools.hf_config import untie
from checkpoint_tools.lora.adapters import AdapterPairs
from checkpoint_tools.lora.step_adapters import StepTensor, adapter_tensors
from checkpoint_tools.output_folder import output_folder
from checkpoint_tools.streaming import ShowProgress, no_progress, prefetch
from checkpoint_tools.weights import Weights, hub_weights
from megavlm.checkpointing import atomic
from megavlm.checkpointing.adapter_settings import AdapterSettings
from megavlm.checkpointing.all_ranks import run_on_all_ranks
from megavlm.checkpointing.checksums import Sums, file_checksums
from megavlm.checkpointing.folder import HF_FILES, Manifest, publish, step_folder, write_hf_files
from megavlm.checkpointing.writer import RecordFile, TensorPiece, write_contents
from megavlm.models.common.loading import Form
from megavlm.models.common.mapping import Entry

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Processes of one import: a single process, or the ranks that torchrun started."""

    rank: int = 0
    size: int = 1

    @property
    def is_lead(self) -> bool:
        return self.rank == 0

    def run(self, what: str, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank as `run_on_all_ranks` does. Collective."""
        return run_on_all_ranks(what, action) if self.size > 1 else [action()]


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Join the ranks under torchrun; no tensor is sent between them."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Import:
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True)
class _Written:
    """File of one rank. tensors: the whole tensors of which it holds pieces, on the meta device."""

    name: str
    sums: Sums
    pieces: list[TensorPiece]
    tensors: dict[str, Tensor]


def import_hf(
    hf_dir: Path,
    checkpoint_dir: Path,
    *,
    force: bool = False,
    experts: Form | None = None,
    ranks: Ranks | None = None,
    show: ShowProgress = no_progress,
) -> Import:
    """Write the weights as step 0, in their own dtypes.

    Holds two tensors in memory; each expert counts as one tensor. With several `ranks`, each rank
    reads its share of the tensors and writes its own file. experts: the format of stacked experts,
    as in HubTensors. Raises ValueError, before anything is written, as `hub_weights` and
    `output_folder` do.
    """
    ranks = ranks or Ranks()
    opened: list[Weights] = []
    ranks.run("reading", lambda: opened.append(hub_weights(hf_dir, experts)))
    (weights,) = opened
    return write_checkpoint(weights, checkpoint_dir, force=force, ranks=ranks, show=show)


def write_checkpoint(
    weights: Weights,
    checkpoint_dir: Path,
    *,
    adapters: AdapterPairs | None = None,
    force: bool = False,
    ranks: Ranks | None = None,
    show: ShowProgress = no_progress,
) -> Import:
    """Write weights and adapters as step 0. Adapters need a single process."""
    ranks = ranks or Ranks()
    assert adapters is None or ranks.size == 1
    added = adapters.total_bytes if adapters else 0
    total = weights.total_bytes + added
    with ExitStack() as stack:

        def prepare() -> Path | None:
            if not ranks.is_lead:
                return None
            sources = (*weights.folders, *([adapters.path] if adapters else []))
            output = stack.enter_context(
                output_folder(
                    checkpoint_dir, sources=sources, force=force, mark="step_*", nbytes=total
                )
            )
            write_hf_files(
                weights.hf_files,
                output / HF_FILES,
                change=untie if weights.is_wrongly_tied else None,
            )
            atomic.partial_path(step_folder(output, 0)).mkdir()
            return output

        output, *_ = ranks.run("preparing", prepare)
        assert output is not None
        step = atomic.partial_path(step_folder(output, 0))
        bar = show if ranks.is_lead else no_progress
        files = ranks.run("writing", lambda: _write(weights, adapters, step, ranks, bar))

        def finish() -> None:
            if ranks.is_lead:
                if adapters is not None:
                    AdapterSettings(adapters.rank, adapters.alpha, adapters.base).write(step)
                _describe(step, files)
                publish(output, 0)
                stack.close()

        ranks.run("publishing", finish)
    tensors = {key for file in files for key in file.tensors}
    return Import(len(tensors), total)


def _write(
    weights: Weights, adapters: AdapterPairs | None, step: Path, ranks: Ranks, show: ShowProgress
) -> _Written:
    """Write this rank's share of the weights, and the adapters."""

    def read(entry: Entry) -> StepTensor:
        tensor = weights.read(entry)
        return StepTensor(entry.megatron, entry.expert, entry.checkpoint_shape, tensor)

    entries = share(weights, ranks)
    nbytes = sum(weights.entry_bytes(entry) for entry in entries)
    nbytes += adapters.total_bytes if adapters else 0
    tensors = {}
    added = adapter_tensors(adapters) if adapters else ()
    with RecordFile(step, ranks.rank) as file, show("import", nbytes) as advance:
        for piece in chain(prefetch(read, entries), added):
            tensor = piece.tensor
            tensors[piece.key] = torch.empty(piece.shape, dtype=tensor.dtype, device="meta")
            if piece.expert is None:
                file.add(piece.key, tensor)
            else:
                offsets = (piece.expert, *(0 for _ in tensor.shape))
                file.add(piece.key, tensor[None], offsets)
            advance(tensor.nbytes)
    return _Written(file.name, file.sums, file.pieces, tensors)


def share(weights: Weights, ranks: Ranks) -> list[Entry]:
    """Return the consecutive entries of one rank. Each rank gets about the same number of bytes."""
    entries, done, total = [], 0, weights.total_bytes
    for entry in weights.entries():
        nbytes = weights.entry_bytes(entry)
        if (done + nbytes // 2) * ranks.size // total == ranks.rank:
            entries.append(entry)
        done += nbytes
    return entries


def _describe(step: Path, files: Iterable[_Written]) -> None:
    """Write the table of contents and the manifest of the ranks' files."""
    tensors = {key: tensor for file in files for key, tensor in file.tensors.items()}
    write_contents(step, tensors, (piece for file in files for piece in file.pieces))
    sums = {file.name: file.sums for file in files}
    others = {path.name for path in step.iterdir()} - sums.keys()
    sums |= file_checksums(step, sorted(others))
    Manifest(step=0, has_optimizer=False, layout={}, files=sums).write(step)
