"""A recipe through the configuration's rules and all checks before a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megavlm.config.load import load
from megavlm.run.checks import model_folder, preflight

WriteRecipe = Callable[..., Path]


def check(recipe: Path, *overrides: str, **arguments: Any) -> None:
    config = load(recipe, overrides)
    preflight.check(config, **{"world_size": config.parallel.num_ranks, **arguments})


def check_model(recipe: Path, *overrides: str) -> None:
    """Check the model alone, without a process for rewards."""
    config = load(recipe, overrides)
    model_folder.check_model(Path(config.model.folder), config)


def check_rows(recipe: Path, *overrides: str) -> None:
    """Check the training rows alone, without a process for rewards."""
    config = load(recipe, overrides)
    preflight.check_data(config.data.train_files, config, preflight.use_of(config.algorithm))


def refused(
    recipe: Path, *overrides: str, by: Callable[..., None] = check, **arguments: Any
) -> str:
    """Return the one sentence."""
    with pytest.raises(ValueError) as caught:
        by(recipe, *overrides, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)
