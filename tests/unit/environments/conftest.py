from collections.abc import Iterator

import pytest

from tests.unit.environments.adapters.played import user_modules


@pytest.fixture(scope="package", autouse=True)
def modules() -> Iterator[None]:
    with user_modules():
        yield
