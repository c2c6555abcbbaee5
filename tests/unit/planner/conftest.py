"""Models of a layout, built once for all tests that look at the same one: it takes a second."""

from collections.abc import Iterator
from typing import Any

import pytest

from megavlm.models import sizes
from tests.support.cache import cached_value


@pytest.fixture(scope="package", autouse=True)
def built_once() -> Iterator[None]:
    build = sizes.rank_parameters

    def kept(hf_config: Any, *layout: Any) -> list[sizes.ParameterSize]:
        key = (hf_config.to_json_string(), layout)
        found: list[sizes.ParameterSize] = cached_value(
            "parameters", key, lambda: build(hf_config, *layout)
        )
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "rank_parameters", kept)
        yield
