"""The model against transformers in fp32: logits, values and every parameter's gradient, family by
family and layout by layout. `make parity` runs the whole matrix.
"""

from collections.abc import Sequence

import pytest

from tests.parity.cases import Differences, compare_all, expected_of
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.table import Case, everything, quick, subset
from tests.support.fork import launch

pytestmark = pytest.mark.parity
TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-6


def run(cases: Sequence[Case]) -> list[list[Differences]]:
    """Return what each rank found, by rank and case. The cases have one model and one layout."""
    first = cases[0]
    inputs = inputs_of(model_folder(first.family, tied=first.tied))
    jobs = [(case, inputs.sequences(case.inputs), expected_of(inputs, case)) for case in cases]
    return launch(first.ranks.world_size, compare_all, inputs.folder, inputs.config, jobs)


def marks(case: Case) -> list[pytest.MarkDecorator]:
    return [] if case in quick() else [pytest.mark.slow]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.xdist_group(case.family), *marks(case)], id=str(case))
        for case in dict.fromkeys((*quick(), *subset()))
    ],
)
def test_equals_transformers(case: Case) -> None:
    check(case)


def check(case: Case) -> None:
    for (result,) in run([case]):
        assert result.logits < TOLERANCE
        assert result.gradients < TOLERANCE, result.parameter
        assert result.norm < NORM_TOLERANCE


def test_the_subset_is_of_the_matrix() -> None:
    chosen, all_cases = set(subset()), set(everything())
    assert chosen < all_cases
    assert {(case.family, case.layout) for case in chosen} == {
        (case.family, case.layout) for case in all_cases
    }
    assert {case.options for case in chosen} == {case.options for case in all_cases}
    assert {case.inputs for case in chosen} == {case.inputs for case in all_cases}


def test_the_quick_cases_have_one_of_each_kind() -> None:
    """Each axis of each size, by itself; each pair of axes; family, option and inputs."""
    chosen, all_cases = list(quick()), list(everything())
    assert len(chosen) <= 24 and set(chosen) < set(all_cases)
    for kind in ("family", "options", "inputs", "tied", "kind"):
        missing = {getattr(x, kind) for x in all_cases} - {getattr(x, kind) for x in chosen}
        assert not missing, kind
