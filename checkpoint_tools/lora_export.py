"""Checkpoint with adapters -> PEFT folder."""

import json
from dataclasses import dataclass
from pathlib import Path

from checkpoint_tools.adapters import Adapters
from checkpoint_tools.ahead import one_ahead
from checkpoint_tools.output import output_folder
from checkpoint_tools.peft_config import CONFIG, config_values
from checkpoint_tools.peft_folder import TENSORS, PeftModule
from checkpoint_tools.peft_modules import to_modules
from checkpoint_tools.progress import Show, silent
from checkpoint_tools.safetensors_file import SafetensorsWriter
from checkpoint_tools.step_adapters import step_adapters
from checkpoint_tools.weights import step_weights

# Of the stack that holds gate and up; PEFT looks names up by their ends.
_DOUBLED = r"mlp\.experts\.gate_up_proj"


@dataclass(frozen=True)
class AdapterExport:
    """`num_modules`: what PEFT adapts, of experts a stack each."""

    step: int
    rank: int
    alpha: float
    num_modules: int
    num_bytes: int


def lora_export(
    checkpoint_dir: Path,
    peft_dir: Path,
    *,
    step: int | None = None,
    alpha: float | None = None,
    base: str | None = None,
    force: bool = False,
    show: Show = silent,
) -> AdapterExport:
    """Writes a step's adapters (default: the latest's) as PEFT has them on transformers 5, in the
    dtype that they have. The same bytes whatever layout saved the step.

    ValueError as in `step_adapters`, where nothing tells the base model, where the output folder is
    in use, or its disk has no room.
    """
    weights = step_weights(checkpoint_dir, step)
    adapters = step_adapters(weights, alpha=alpha, base=base)
    if adapters.base is None:
        raise ValueError(
            f"nothing tells which model the adapters in {weights.path} belong to (a run that began "
            f"with a checkpoint trained them on its weights, which export gives as a folder): name "
            f"it by --base."
        )
    modules = to_modules(adapters)
    total = sum(module.nbytes for module in modules)
    with output_folder(
        peft_dir, sources=weights.folders, force=force, mark=CONFIG, nbytes=total
    ) as output:
        (output / CONFIG).write_text(json.dumps(_config(adapters, modules), indent=2) + "\n")
        specs = {name: spec for module in modules for name, spec in module.tensors()}
        with SafetensorsWriter(output / TENSORS, specs) as file, show("export", total) as advance:
            for pair in one_ahead(lambda module: module.read(), modules):
                for tensor in pair:
                    file.write(tensor)
                    advance(tensor.nbytes)
    assert weights.manifest is not None
    return AdapterExport(weights.manifest.step, adapters.rank, adapters.alpha, len(modules), total)


def _config(adapters: Adapters, modules: list[PeftModule]) -> dict[str, object]:
    """Full names alone: nothing else of the model ends like one of them."""
    assert adapters.base is not None
    stacks = [module.name for module in modules if module.is_stack]
    return config_values(
        rank=adapters.rank,
        alpha=adapters.alpha,
        modules=[module.name for module in modules if not module.is_stack],
        parameters=stacks,
        doubled=_DOUBLED if any(name.endswith(".gate_up_proj") for name in stacks) else None,
        base=adapters.base,
    )
