"""Checks of the step that a run resumes from, before it is loaded. A dry run makes them, too."""

import hashlib
import json
from pathlib import Path
from typing import Any

from megavlm.checkpointing.adapter_settings import (
    AdapterSettings,
    check_alpha,
    saved_adapter_keys,
)
from megavlm.checkpointing.checksums import first_difference
from megavlm.checkpointing.folder import (
    EXTRA_STATE,
    LORA_SETTINGS,
    MANIFEST,
    POLICY_CHECKPOINTS,
    Manifest,
    check_family,
    latest_step,
    locate_step,
)
from megavlm.config.schema import Config

_SAMPLES, _SAMPLE = 64, 2**16  # parts of each safetensors file that identify a model, and bytes


def checkpoint_identity(step: Path | None) -> dict[str, str] | None:
    """Return the path and the content's digest of the checkpoint step that a run starts from."""
    if step is None:
        return None
    digest = hashlib.sha256((step / MANIFEST).read_bytes()).hexdigest()
    return {"path": str(step), "digest": digest}


def model_identity(folder: Path) -> dict[str, str]:
    """Return the path and a digest of a model folder. The digest is of the names and shapes of the
    tensors and of evenly spread parts of their values, so that it takes seconds for any size. It
    does not depend on the folder's path.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            digest.update(file.read(length))
            room = max(0, path.stat().st_size - 8 - length - _SAMPLE)
            for index in range(_SAMPLES):
                file.seek(8 + length + index * room // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    return {"path": str(folder), "digest": digest.hexdigest()}


def step_to_resume(config: Config) -> Path | None:
    """Return the folder of the step that the run resumes from, None if it starts anew."""
    folder, step = Path(config.run.dir, POLICY_CHECKPOINTS), config.checkpoint.step
    if config.run.resume == "never":
        return None
    step = latest_step(folder) if step is None else step
    return None if step is None else locate_step(folder, step)


def check_resume(config: Config, path: Path, model_type: str, start: Path | None) -> None:
    """Raise ValueError if the configuration cannot continue from the step in `path`. Not covered:
    the shapes of tensors and the data, which a run compares when it loads them, and a dry run
    beside this check.

    start: The step in model.checkpoint, None without that key.
    """
    files = Manifest.read(path).files
    read_here = files.keys() & {EXTRA_STATE, LORA_SETTINGS}
    if problem := first_difference(path, files, read_here):
        raise ValueError(problem)
    extra: dict[str, Any] = json.loads((path / EXTRA_STATE).read_text())
    last, step = config.algorithm.steps, extra["step"]
    if step > last:
        raise ValueError(
            f"algorithm.steps={last}, but the run has made {step}: set it to {step} or more, "
            f"or resume from an earlier step (checkpoint.step={last} or below)"
        )
    check_family(path, model_type)
    check_adapters(config, path)
    if config.algorithm.has_reference and "start" in extra:  # older ones lack it
        _check_same_start(checkpoint_identity(start), extra["start"])
    if start is None and (first := extra.get("model")):  # older ones lack it
        held = model_identity(Path(config.model.folder))
        if held["digest"] != first["digest"]:
            raise ValueError(
                f"model.folder={held['path']} holds other weights than {first['path']}, from "
                f"which the run in run.dir={config.run.dir} started: name that model, or choose "
                "another run.dir"
            )


def check_adapters(config: Config, path: Path) -> None:
    """Raise ValueError if the step's adapters are not those that the recipe asks for."""
    rank, saved = config.lora.rank, AdapterSettings.read(path)
    has_adapters = bool(saved_adapter_keys(path))
    fix = "or choose another run.dir"
    if rank and not has_adapters:
        raise ValueError(
            f"lora.rank={rank} asks for adapters, but the run that saved {path} trained without: "
            f"set lora.rank=0, {fix} and start from these weights (model.checkpoint)"
        )
    if has_adapters and not rank:
        asked = f"set lora.rank={saved.rank}" if saved else "set lora as that run did"
        raise ValueError(
            f"lora.rank=0, but the run that saved {path} trained adapters: {asked}, {fix}"
        )
    if saved is not None and rank and saved.rank != rank:
        raise ValueError(
            f"lora.rank={rank} differs from the rank of the adapters in {path}: set "
            f"lora.rank={saved.rank}, {fix}"
        )
    if rank:
        check_alpha(path, config.lora.alpha)


def _check_same_start(now: dict[str, str] | None, first: dict[str, str] | None) -> None:
    """Raise ValueError if a resumed run would take another checkpoint for the model that it first
    started from, its reference.
    """
    if (now or {}).get("digest") != (first or {}).get("digest"):
        held, meant = ("null" if step is None else step["path"] for step in (now, first))
        raise ValueError(
            f"model.checkpoint is now {held}, but the run started from {meant}, and that is its "
            f"reference model: set model.checkpoint={meant}, or start anew with run.resume=never"
        )
