"""Layout of a checkpoint folder, the same for imported and trained checkpoints.

    CHECKPOINT_DIR/
      latest               name of the newest step
      best                 name of the best step, if a metric is configured
      hf/                  config, tokenizer and processor files of the model, their checksums,
                           how the model folder stacks experts, and its tensors that are not
                           trained
      step_00000040/
        manifest.json      step, contents, scores, and size and checksum of every other file
        .metadata, metadata.json, common.pt, *.distcp    megatron-core dist_checkpointing
        extra.json         state of the trainer: loader, curriculum
        extra_1.bin        bytes in it, here groups that were started
        lora.json          rank, alpha and base model of the adapters, if there are any
        random_00000.pt    random states of rank 0

A step is written under another name and renamed once all of it is on the disk, so a folder called
`step_*` is complete. `latest` is replaced after the rename. Before the rename, `latest` gets a
second line that announces the step with the checksum of its manifest, so that a run that is killed
between rename and replacement resumes from the new step. A complete step that is neither named nor
announced is not newer, whatever its number: it is left over from before a run went back
(`checkpoint.step`).

This module imports neither torch nor megatron-core.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open

from megavlm.checkpointing import atomic
from megavlm.checkpointing.checksums import file_checksums, first_difference
from megavlm.checkpointing.untrained import copy_untrained
from megavlm.families import AUTHORS, UNTRAINED

FORMAT = 1
POLICY_CHECKPOINTS = "checkpoints"  # folder of the policy's checkpoints in a run directory
LATEST = "latest"
BEST = "best"
HF_FILES = "hf"
MANIFEST = "manifest.json"
EXTRA_STATE = "extra.json"
LORA_SETTINGS = "lora.json"
PEFT_CONFIG = "adapter_config.json"
_HF_SUMS = "checksums"  # without a suffix it is never a model's file, and never copied from hf/
_EXPERTS = "experts"  # holds "memory" if experts are stacked as transformers 5 saves them
# Names of files in a HuggingFace folder that hold neither weights nor code.
_HF_PATTERNS = ("*.json", "*.txt", "*.jinja", "*.model", "LICENSE*")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """Contents of a step.

    layout: Ranks per axis of the run that saved it.
    files: Maps a file's name to {bytes, crc32}.
    scores: Maps a metric to its value; the best step of a run is selected by it.
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
        """Read the manifest of a step's folder. Raises ValueError if it is not valid."""
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
                f"{path} cannot be read as the manifest of a checkpoint: {error}."
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
    """Return the steps that can be loaded, oldest first."""
    matches = (
        re.fullmatch(r"step_(\d{8,})", path.parent.name) for path in folder.glob(f"*/{MANIFEST}")
    )
    return sorted(int(match[1]) for match in matches if match)


def is_checkpoint(path: Path) -> bool:
    """Return True for the folder of a step, and for a folder that has a complete step."""
    return (path / MANIFEST).is_file() or bool(complete_steps(path))


def check_no_adapters(folder: Path) -> None:
    """Raise ValueError if adapters are in the folder of a model. transformers would load them."""
    if (folder / PEFT_CONFIG).is_file():
        raise ValueError(
            f"{folder} contains both a model and adapters; the adapters would be ignored: "
            f"merge them (megavlm-convert lora-merge {folder} OUTPUT --adapter {folder}) or move "
            "them away."
        )


def latest_step(folder: str | Path) -> int | None:
    """Return the step to resume from, None if no step is complete.

    The file `latest` names it. If this file is missing or damaged, or names a step that does not
    exist, the newest complete step is used, with a warning.
    """
    folder = Path(folder)
    steps = complete_steps(folder)
    if not steps:
        if (folder / LATEST).is_file():
            logger.warning("%s names a step, but no step is complete.", folder / LATEST)
        return None
    step = _tracked(folder)
    if step is None:
        step = steps[-1]
        logger.warning(
            "%s does not name a complete step: using the newest one, %d.", folder / LATEST, step
        )
    return step


def _tracked(folder: Path) -> int | None:
    """Return the step that `latest` announces if it exists, else the step that it names."""
    tracker = folder / LATEST
    text = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    named, _, announced = text.partition("\n")
    steps = {step_folder(folder, step).name: step for step in complete_steps(folder)}
    coming = announced.split(" ")[0]
    if coming in steps and announced == _announcement(coming, folder / coming):
        return steps[coming]
    return steps.get(named)


def _announcement(name: str, step: Path) -> str:
    return f"{name} {file_checksums(step, [MANIFEST])[MANIFEST]['crc32']:08x}"


