"""Models given to `megavlm evaluate` by path: their kinds, and folders that a server can load."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from megavlm.checkpointing.folder import PEFT_CONFIG, is_checkpoint
from megavlm.config.schema import Config
from megavlm.temporary import temporary_folder


def model_kind(path: Path) -> Literal["adapter", "hf", "checkpoint"]:
    """Return the kind of model at `path`. Raises ValueError if there is none."""
    if (path / PEFT_CONFIG).is_file():
        return "adapter"
    if is_checkpoint(path):  # before "hf", because its folder may contain a config.json, too
        return "checkpoint"
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return "hf"
    raise ValueError(
        f"{path} is not a model: give a Megatron checkpoint, a HuggingFace folder with its "
        "weights, or a PEFT adapter's folder"
    )


def check_model_paths(config: Config) -> None:
    """Raise ValueError if evaluation.model or evaluation.baseline cannot be served."""
    for key in ("model", "baseline"):
        name = getattr(config.evaluation, key)
        if name is None:
            continue
        if config.rollout.mode == "external":
            raise ValueError(
                f"evaluation.{key}={name} with rollout.mode=external: external servers answer with "
                "their own model; use rollout.mode=managed, or leave it out"
            )
        try:
            model_kind(Path(name))
        except ValueError as error:
            raise ValueError(f"evaluation.{key}: {error}") from error


@contextmanager
def served_folder(config: Config, name: str | None) -> Iterator[Path]:
    """Yield a HuggingFace folder of a model; it exists within the context.

    name: Path of a checkpoint, a HuggingFace folder, or an adapter that is merged into the recipe's
    model; None takes the recipe's model. Raises ValueError if it is none of these, or if the
    adapter does not fit the model.
    """
    # Imported late: preflight imports this module before the platform is installed.
    from checkpoint_tools.export_hf import WriteOptions, export_hf
    from checkpoint_tools.lora.merge_adapters import merge_adapters

    model = config.model
    own = Path(model.checkpoint or model.folder)
    if config.rollout.mode == "external":
        yield Path(model.folder)  # only for its processor: the servers have a model of their own
        return
    path = own if name is None else Path(name)
    kind = model_kind(path)
    if kind == "hf":
        yield path
        return
    with temporary_folder("megavlm-evaluate-") as folder:
        target = folder / "hf"
        options = WriteOptions(experts="hub")  # the form in which servers read experts
        if kind == "adapter":
            merge_adapters(own, target, adapter=path, options=options)
        else:
            export_hf(path, target, options=options)
        yield target
