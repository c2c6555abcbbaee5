"""The model against transformers in fp32: logits, values and every parameter's gradient, family by
family and layout by layout. `make parity` runs the whole matrix.
"""

from pathlib import Path

import pytest

from tests.distributed.fork import launch
from tests.parity.cases import Differences, Expected, compare, expect
from tests.parity.inputs import Inputs
from tests.parity.models import make_model
from tests.parity.table import OPTIONS, Case, everything, subset

pytestmark = pytest.mark.parity
TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-6


class Library:
    """Models, inputs, and what transformers computes, each made once: ranks only compare."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inputs: dict[Path, Inputs] = {}
        self._expected: dict[tuple[Path, str, str], Expected] = {}

    def model(self, case: Case) -> Path:
        folder = self._folder / f"{case.family}{'_tied' if case.tied else ''}"
        if not folder.exists():
            launch(1, make_model, folder, case.family, case.tied)
            self._inputs[folder] = Inputs(folder)
        return folder

    def run(self, case: Case) -> list[Differences]:
        """By rank."""
        folder, head = self.model(case), OPTIONS[case.options].head
        inputs = self._inputs[folder]
        sequences = inputs.sequences(case.inputs)
        key = (folder, case.inputs, head)
        if key not in self._expected:
            (self._expected[key],) = launch(1, expect, folder, sequences, head)
        expected = self._expected[key]
        return launch(
            case.ranks.world_size, compare, folder, inputs.config, case, sequences, expected
        )


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("case", subset(), ids=str)
def test_equals_transformers(library: Library, case: Case) -> None:
    for result in library.run(case):
        assert result.logits < TOLERANCE
        assert result.gradients < TOLERANCE, result.parameter
        assert result.norm < NORM_TOLERANCE


def test_the_subset_is_of_the_matrix() -> None:
    chosen, all_cases = list(subset()), list(everything())
    assert {case.layout for case in chosen} == {case.layout for case in all_cases}
    assert {case.options for case in chosen} == {case.options for case in all_cases}
    assert {case.inputs for case in chosen} == {case.inputs for case in all_cases}