def locate_step(folder: Path, step: int | None) -> Path:
    """Return the folder of a step.

    folder: A checkpoint folder, or the folder of a step if `step` is None.
    step: None selects the latest step.

    Raises ValueError if the step does not exist.
    """
    if step is None and (folder / MANIFEST).is_file():
        return folder
    step = latest_step(folder) if step is None else step
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
    """Rename the partial folder of a step and make the step the latest one."""
    path, before = step_folder(folder, step), _tracked(folder)
    if before is not None:
        announcement = _announcement(path.name, atomic.partial_path(path))
        lines = f"{step_folder(folder, before).name}\n{announcement}\n"
        atomic.write_text(folder / LATEST, lines)
    elif (folder / LATEST).is_file():
        logger.warning("%s did not name a complete step: it is replaced.", folder / LATEST)
    atomic.replace_folder(path)
    atomic.write_text(folder / LATEST, f"{path.name}\n")


def write_hf_files(
    source: Path, target: Path, *, change: Callable[[dict[str, Any]], None] | None = None
) -> None:
    """Create `hf/` from the model folder `source`, with the form of its experts, its tensors that
    are not trained, and the checksums of the files.

    change: Changes the values of config.json in place.
    """
    copy_hf_files(source, target)
    if change is not None:
        values = json.loads((target / "config.json").read_bytes())
        change(values)
        (target / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    copy_untrained(source, target)
    form = experts_form(source)
    if form != "hub":
        (target / _EXPERTS).write_text(form)
    sums = file_checksums(target, sorted(path.name for path in target.iterdir()))
    (target / _HF_SUMS).write_text(json.dumps(sums, indent=1))


def experts_form(folder: Path) -> Literal["hub", "memory"]:
    """Return how a HuggingFace folder, or the `hf/` of a checkpoint, stacks experts: "hub" as on
    the hub, "memory" as transformers 5 saves them. Returns "hub" if there are no stacks.

    The form is inferred from shapes: on the hub, gate_up_proj is [E, H, 2I] and down_proj
    [E, I, H]; in the other form the last two dims are exchanged.
    """
    if (folder / _EXPERTS).is_file():
        return "memory"
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in file.keys():
                kind = name.rpartition(".experts.")[2]
                if kind in ("gate_up_proj", "down_proj") and not name.startswith(UNTRAINED):
                    shapes.setdefault(kind, file.get_slice(name).get_shape())
        if len(shapes) == 2:
            (_, _, columns), (_, rows, _) = shapes["gate_up_proj"], shapes["down_proj"]
            return "hub" if columns == 2 * rows else "memory"
    return "hub"


def check_hf_files(folder: Path) -> None:
    """Raise ValueError if a file in `hf/` was changed since it was copied.

    A folder without checksums, which earlier versions wrote, is accepted unchecked.
    """
    path = folder / HF_FILES / _HF_SUMS
    if not path.is_file():
        return
    try:
        sums = json.loads(path.read_bytes())
        _check_sums(sums)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as checksums: {error}.") from error
    if problem := first_difference(path.parent, sums, sums):
        raise ValueError(f"{problem} If it was changed on purpose, delete {path}.")


def saved_config(step: Path) -> dict[str, Any]:
    """Return the config.json of the model that a step's folder holds, {} if it cannot be read."""
    try:
        values = json.loads((step.parent / HF_FILES / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def check_family(step: Path, model_type: str) -> None:
    """Raise ValueError if a step's folder holds a model of another family."""
    saved = saved_config(step).get("model_type", model_type)
    saved = AUTHORS.get(saved, saved)
    if saved != model_type:
        raise ValueError(
            f"{step} holds a model of the family {saved}, but model.folder one of {model_type}: "
            "name a folder and a checkpoint of one model"
        )


def copy_hf_files(source: Path, target: Path) -> None:
    """Copy the files of a HuggingFace folder that are not weights.

    Code (*.py) is not copied. The configuration of an adapter in the same folder is not copied
    either, because transformers would load the adapter. Raises ValueError for a dangling link.
    """
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _HF_PATTERNS:
        for path in sorted(source.glob(pattern)):
            if path.name == PEFT_CONFIG or path.name.endswith(".index.json"):
                continue
            if path.is_symlink() and not path.exists():
                raise ValueError(
                    f"{path} is a link to a missing file: download it again, or remove the link."
                )
            if path.is_file():
                shutil.copyfile(path, target / path.name)


def write_extra(path: Path, extra: Mapping[str, Any]) -> list[str]:
    """Write the state of a trainer to a step. Bytes in it become files of their own. Returns the
    names of all files.
    """
    names = [EXTRA_STATE]

    def to_file(content: bytes) -> dict[str, str]:
        names.append(f"extra_{len(names)}.bin")
        (path / names[-1]).write_bytes(content)
        return {"file": names[-1]}

    (path / EXTRA_STATE).write_text(json.dumps(extra, default=to_file))
    return names


def read_extra(path: Path) -> dict[str, Any]:
    """Return the state of `write_extra`, with the path of a file in place of its bytes, which one
    rank needs; {} for a step without it.
    """

    def of_file(values: dict[str, Any]) -> Any:
        return path / values["file"] if values.keys() == {"file"} else values

    file = path / EXTRA_STATE
    return json.loads(file.read_text(), object_hook=of_file) if file.is_file() else {}
