"""Saves a training step: all ranks write, rank 0 makes it appear."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint.storage import WriteResult

from megavlm.checkpointing import atomic, random_states
from megavlm.checkpointing import folder as form
from megavlm.checkpointing.adapters import SETTINGS, AdapterSettings
from megavlm.checkpointing.checksums import Sums, checksums
from megavlm.checkpointing.retention import Retention, prune
from megavlm.checkpointing.snapshot import Snapshot, Written
from megavlm.checkpointing.state import layout
from megavlm.checkpointing.together import CheckpointError, together


@dataclass(frozen=True)
class Saving:
    """A step on its way to the disk: everything in it is as it was when `begin` returned."""

    folder: Path
    step: int
    scores: dict[str, float]
    retention: Retention
    snapshot: Snapshot
    small: dict[str, Sums]  # of the files that this rank has written

    @property
    def what(self) -> str:
        return f"checkpoint of step {self.step} in {self.folder}"

    def complete(self, group: dist.ProcessGroup | None = None) -> None:
        """Writes the shards; once every rank has, the step appears, and then older ones may go.

        Collective over `group`, which holds all ranks. CheckpointError as in `save`.
        """
        path = _path(self.folder, self.step)

        def publish(parts: Sequence[Written]) -> None:
            pieces: list[list[WriteResult]] = [part.pieces for part in parts]
            files = {name: part.files[name] for part in parts for name in part.files}
            files |= checksums(path, self.snapshot.write_contents(pieces))
            form.Manifest(
                step=self.step,
                has_optimizer=True,
                layout=layout(),
                files=dict(sorted(files.items())),
                scores=self.scores,
            ).write(path)
            form.publish(self.folder, self.step)
            prune(self.folder, self.step, self.retention)

        def write() -> Written:
            written = self.snapshot.write()
            return Written(written.pieces, {**self.small, **written.files})

        with _nothing_left(path):
            hint = partial(_hint, self.folder)
            parts = together(self.what, write, group, hint=hint)
            is_first = dist.get_rank() == 0
            together(self.what, lambda: publish(parts) if is_first else None, group, hint=hint)

    def abandon(self) -> None:
        """Leaves nothing of it."""
        _remove(_path(self.folder, self.step))


def begin(
    folder: str | Path,
    step: int,
    *,
    chunks: Sequence[MegatronModule],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    extra: dict[str, Any],
    hf_folder: str | Path | None = None,
    adapters: AdapterSettings | None = None,
    scores: Mapping[str, float] | None = None,
    retention: Retention | None = None,
    copy: bool = True,
) -> Saving:
    """The first part of `save`: what training changes is taken, and the small files are written.

    Collective over all ranks. `copy`: what is on the host already is copied, so that training may
    go on before the rest is written; device memory always is.
    """
    folder = Path(folder)
    path = _path(folder, step)
    rank = dist.get_rank()
    what = f"checkpoint of step {step} in {folder}"

    def prepare() -> None:
        if rank != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        if hf_folder is not None and not (folder / form.HF).exists():
            form.write_hf_files(Path(hf_folder), atomic.partial(folder / form.HF))
            atomic.replace_folder(folder / form.HF)
        path.mkdir()

    def write_small(snapshot: Snapshot) -> dict[str, Sums]:
        file = random_states.path(path, rank)
        random_states.write(file)
        names = [file.name]
        if rank == 0:
            snapshot.write_common()
            (path / "extra.json").write_text(json.dumps(extra))
            names += ["common.pt", "extra.json"]
            if adapters is not None:
                adapters.write(path)
                names.append(SETTINGS)
        for name in names:
            atomic.sync(path / name)
        return checksums(path, names)

    with _nothing_left(path):
        hint = partial(_hint, folder)
        together(what, prepare, hint=hint)
        snapshot = Snapshot(path, chunks, optimizer, scheduler, copy=copy)
        small = together(what, lambda: write_small(snapshot), hint=hint)[rank]
    return Saving(folder, step, dict(scores or {}), retention or Retention(), snapshot, small)


def save(folder: str | Path, step: int, **state: Any) -> None:
    """Writes everything that training needs to go on from `step`. Collective over all ranks.

    The keywords are `begin`'s. `chunks`: this rank's part of the model. `extra`: the trainer's own
    state, JSON-able, and `scores`, what `retention` compares, as rank 0 has them. `hf_folder`: the
    model folder whose configuration, tokenizer and processor files an export needs. `adapters`: of
    the model, where it has some.
    CheckpointError, on every rank, where a rank cannot write; nothing partial is left then, and
    older steps stay.
    """
    begin(folder, step, **state, copy=False).complete()


def _path(folder: Path, step: int) -> Path:
    """Where the step is written before it appears."""
    return atomic.partial(form.step_folder(folder, step))


@contextmanager
def _nothing_left(path: Path) -> Iterator[None]:
    """Removes the partial step if it cannot be finished."""
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
    """Removes what a killed run left half-written, half-replaced or half-deleted."""
    for pattern in (".step_*.partial", ".step_*.older", ".step_*.deleted", f".{form.HF}.partial"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=pattern.endswith((".older", ".deleted")))
