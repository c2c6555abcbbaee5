"""Saves a training step: all ranks write it, and rank 0 publishes it."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.storage import WriteResult

from megavlm.checkpointing import atomic
from megavlm.checkpointing.adapter_settings import AdapterSettings
from megavlm.checkpointing.all_ranks import run_on_all_ranks
from megavlm.checkpointing.checksums import Sums, file_checksums
from megavlm.checkpointing.folder import (
    HF_FILES,
    LORA_SETTINGS,
    Manifest,
    publish,
    step_folder,
    write_extra,
    write_hf_files,
)
from megavlm.checkpointing.random_states import random_states_file, write_random_states
from megavlm.checkpointing.retention import Retention, prune
from megavlm.checkpointing.snapshot import Snapshot, Written
from megavlm.checkpointing.state import TrainedState, current_layout
from megavlm.process import CheckpointError


@dataclass(frozen=True)
class SaveTarget:
    """Checkpoint folder of a run, and the settings that all of its steps share.

    hf_folder: The model folder whose configuration, tokenizer and processor files an export needs.
    adapters: Settings of the model's adapters, None if it has none.
    retention: Rule that selects the steps to keep.
    """

    folder: Path
    hf_folder: Path | None = None
    adapters: AdapterSettings | None = None
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True)
class PendingSave:
    """A step that is being saved. It has the state of the moment when `begin_save` returned."""

    target: SaveTarget
    step: int
    scores: dict[str, float]
    snapshot: Snapshot
    small: dict[str, Sums]  # checksums of the files that this rank has already written

    @property
    def what(self) -> str:
        return _what(self.target, self.step)

    def complete(self, group: dist.ProcessGroup | None = None) -> None:
        """Write the shards, publish the step once every rank has written, and prune older steps.

        Collective over `group`, a group of all ranks. Raises CheckpointError as `save_checkpoint`
        does.
        """
        folder = self.target.folder
        path = _partial_step(folder, self.step)

        def finish(parts: Sequence[Written]) -> None:
            pieces: list[list[WriteResult]] = [part.pieces for part in parts]
            files = {name: part.files[name] for part in parts for name in part.files}
            files |= file_checksums(path, self.snapshot.write_contents(pieces))
            Manifest(
                step=self.step,
                has_optimizer=True,
                layout=current_layout(),
                files=dict(sorted(files.items())),
                scores=self.scores,
            ).write(path)
            publish(folder, self.step)
            prune(folder, self.step, self.target.retention)

        def write() -> Written:
            written = self.snapshot.write()
            return Written(written.pieces, {**self.small, **written.files})

        with _removed_on_error(path):
            hint = partial(_hint, folder)
            parts = run_on_all_ranks(self.what, write, group, hint=hint)
            is_first = dist.get_rank() == 0
            run_on_all_ranks(
                self.what, lambda: finish(parts) if is_first else None, group, hint=hint
            )

    def abandon(self) -> None:
        """Remove the files of the step that were already written."""
        _remove(_partial_step(self.target.folder, self.step))


def begin_save(
    target: SaveTarget,
    step: int,
    state: TrainedState,
    *,
    extra: dict[str, Any],
    scores: Mapping[str, float] | None = None,
    copy: bool = True,
) -> PendingSave:
    """Take a snapshot of the state that training changes, and write the small files. Collective.

    copy: Also copy tensors that are already in host memory, so that training may continue before
        the rest is written. Tensors in device memory are always copied.

    The other arguments are the same as in `save_checkpoint`.
    """
    folder = target.folder
    path = _partial_step(folder, step)
    rank = dist.get_rank()
    what = _what(target, step)

    def prepare() -> None:
        if rank != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        if target.hf_folder is not None and not (folder / HF_FILES).exists():
            write_hf_files(target.hf_folder, atomic.partial_path(folder / HF_FILES))
            atomic.replace_folder(folder / HF_FILES)
        path.mkdir()

    def write_small(snapshot: Snapshot) -> dict[str, Sums]:
        file = random_states_file(path, rank)
        write_random_states(file)
        names = [file.name]
        if rank == 0:
            names.append(snapshot.write_common())
            names += write_extra(path, extra)
            if target.adapters is not None:
                target.adapters.write(path)
                names.append(LORA_SETTINGS)
        for name in names:
            atomic.sync(path / name)
        return file_checksums(path, names)

    with _removed_on_error(path):
        hint = partial(_hint, folder)
        run_on_all_ranks(what, prepare, hint=hint)
        snapshot = Snapshot(path, state, copy=copy)
        small = run_on_all_ranks(what, lambda: write_small(snapshot), hint=hint)[rank]
    return PendingSave(target, step, dict(scores or {}), snapshot, small)


def save_checkpoint(
    target: SaveTarget,
    step: int,
    state: TrainedState,
    *,
    extra: dict[str, Any],
    scores: Mapping[str, float] | None = None,
) -> None:
    """Write everything that training needs to resume from `step`. Collective.

    state: This rank's part of model, optimizer and scheduler.
    extra: State of the trainer as values for JSON and bytes; rank 0's is written.
    scores: Maps metrics to values, for `target.retention`; rank 0's are written.

    Raises CheckpointError on every rank if a rank cannot write. In this case no partial step is
    left, and older steps are kept.
    """
    begin_save(target, step, state, extra=extra, scores=scores, copy=False).complete()


def _what(target: SaveTarget, step: int) -> str:
    return f"checkpoint of step {step} in {target.folder}"


def _partial_step(folder: Path, step: int) -> Path:
    return atomic.partial_path(step_folder(folder, step))


@contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    """Remove the partial step if it cannot be finished."""
    try:
        yield
    except CheckpointError:
        _remove(path)
        raise


def _remove(path: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)


def _hint(folder: Path) -> str:
    existing = next(x for x in (folder, *folder.absolute().parents) if x.exists())
    free = shutil.disk_usage(existing).free / 1e9
    return f". Older steps are intact; {free:.1f} GB are free there."


def _clean(folder: Path) -> None:
    """Remove folders that a killed run left half-written, half-replaced or half-deleted."""
    for pattern in (".step_*.partial", ".step_*.older", ".step_*.deleted", f".{HF_FILES}.partial"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=pattern.endswith((".older", ".deleted")))
