"""What conftest gives each test: a limit that the environment scales, and a group of tests that one
worker runs.
"""

import os

import pytest

from tests import conftest
from tests.support import timeouts


@pytest.mark.parametrize("own", [None, 30.0])
def test_limits_are_scaled(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, own: float | None
) -> None:
    monkeypatch.setattr(timeouts, "SCALE", 2.5)
    monkeypatch.setattr(conftest, "SCALE", 2.5)
    item = pytest.Function.from_parent(request.node.parent, name="copy", callobj=lambda: None)
    if own is not None:
        item.add_marker(pytest.mark.timeout(own))
    conftest.pytest_collection_modifyitems(request.config, [item])
    mark = item.get_closest_marker("timeout")
    assert mark is not None and mark.args == (1500.0 if own is None else 75.0,)


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="pytest-xdist does not run")
def test_one_worker_runs_the_tests_of_a_file(request: pytest.FixtureRequest) -> None:
    """pytest-xdist sends the tests whose names end alike to one worker."""
    assert request.node.nodeid.endswith("@tests/unit/test_timeouts.py")
