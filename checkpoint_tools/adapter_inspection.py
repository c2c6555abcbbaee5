"""What a PEFT folder holds, as a table."""

from collections import defaultdict
from typing import Any

from rich.console import RenderableType

from checkpoint_tools.inspection import Component, component, render
from checkpoint_tools.peft_folder import PeftFolder, PeftModule
from checkpoint_tools.safetensors_file import Spec

_COMPONENTS = {
    ".visual.": "tower",
    ".self_attn.": "attention",
    ".experts.": "experts",
    ".mlp.": "mlp",
}


def summary(peft: PeftFolder) -> dict[str, Any]:
    """Everything about the adapters, JSON-able. `scale`: what B A is multiplied by."""
    parts = components(peft)
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


def components(peft: PeftFolder) -> list[Component]:
    found: dict[str, list[Spec]] = defaultdict(list)
    for module in peft.modules:
        found[_component(module)] += [module.a, module.b]
    return [component(name, specs) for name, specs in found.items()]


def table(peft: PeftFolder) -> RenderableType:
    facts = summary(peft)
    rows = {
        facts["kind"]: facts["path"],
        "base model": facts["base"] or "unknown",
        "rank": ", ".join(map(str, facts["rank"])),
        "scale": ", ".join(f"{scale:g}" for scale in facts["scale"]),
        "modules": f"{facts['modules']:,}",
    }
    return render(rows, components(peft))


def _component(module: PeftModule) -> str:
    found = (name for part, name in _COMPONENTS.items() if part in f"{module.name}.")
    return next(found, "other")
