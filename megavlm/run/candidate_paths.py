"""What a model is that `megavlm evaluate` is given. Imports nothing heavy: checks before a run need
it, too.
"""

from pathlib import Path
from typing import Literal

from megavlm.config.schema import Config

MANIFEST = "manifest.json"  # checkpointing.folder's, without importing megatron-core


def kind(path: Path) -> Literal["adapter", "hf", "checkpoint"]:
    """Raises ValueError for a path that is none of these."""
    if (path / "adapter_config.json").is_file():
        return "adapter"
    # Before "hf": a step's folder has the model's config.json, too.
    if (path / MANIFEST).is_file() or any(path.glob(f"step_*/{MANIFEST}")):
        return "checkpoint"
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return "hf"
    raise ValueError(
        f"{path} is no model: give a Megatron checkpoint, a HuggingFace folder with its weights, "
        "or a PEFT adapter's folder"
    )


def check_candidates(config: Config) -> None:
    """Raises ValueError where evaluation.model or evaluation.baseline cannot be served."""
    for key in ("model", "baseline"):
        name = getattr(config.evaluation, key)
        if name is None:
            continue
        if config.rollout.mode == "external":
            raise ValueError(
                f"evaluation.{key}={name} with rollout.mode=external: servers that run already "
                "answer with their own model; use rollout.mode=managed, or leave it out"
            )
        try:
            kind(Path(name))
        except ValueError as error:
            raise ValueError(f"evaluation.{key}: {error}") from error
