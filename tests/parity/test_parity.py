"""The model against transformers in fp32: logits, values and every parameter's gradient, family by
family and layout by layout. `make parity` runs the whole matrix.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from megavlm.parallel.torchvision_ops import define_torchvision_operators
from tests.distributed.fork import launch
from tests.parity.cases import Differences, Expected, Job, compare_all, expect
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
            # Here once, not in every process that is forked for a reference.
            define_torchvision_operators()
            importlib.import_module(f"transformers.models.{case.family}.modeling_{case.family}")
            launch(1, make_model, folder, case.family, case.tied)
            self._inputs[folder] = Inputs(folder)
        return folder

    def job(self, case: Case) -> Job:
        folder, head = self.model(case), OPTIONS[case.options].head
        sequences = self._inputs[folder].sequences(case.inputs)
        key = (folder, case.inputs, head)
        if key not in self._expected:
            (self._expected[key],) = launch(1, expect, folder, sequences, head)
        return case, sequences, self._expected[key]

    def run(self, cases: Sequence[Case]) -> list[list[Differences]]:
        """By rank and case. The cases have one model and one layout."""
        folder, world_size = self.model(cases[0]), cases[0].ranks.world_size
        jobs = [self.job(case) for case in cases]
        return launch(world_size, compare_all, folder, self._inputs[folder].config, jobs)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("case", subset(), ids=str)
def test_equals_transformers(library: Library, case: Case) -> None:
    for (result,) in library.run([case]):
        assert result.logits < TOLERANCE
        assert result.gradients < TOLERANCE, result.parameter
        assert result.norm < NORM_TOLERANCE


def test_the_subset_is_of_the_matrix() -> None:
    chosen, all_cases = list(subset()), list(everything())
    assert {case.layout for case in chosen} == {case.layout for case in all_cases}
    assert {case.options for case in chosen} == {case.options for case in all_cases}
    assert {case.inputs for case in chosen} == {case.inputs for case in all_cases}
