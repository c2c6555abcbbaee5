"""Levels of tests: `make test` leaves out what is marked slow, which `make test-all` runs too, and
what is marked long, which `make test-long` runs at night.
"""

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Return values of a parametrize that `make test` leaves out."""
    wrapped = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*value, marks=pytest.mark.slow) for value in wrapped]
