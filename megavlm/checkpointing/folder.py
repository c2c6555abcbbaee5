"""The form of a checkpoint folder. Imported and trained checkpoints have the same one.

    CHECKPOINT_DIR/
      latest               name of the newest step
      best                 name of the best one, where a metric is configured
      hf/                  config, tokenizer and processor files of the model, and their checksums
      step_00000040/
        manifest.json      step, contents, scores, and every other file's size and checksum
        .metadata, metadata.json, common.pt, *.distcp    megatron-core dist_checkpointing
        extra.json         the trainer's own state: loader, curriculum
        lora.json          rank, alpha and base model of its adapters, where it has some
        random_00000.pt    random states of rank 0

A step is written under another name and renamed when all of it is on the disk, so a folder called
`step_*` is complete. `latest` is replaced after that. Before it, `latest` gets a second line that
announces the step with its manifest's checksum: killed between the two, a run goes on from the new
step. A complete step that is not announced in this way is no newer one, whatever its number: a run
that went back (`checkpoint.step`) has left it behind.
"""

import json
import logging
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megavlm.checkpointing import atomic
from megavlm.checkpointing.checksums import checksums, first_difference

FORMAT = 1
HF = "hf"
LATEST = "latest"
MANIFEST = "manifest.json"
ADAPTER = "adapter_config.json"  # PEFT's
_HF_SUMS = "checksums"  # a name that no file of a model folder has, and no copy of hf/ takes along
# Names, not contents, of an HF folder's files that hold no weights and no code.
_HF_PATTERNS = ("*.json", "*.txt", "*.jinja", "*.model", "LICENSE*")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """`layout`: ranks per axis of the run that saved; `files`: name -> {bytes, crc32}; `scores`:
    metric -> value, what the run compares its steps by.
    """

    step: int
    has_optimizer: bool
    layout: dict[str, int]
    files: dict[str, dict[str, int]]
    scores: dict[str, float] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def read(folder: Path) -> "Manifest":
        path = folder / MANIFEST
        try:
            values: dict[str, Any] = json.loads(path.read_bytes())
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']} is not {FORMAT}")
            manifest = Manifest(**values)
            _check(manifest)
            return manifest
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} cannot be read as a checkpoint's manifest: {error}."
            ) from error


def _check(manifest: Manifest) -> None:
    for name, kind in (("layout", int), ("scores", (int, float))):
        if not _is_table(getattr(manifest, name), kind):
            raise ValueError(f"{name} is {getattr(manifest, name)!r}")
    if not isinstance(manifest.step, int):
        raise ValueError(f"step is {manifest.step!r}")
    _check_sums(manifest.files)


def _check_sums(files: Any) -> None:
    if not isinstance(files, dict):
        raise ValueError(f"files is {files!r}")
    for name, sums in files.items():
        if not _is_table(sums, int) or not sums.keys() >= {"bytes", "crc32"}:
            raise ValueError(f"{name} has {sums!r} instead of bytes and crc32")


def _is_table(values: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(values, dict) and all(isinstance(value, kind) for value in values.values())


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def complete_steps(folder: Path) -> list[int]:
    """The steps that can be loaded, oldest first."""
    matches = (
        re.fullmatch(r"step_(\d{8,})", path.parent.name) for path in folder.glob(f"*/{MANIFEST}")
    )
    return sorted(int(match[1]) for match in matches if match)


def latest(folder: str | Path) -> int | None:
    """The step to resume from; None where nothing is complete.

    The tracker file decides. Where it is missing, garbage, or names a step that is not there, the
    newest complete step is taken, with a warning.
    """
    folder = Path(folder)
    steps = complete_steps(folder)
    if not steps:
        return None
    step = _tracked(folder)
    if step is None:
        step = steps[-1]
        logger.warning(
            "%s does not name a complete step: taking the newest one, %d.", folder / LATEST, step
        )
    return step


def _tracked(folder: Path) -> int | None:
    """The step that the tracker file announces, if that has appeared, or else names."""
    tracker = folder / LATEST
    text = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    named, _, announced = text.partition("\n")
    steps = {step_folder(folder, step).name: step for step in complete_steps(folder)}
    coming = announced.split(" ")[0]
    if coming in steps and announced == _announcement(coming, folder / coming):
        return steps[coming]
    return steps.get(named)


def _announcement(name: str, step: Path) -> str:
    return f"{name} {checksums(step, [MANIFEST])[MANIFEST]['crc32']:08x}"


def locate(folder: Path, step: int | None) -> Path:
    """The folder of a step, the latest one by default. `folder` may be a step's own."""
    if step is None and (folder / MANIFEST).is_file():
        return folder
    step = latest(folder) if step is None else step
    if step is None:
        raise ValueError(f"{folder} holds no complete checkpoint.")
    path = step_folder(folder, step)
    if not (path / MANIFEST).is_file():
        raise ValueError(
            f"{folder} holds no complete checkpoint of step {step}; "
            f"it has steps {', '.join(map(str, complete_steps(folder))) or 'none'}."
        )
    return path


def publish(folder: Path, step: int) -> None:
    """The partial step becomes the latest one."""
    path, before = step_folder(folder, step), _tracked(folder)
    if before is not None:
        announcement = _announcement(path.name, atomic.partial(path))
        lines = f"{step_folder(folder, before).name}\n{announcement}\n"
        atomic.write_text(folder / LATEST, lines)
    atomic.replace_folder(path)
    atomic.write_text(folder / LATEST, f"{path.name}\n")


def write_hf_files(source: Path, target: Path) -> None:
    """A new `hf/`, with the checksums of its files."""
    copy_hf_files(source, target)
    sums = checksums(target, sorted(path.name for path in target.iterdir()))
    (target / _HF_SUMS).write_text(json.dumps(sums, indent=1))


def check_hf_files(folder: Path) -> None:
    """ValueError where a file in `hf/` is not what was copied. Where no checksums lie, as megavlm
    once wrote it, anything will do.
    """
    path = folder / HF / _HF_SUMS
    if not path.is_file():
        return
    try:
        sums = json.loads(path.read_bytes())
        _check_sums(sums)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as checksums: {error}.") from error
    if problem := first_difference(path.parent, sums, sums):
        raise ValueError(f"{problem} If it was changed on purpose, delete {path}.")


def copy_hf_files(source: Path, target: Path) -> None:
    """Copies what belongs to an HF model folder besides its weights. Code (*.py) stays behind, and
    so does what is said of adapters beside it, which transformers would look for.

    ValueError for a link to nothing.
    """
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _HF_PATTERNS:
        for path in sorted(source.glob(pattern)):
            if path.name == ADAPTER or path.name.endswith(".index.json"):
                continue
            if path.is_symlink() and not path.exists():
                raise ValueError(f"{path} points to nothing: fetch it again, or remove the link.")
            if path.is_file():
                shutil.copyfile(path, target / path.name)
