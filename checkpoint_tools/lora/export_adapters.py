"""Export of the adapters of a checkpoint as a PEFT folder."""

import json
from dataclasses import dataclass
from pathlib import Path

from checkpoint_tools.lora.adapters import AdapterPairs
from checkpoint_tools.lora.peft_config import config_values
from checkpoint_tools.lora.peft_folder import PEFT_TENSORS, PeftModule
from checkpoint_tools.lora.peft_modules import to_modules
from checkpoint_tools.lora.step_adapters import step_adapters
from checkpoint_tools.output_folder import output_folder
from checkpoint_tools.safetensors_io import SafetensorsWriter
from checkpoint_tools.streaming import ShowProgress, no_progress, prefetch
from checkpoint_tools.weights import step_weights
from megavlm.checkpointing.folder import PEFT_CONFIG

# Pattern for the stacks that hold gate and up. PEFT matches it with the ends of names.
_DOUBLED = r"mlp\.experts\.gate_up_proj"


@dataclass(frozen=True)
class AdapterExport:
    """Result of an export. num_modules: modules that PEFT adapts, stacks of experts included."""

    step: int
    rank: int
    alpha: float
    num_modules: int
    num_bytes: int


def export_adapters(
    checkpoint_dir: Path,
    peft_dir: Path,
    *,
    step: int | None = None,
    alpha: float | None = None,
    base: str | None = None,
    separate: bool = False,
    force: bool = False,
    show: ShowProgress = no_progress,
) -> AdapterExport:
    """Write the adapters of a step (default: the latest) in PEFT's format for transformers 5, in
    their own dtype. The bytes do not depend on the layout that saved the step.

    separate: As in `to_modules`.

    Raises ValueError if the base model is unknown, or as `step_adapters` and `output_folder` do.
    """
    weights = step_weights(checkpoint_dir, step)
    adapters = step_adapters(weights, alpha=alpha, base=base)
    if adapters.base is None:
        raise ValueError(
            f"{weights.path} does not record the base model of its adapters: name its folder by "
            f"--base (if the run started from a checkpoint, export that checkpoint first)."
        )
    modules = to_modules(adapters, separate=separate)
    total = sum(module.nbytes for module in modules)
    with output_folder(
        peft_dir, sources=weights.folders, force=force, mark=PEFT_CONFIG, nbytes=total
    ) as output:
        (output / PEFT_CONFIG).write_text(json.dumps(_config(adapters, modules), indent=2) + "\n")
        specs = {name: spec for module in modules for name, spec in module.tensors()}
        with (
            SafetensorsWriter(output / PEFT_TENSORS, specs) as file,
            show("export", total) as advance,
        ):
            for pair in prefetch(lambda module: module.read(), modules):
                for tensor in pair:
                    file.write(tensor)
                    advance(tensor.nbytes)
    assert weights.manifest is not None
    return AdapterExport(weights.manifest.step, adapters.rank, adapters.alpha, len(modules), total)


def _config(adapters: AdapterPairs, modules: list[PeftModule]) -> dict[str, object]:
    """Return adapter_config.json. It has full names, because PEFT matches the ends of names."""
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
