"""A recipe through the configuration's rules and all checks before a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megavlm.config.load import load
from megavlm.run import preflight

WriteRecipe = Callable[..., Path]


def check(recipe: Path, *overrides: str, **arguments: Any) -> None:
    config = load(recipe, overrides)
    preflight.check(config, **{"world_size": config.parallel.num_ranks, **arguments})


def refused(recipe: Path, *overrides: str, **arguments: Any) -> str:
    """The one sentence."""
    with pytest.raises(ValueError) as caught:
        check(recipe, *overrides, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)
