"""Limits of tests grow by one factor from the environment."""

import pytest

from tests import conftest, timeouts


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
