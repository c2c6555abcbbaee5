"""Bitwise comparison of adapters, in PEFT folders or in checkpoints."""

from math import isclose
from pathlib import Path

from checkpoint_tools.compare_weights import WeightComparison, difference
from checkpoint_tools.lora.peft_folder import (
    PeftModule,
    is_one_expert,
    is_peft_folder,
    open_peft,
)
from checkpoint_tools.lora.peft_modules import to_modules
from checkpoint_tools.lora.step_adapters import step_adapters
from checkpoint_tools.safetensors_io import Spec
from checkpoint_tools.streaming import ShowProgress, no_progress
from checkpoint_tools.weights import step_weights


def compare_adapters(
    a: Path, b: Path, *, alpha: float | None = None, show: ShowProgress = no_progress
) -> WeightComparison:
    """Compare A, B and scale of each adapted module.

    alpha: alpha of the adapters, for a checkpoint that does not record it. Raises ValueError for a
    folder without adapters.
    """
    if alpha is not None and is_peft_folder(a) and is_peft_folder(b):
        raise ValueError(f"{a} and {b} have their own alphas: leave --alpha out.")
    result = WeightComparison()
    folders = {path: open_peft(path).modules for path in (a, b) if is_peft_folder(path)}
    separate = any(is_one_expert(module) for found in folders.values() for module in found)
    left, right = (
        {module.name: module for module in folders.get(path) or _saved(path, alpha, separate)}
        for path in (a, b)
    )
    with show("verify", sum(module.nbytes for module in left.values())) as advance:
        for name in left | right:
            x, y = left.get(name), right.get(name)
            if x is None or y is None:
                for side in "AB":
                    result.add(f"{side} of {name} is only in {b if x is None else a}")
                continue
            for side, problem in zip("AB", _problems(x, y), strict=True):
                result.add(problem and f"{side} of {name} {problem}")
            advance(x.nbytes)
    return result


def _saved(path: Path, alpha: float | None, separate: bool) -> list[PeftModule]:
    """Return the adapters of a checkpoint. separate: As in `to_modules`."""
    if (path / "config.json").is_file():
        raise ValueError(f"{path} is a model folder: it holds no adapters to compare.")
    return to_modules(step_adapters(step_weights(path), alpha=alpha), separate=separate)


def _problems(x: PeftModule, y: PeftModule) -> list[str | None]:
    """Describe how A and B of two modules differ, with None for each one that is equal."""
    left, right = x.scale.value, y.scale.value
    if not isclose(left, right, rel_tol=1e-12):
        return [f"is scaled by {left:g} and by {right:g}"] * 2
    alike = [_unlike(x.a, y.a), _unlike(x.b, y.b)]
    if any(alike):
        return alike
    return [difference(one, other) for one, other in zip(x.read(), y.read(), strict=True)]


def _unlike(x: Spec, y: Spec) -> str | None:
    if x.shape != y.shape:
        return f"has shapes {x.shape} and {y.shape}"
    return f"has dtypes {x.dtype} and {y.dtype}" if x.dtype != y.dtype else None
