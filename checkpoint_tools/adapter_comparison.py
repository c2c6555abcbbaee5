"""Adapters on the disk, in PEFT folders or in checkpoints, compared bit by bit."""

from math import isclose
from pathlib import Path

from checkpoint_tools.comparison import Comparison, difference
from checkpoint_tools.peft_folder import PeftModule, is_peft_folder, open_peft
from checkpoint_tools.peft_modules import to_modules
from checkpoint_tools.progress import Show, silent
from checkpoint_tools.safetensors_file import Spec
from checkpoint_tools.step_adapters import step_adapters
from checkpoint_tools.weights import step_weights


def compare_adapters(
    a: Path, b: Path, *, alpha: float | None = None, show: Show = silent
) -> Comparison:
    """Modules are equal when A, B and their scale are. `alpha`: of a checkpoint's, where nothing
    tells it. ValueError for a folder that holds no adapters.
    """
    if alpha is not None and is_peft_folder(a) and is_peft_folder(b):
        raise ValueError(f"{a} and {b} have alphas of their own: leave --alpha out.")
    result = Comparison()
    left, right = _modules(a, alpha), _modules(b, alpha)
    with show("verify", sum(module.nbytes for module in left.values())) as advance:
        for name in left | right:
            x, y = left.get(name), right.get(name)
            if x is None or y is None:
                for side in "AB":
                    result.add(f"{side} of {name} is in {b if x is None else a} alone")
                continue
            for side, problem in zip("AB", _problems(x, y), strict=True):
                result.add(problem and f"{side} of {name} {problem}")
            advance(x.nbytes)
    return result


def _modules(path: Path, alpha: float | None) -> dict[str, PeftModule]:
    if is_peft_folder(path):
        return {module.name: module for module in open_peft(path).modules}
    if (path / "config.json").is_file():
        raise ValueError(f"{path} is a model folder: it holds no adapters to compare.")
    adapters = step_adapters(step_weights(path), alpha=alpha)
    return {module.name: module for module in to_modules(adapters)}


def _problems(x: PeftModule, y: PeftModule) -> list[str | None]:
    """Of A and of B: how they differ."""
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
