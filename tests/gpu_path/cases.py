"""Cases of the parity matrix on the GPU path; `test_stage.py` and `make test-gpu-path` run them."""

import sys

import pytest

from megavlm.parallel import platform
from tests.parity.table import Case
from tests.parity.test_parity import check

CASES = [
    Case("qwen2_5_vl", "TP2+SP"),
    Case("qwen2_5_vl", "TP2+SP", "branches", "recompute full"),
    Case("qwen2_5_vl", "TP2+SP", "mixed", "separate critic"),
    Case("qwen2_vl", "PP2 virtual 2"),
    Case("qwen3_vl", "TP2+SP", "branches", "recompute selective"),
    Case("qwen3_vl_moe", "one rank"),
    Case("qwen3_vl_moe", "EP2"),
    Case("qwen3_vl_moe", "EP2 over TP2+SP", "mixed", "recompute full"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_transformers(case: Case) -> None:
    check(case)


def test_the_models_are_transformer_engines() -> None:
    assert platform.has_gpu() and "transformer_engine.pytorch" in sys.modules
