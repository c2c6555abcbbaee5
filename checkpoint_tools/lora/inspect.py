"""Table of the contents of a PEFT folder."""

from collections import defaultdict
from typing import Any

from rich.console import RenderableType

from checkpoint_tools.inspect_weights import ComponentSize, component_size, component_table
from checkpoint_tools.lora.peft_folder import PeftFolder, PeftModule
from checkpoint_tools.safetensors_io import Spec

_COMPONENT_NAMES = {
    ".visual.": "tower",
    ".self_attn.": "attention",
    ".experts.": "experts",
    ".mlp.": "mlp",
}


def peft_summary(peft: PeftFolder) -> dict[str, Any]:
    """Return all that `inspect` shows about adapters, JSON-serializable. scale: factor of B A."""
    parts = _components(peft)
    return {
        "path": str(peft.path),
        "kind": "PEFT adapters",
        "base": peft.config.base,
        "rank": sorted({module.scale.rank for module in peft.modules}),
        "scale": sorted({module.scale.value for module in peft.modules}),
        "modules": len(peft.modules),
        "parameters": sum(part.parameters for part in parts),
        "bytes": sum(part.bytes for part in parts),
        "components": [vars(part) for part in parts],
    }


def _components(peft: PeftFolder) -> list[ComponentSize]:
    found: dict[str, list[Spec]] = defaultdict(list)
    for module in peft.modules:
        found[_component(module)] += [module.a, module.b]
    return [component_size(name, specs) for name, specs in found.items()]


def peft_table(peft: PeftFolder) -> RenderableType:
    facts = peft_summary(peft)
    rows = {
        facts["kind"]: facts["path"],
        "base model": facts["base"] or "unknown",
        "rank": ", ".join(map(str, facts["rank"])),
        "scale": ", ".join(f"{scale:g}" for scale in facts["scale"]),
        "modules": f"{facts['modules']:,}",
    }
    return component_table(rows, _components(peft))


def _component(module: PeftModule) -> str:
    found = (name for part, name in _COMPONENT_NAMES.items() if part in f"{module.name}.")
    return next(found, "other")
