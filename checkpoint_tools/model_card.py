"""README.md of an exported model: what it is, what it was made from and how, how well it does."""

import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from checkpoint_tools.adapters import Adapters
from checkpoint_tools.weights import Weights
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
# Sections of a recipe that say how weights came to be. The others hold paths and addresses.
_SECTIONS = ("algorithm", "optimizer", "reward", "lora")


def model_card(weights: Weights, adapters: Adapters | None = None) -> str:
    """Markdown, of a step, or of a folder into which `adapters` were merged. Where its checkpoints
    lie in a run's directory, what the run has left there is told too.
    """
    if weights.manifest is None:
        return "\n".join([_HEAD, *_what(weights, adapters)])
    step = weights.manifest.step
    run_dir = weights.path.absolute().parents[1]
    config_file = run_dir / "config.yaml"
    parts: list[str] = []
    if config_file.is_file():
        recipe = OmegaConf.to_container(OmegaConf.load(config_file))
        assert isinstance(recipe, dict)
        parts += _training(recipe, step)
        parts += _evaluation(run_dir, step)
    return "\n".join([_HEAD, *_what(weights, adapters), *parts])


def _what(weights: Weights, adapters: Adapters | None) -> Iterator[str]:
    numel = sum(weights.nbytes(key) // dtype.itemsize for key, dtype in weights.dtypes.items())
    yield f"# {weights.config.model_type}, {numel / 1e9:.2f} billion parameters\n"
    step = weights.manifest
    source = f"Step {step.step} of a checkpoint" if step else f"Weights of {weights.path.name}"
    merged = f", with adapters of rank {adapters.rank} merged," if adapters else ""
    yield f"{source}{merged} {'of' if step else 'by'} {_megavlm()}.\n"


def _training(recipe: dict[str, Any], step: int) -> Iterator[str]:
    """Paths are told by their last parts: the others are of the machine."""
    algorithm = recipe["algorithm"]
    yield "## Training\n"
    yield f"- Base model: {Path(recipe['model']['folder']).name}"
    if start := recipe["model"].get("checkpoint"):
        yield f"- Started from: {'/'.join(Path(start).parts[-2:])}"
    yield f"- Algorithm: {algorithm['name']}, step {step} of {algorithm['steps']}"
    for key, what in (("train_files", "Training data"), ("test_files", "Test data")):
        if files := recipe["data"].get(key):
            yield f"- {what}: {', '.join(Path(file).name for file in files)}"
    shown = {name: recipe[name] for name in _SECTIONS if name in recipe}
    yield f"\n```yaml\n{OmegaConf.to_yaml(OmegaConf.create(shown))}```\n"


def _evaluation(run_dir: Path, step: int) -> Iterator[str]:
    """The evaluation at this step beside the one before training."""
    records = {record["step"]: record for record in read_records(run_dir / EVALUATIONS_FILE)}
    if step not in records:
        return
    before = records.get(0) if step else None
    rows = category_rows({"evaluation_before": before, "evaluation_after": records[step]})
    yield "## Evaluation\n"
    yield "Greedy accuracy on the test data; the blind baseline does not look at the pictures.\n"
    yield "| category | rows | before | after | blind baseline | pictures shuffled |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        shares = (row.before, row.after, row.blind, row.shuffled)
        category = row.category.replace("|", r"\|")
        yield f"| {category} | {row.count} | {' | '.join(percent(share) for share in shares)} |"
    yield ""


def _megavlm() -> str:
    """Version and, in a git checkout, commit of the code that exports."""
    commit, git, root = "", shutil.which("git"), Path(__file__).parents[1]
    if git and (root / ".git").exists():
        command = [git, "-C", str(root), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return f"megavlm {version('megavlm')}" + (f", commit {commit}" if commit else "")
