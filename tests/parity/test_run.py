"""`make parity` of some cases."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity import run
from tests.parity.cases import Differences
from tests.parity.table import Case, everything


def test_a_run_of_some_cases_keeps_the_rows_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "RESULTS.md"
    before = dict.fromkeys(map(run._label, everything()), " 1.0e-07 | 1.0e-06 | 1.0e-08 |")
    gone = {run._label(Case("qwen3_5", "TP64")): " failed | | |"}
    run.write_rows(results, before | gone)
    assert run.read_rows(results) == before

    def found(cases: list[Case]) -> Iterator[tuple[Case, list[Differences]]]:
        for case in cases:
            missed = case.layout == "CP4"
            yield case, [] if missed else [Differences(2e-6, 3e-6, "weight", 4e-7)]

    monkeypatch.setattr(run, "RESULTS", results)
    monkeypatch.setattr(run, "_run", found)
    assert run.main(["qwen3_5,", "CP4"]) == 1
    assert run.main(["qwen3_5,", "EP2"]) == 0  # no case: only the mixture has experts
    assert run.main(["qwen3_5,", "one rank"]) == 0
    after = run.read_rows(results)
    changed = {label for label, figures in after.items() if figures != before[label]}
    cases = [case for case in everything() if case.family == "qwen3_5"]
    assert changed == {run._label(x) for x in cases if x.layout in ("CP4", "one rank")}
    assert after.keys() == before.keys()
    assert after[run._label(cases[0])] == " 2.0e-06 | 3.0e-06 | 4.0e-07 |"
    assert after[run._label(Case("qwen3_5", "CP4"))] == " failed | | |"
