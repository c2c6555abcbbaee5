"""README.md of an exported model: its origin, training and evaluation."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError, safe_load

from checkpoint_tools.draft_head import FOLDER
from checkpoint_tools.lora.adapters import AdapterPairs
from checkpoint_tools.weights import Weights
from megavlm.config.dump import code_of, code_version
from megavlm.observability.metrics import EVALUATIONS_FILE
from megavlm.observability.records import read_records
from megavlm.observability.result import category_rows
from megavlm.observability.text import percent

_HEAD = """---
library_name: transformers
pipeline_tag: image-text-to-text
tags:
- megavlm
---
"""
# Sections of a recipe that describe training. The others hold paths and addresses.
_SECTIONS = ("algorithm", "optimizer", "reward", "lora")


def model_card(
    weights: Weights,
    adapters: AdapterPairs | None = None,
    *,
    untrained: Collection[str] = (),
    has_head_folder: bool = False,
) -> str:
    """Return Markdown for a step, or for a folder into which `adapters` were merged. If the
    checkpoints are in the directory of a run, its recipe and evaluation are included. `untrained`:
    names of tensors that were copied from the base model. has_head_folder: An EAGLE-3 draft head
    lies in a folder beside the weights.
    """
    parts = [_HEAD, *_what(weights, adapters)]
    if has_head_folder:
        parts.append(
            f"`{FOLDER}` holds an EAGLE-3 draft head that was trained with the model: start SGLang "
            f"with `--speculative-algorithm EAGLE3 --speculative-draft-model-path {FOLDER}`.\n"
        )
    if untrained:
        prefixes = sorted({f"`{name.split('.')[0]}.*`" for name in untrained})
        note = f"{' and '.join(prefixes)} ({len(untrained)} tensors) were not trained: they are "
        note += "the base model's."
        if "`mtp.*`" in prefixes:  # the head that predicts several tokens
            note += " Speculative decoding with them remains exact but accepts fewer tokens."
        parts.append(f"{note}\n")
    run = _run(weights)
    if run is not None:
        parts += run
    elif adapters is not None and adapters.base is not None:
        parts.append(f"- Base model: {_name(adapters.base)}\n")
    return "\n".join(parts)


def pixel_limits(weights: Weights) -> dict[str, int]:
    """Return data.min_pixels and data.max_pixels of the run that saved the weights, if they are
    set.
    """
    recipe = _recipe(_run_file(weights))
    data = {} if recipe is None else recipe["data"]
    limits = {name: data.get(name) for name in ("min_pixels", "max_pixels")}
    return {name: value for name, value in limits.items() if isinstance(value, int)}


def _run(weights: Weights) -> list[str] | None:
    """Describe the run that saved the weights. Returns None if no run did."""
    text = _run_file(weights)
    recipe = _recipe(text)
    if recipe is None:
        return None
    assert weights.manifest is not None
    run_dir, step = weights.path.absolute().parents[1], weights.manifest.step
    return [
        *_use(recipe["data"], pixel_limits(weights)),
        *_training(recipe, step, code_of(text)),
        *_evaluation(run_dir, step),
    ]


def _run_file(weights: Weights) -> str:
    """Return the text of the recipe in the run directory of the checkpoints, "" without one."""
    if weights.manifest is None:
        return ""
    file = weights.path.absolute().parents[1] / "config.yaml"
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _recipe(text: str) -> dict[str, Any] | None:
    """Parse the recipe of a run. Returns None for any other file of this name, valid or not."""
    try:
        if not isinstance(safe_load(text), dict):
            return None
        recipe = OmegaConf.to_container(OmegaConf.create(text))
    except (YAMLError, OmegaConfBaseException, ValueError):  # ValueError: an invalid date
        return None
    assert isinstance(recipe, dict)
    model, data, algorithm = (recipe.get(name) for name in ("model", "data", "algorithm"))
    if not (isinstance(model, dict) and isinstance(data, dict) and isinstance(algorithm, dict)):
        return None
    is_run = "folder" in model and {"name", "steps"} <= algorithm.keys()
    return recipe if is_run else None


def _name(base: str) -> str:
    """Return a model's name on the hub, or only the last part of a path, so that the card does not
    show the machine's folders.
    """
    path = Path(base)
    return path.name if path.is_absolute() or path.exists() else base


def _what(weights: Weights, adapters: AdapterPairs | None) -> Iterator[str]:
    numel = sum(weights.nbytes(key) // dtype.itemsize for key, dtype in weights.dtypes.items())
    yield f"# {weights.config.model_type}, {numel / 1e9:.2f} billion parameters\n"
    step = weights.manifest
    source = f"Step {step.step} of a checkpoint" if step else f"Weights of {weights.path.name}"
    merged = f", with adapters of rank {adapters.rank} merged," if adapters else ","
    yield f"{source}{merged} exported by {code_version()}.\n"


def _use(data: dict[str, Any], limits: dict[str, int]) -> Iterator[str]:
    """Describe how to prompt the model as in training: system prompt and size of images."""
    prompt = data.get("system_prompt")
    if not (prompt or limits):
        return
    yield "## Use\n"
    if prompt:
        yield "The model was trained with this system prompt. Send it as the first message:\n"
        message = {"role": "system", "content": prompt}
        yield f"```json\n{json.dumps(message, ensure_ascii=False)}\n```\n"
    for name, which in (("min_pixels", "least"), ("max_pixels", "most")):
        if name in limits:
            yield f"- Images were resized to at {which} {limits[name]:,} pixels."
    if limits:
        yield "\nThe preprocessor's files have these limits.\n"


def _training(recipe: dict[str, Any], step: int, code: str | None) -> Iterator[str]:
    """Describe training. Only the last parts of paths are shown, to hide the machine's folders."""
    algorithm = recipe["algorithm"]
    yield "## Training\n"
    yield f"- Base model: {Path(recipe['model']['folder']).name}"
    if start := recipe["model"].get("checkpoint"):
        yield f"- Started from: {'/'.join(Path(start).parts[-2:])}"
    yield f"- Algorithm: {algorithm['name']}, step {step} of {algorithm['steps']}"
    if code is not None:
        yield f"- Trained by: {code}"
    for key, what in (("train_files", "Training data"), ("test_files", "Test data")):
        if files := recipe["data"].get(key):
            yield f"- {what}: {', '.join(Path(file).name for file in files)}"
    shown = {name: recipe[name] for name in _SECTIONS if name in recipe}
    yield f"\n```yaml\n{OmegaConf.to_yaml(OmegaConf.create(shown))}```\n"


def _evaluation(run_dir: Path, step: int) -> Iterator[str]:
    """Tabulate the evaluations before training and at this step."""
    records = {record["step"]: record for record in read_records(run_dir / EVALUATIONS_FILE)}
    if step not in records:
        return
    before = records.get(0) if step else None
    rows = category_rows({"evaluation_before": before, "evaluation_after": records[step]})
    yield "## Evaluation\n"
    yield "Greedy accuracy on the test data; the blind baseline does not look at the images.\n"
    yield "| category | rows | before | after | blind baseline | images shuffled |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        shares = (row.before, row.after, row.blind, row.shuffled)
        category = row.category.replace("|", r"\|")
        yield f"| {category} | {row.count} | {' | '.join(percent(share) for share in shares)} |"
    yield ""
