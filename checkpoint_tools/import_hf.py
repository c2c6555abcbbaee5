"""HuggingFace folder -> checkpoint folder, with adapters or without."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_tools.adapters import Adapters
from checkpoint_tools.ahead import one_ahead
from checkpoint_tools.output import output_folder
from checkpoint_tools.progress import Show, silent
from checkpoint_tools.ranks import Ranks
from checkpoint_tools.step_adapters import Piece, adapter_pieces
from checkpoint_tools.weights import Weights, hub_weights
from megavlm.checkpointing import atomic, folder
from megavlm.checkpointing.adapters import AdapterSettings
from megavlm.checkpointing.checksums import Sums, checksums
from megavlm.checkpointing.writer import Record, RecordFile, write_contents
from megavlm.models.common.loading import HUB, Form
from megavlm.models.common.mapping import Entry


@dataclass(frozen=True)
class Import:
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True)
class _Written:
    """One rank's file. `tensors`: on the meta device, the whole ones that it has pieces of."""

    name: str
    sums: Sums
    records: list[Record]
    tensors: dict[str, Tensor]


def import_hf(
    hf_dir: Path,
    checkpoint_dir: Path,
    *,
    force: bool = False,
    experts: Form = HUB,
    ranks: Ranks | None = None,
    show: Show = silent,
) -> Import:
    """Writes the weights as step 0, in the dtypes that they have.

    Holds two tensors in memory, of experts one by one. With several `ranks` each reads its share
    of the tensors and writes a file of its own. `experts`: the form of stacks, as in HubTensors.
    ValueError, before anything is written, for what `hub_weights` refuses, an output folder that is
    in use, or a disk without room.
    """
    ranks = ranks or Ranks()
    opened: list[Weights] = []
    ranks.together("reading", lambda: opened.append(hub_weights(hf_dir, experts)))
    (weights,) = opened
    return write_checkpoint(weights, checkpoint_dir, force=force, ranks=ranks, show=show)


def write_checkpoint(
    weights: Weights,
    checkpoint_dir: Path,
    *,
    adapters: Adapters | None = None,
    force: bool = False,
    ranks: Ranks | None = None,
    show: Show = silent,
) -> Import:
    """Weights and adapters as step 0; adapters by one process alone."""
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
            folder.write_hf_files(weights.hf_files, output / folder.HF)
            atomic.partial(folder.step_folder(output, 0)).mkdir()
            return output

        output, *_ = ranks.together("preparing", prepare)
        assert output is not None
        step = atomic.partial(folder.step_folder(output, 0))
        bar = show if ranks.is_lead else silent
        files = ranks.together("writing", lambda: _write(weights, adapters, step, ranks, bar))

        def publish() -> None:
            if ranks.is_lead:
                if adapters is not None:
                    AdapterSettings(adapters.rank, adapters.alpha, adapters.base).write(step)
                _describe(step, files)
                folder.publish(output, 0)
                stack.close()

        ranks.together("publishing", publish)
    tensors = {key for file in files for key in file.tensors}
    return Import(len(tensors), total)


def _write(
    weights: Weights, adapters: Adapters | None, step: Path, ranks: Ranks, show: Show
) -> _Written:
    """This rank's share, and the adapters."""

    def read(entry: Entry) -> Piece:
        tensor = weights.read(entry)
        return Piece(entry.megatron, entry.expert, entry.checkpoint_shape, tensor)

    entries = share(weights, ranks)
    nbytes = sum(weights.entry_bytes(entry) for entry in entries)
    nbytes += adapters.total_bytes if adapters else 0
    tensors = {}
    added = adapter_pieces(adapters) if adapters else ()
    with RecordFile(step, ranks.rank) as file, show("import", nbytes) as advance:
        for piece in chain(one_ahead(read, entries), added):
            tensor = piece.tensor
            tensors[piece.key] = torch.empty(piece.shape, dtype=tensor.dtype, device="meta")
            if piece.expert is None:
                file.add(piece.key, tensor)
            else:
                offsets = (piece.expert, *(0 for _ in tensor.shape))
                file.add(piece.key, tensor[None], offsets)
            advance(tensor.nbytes)
    return _Written(file.name, file.sums, file.records, tensors)


def share(weights: Weights, ranks: Ranks) -> list[Entry]:
    """The entries of one rank: about as many bytes as of any other, one after the other."""
    entries, done, total = [], 0, weights.total_bytes
    for entry in weights.entries():
        nbytes = weights.entry_bytes(entry)
        if (done + nbytes // 2) * ranks.size // total == ranks.rank:
            entries.append(entry)
        done += nbytes
    return entries


def _describe(step: Path, files: Iterable[_Written]) -> None:
    """Contents and manifest of what the ranks have written."""
    tensors = {key: tensor for file in files for key, tensor in file.tensors.items()}
    write_contents(step, tensors, (record for file in files for record in file.records))
    sums = {file.name: file.sums for file in files}
    others = {path.name for path in step.iterdir()} - sums.keys()
    sums |= checksums(step, sorted(others))
    folder.Manifest(step=0, has_optimizer=False, layout={}, files=sums).write(step)
