"""`make parity`: the whole matrix, and RESULTS.md with what each case differs by.

python -m tests.parity.run [WORDS]     only cases whose name has all of the words
python -m tests.parity.run --subset    what `make test-all` runs

Rows of the cases that are left out stay as they are. Results are written after each layout.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from tests.parity.cases import Differences
from tests.parity.table import FAMILIES, Case, everything, subset
from tests.parity.test_parity import NORM_TOLERANCE, TOLERANCE, run

RESULTS = Path(__file__).with_name("RESULTS.md")
HEADER = """# The model against transformers

fp32 on CPUs, random weights, norms and biases. Logits (and a critic's values) and the gradient of
every parameter: largest difference over all ranks, relative to the largest entry of the tensor.
Norm: relative difference of the whole gradient's norm. Bounds: {tolerance:.0e}, {tolerance:.0e},
{norm:.0e}. Written by `make parity`, which replaces the rows of the cases that it runs.

Qwen3.5 is proven in fp64 besides (`test_double.py`, bound 1e-09), because fp32 alone would prove
less of it than of the others. Its tiny models are well conditioned: under weights as large as the
other families' (0.05 in place of 0.02 and 0.03), half an ulp of the weights moves transformers' own
gradients by 7.6e-06, and its fp32 gradients are up to 2.2e-05 from its fp64 ones, beyond the bound.
In fp64 rounding hides nothing, so equality there is not the small weights' doing. A tensor's norm
is taken in fp64: torch's fp32 norm of a matrix whose rows differ in size is off by 1e-06.

| family | layout | inputs | options | logits | gradient | norm |
|---|---|---|---|---|---|---|
"""


def main(words: Sequence[str]) -> int:
    if list(words) == ["--subset"]:
        cases = list(subset())
    else:
        cases = [case for case in everything() if all(word in str(case) for word in words)]
    cases.sort(key=_place)
    rows = read_rows(RESULTS)
    done = failed = 0
    for place, group in groupby(cases, key=_place):
        started = time.monotonic()
        misses = 0
        for case, found in _run(list(group)):
            rows[_label(case)], passed = _figures(found)
            misses += not passed
            done += 1
        write_rows(RESULTS, rows)
        failed += misses
        note = f"   {misses} FAILED" if misses else ""
        seconds = time.monotonic() - started
        name = ", ".join(part for part in (*place[:2], "tied" if place[2] else "") if part)
        print(f"{done}/{len(cases)}  {name}  {seconds:.0f} s{note}", flush=True)
    print(f"{len(cases) - failed} of {len(cases)} cases within the bounds")
    return 1 if failed else 0


def read_rows(path: Path) -> dict[str, str]:
    """Return the figures of each case by its label, the first columns of its row."""
    families = tuple(f"| {family} |" for family in FAMILIES)
    lines = [line for line in path.read_text().splitlines() if line.startswith(families)]
    parts = [line.split("|", 5) for line in lines]
    return {"|".join((*label, "")): figures for *label, figures in parts}


def write_rows(path: Path, rows: Mapping[str, str]) -> None:
    """Write the rows of cases that the matrix has, in its order."""
    labels = [_label(case) for case in sorted(everything(), key=_place)]
    lines = [label + rows[label] for label in labels if label in rows]
    header = HEADER.format(tolerance=TOLERANCE, norm=NORM_TOLERANCE)
    path.write_text(header + "\n".join(lines) + "\n")


def _label(case: Case) -> str:
    options = ", ".join(x for x in (case.options, "tied embeddings" if case.tied else "") if x)
    return f"| {case.family} | {case.layout} | {case.inputs} | {options} |"


def _place(case: Case) -> tuple[str, str, bool]:
    return case.family, case.layout, case.tied


def _run(cases: list[Case]) -> Iterator[tuple[Case, list[Differences]]]:
    """Cases of one model and layout with what each rank found; nothing for one that ended with an
    error, which is printed.
    """
    try:
        ranks = run(cases)
    except (RuntimeError, TimeoutError) as error:
        if len(cases) == 1:
            print(error)
            yield cases[0], []
            return
        for case in cases:  # which one is it?
            yield from _run([case])
        return
    for index, case in enumerate(cases):
        yield case, [rank[index] for rank in ranks]


def _figures(results: list[Differences]) -> tuple[str, bool]:
    """Return the last columns of a case's row, and whether it is within the bounds."""
    if not results:
        return " failed | | |", False
    logits, gradients, norm = (
        max(getattr(result, name) for result in results) for name in ("logits", "gradients", "norm")
    )
    passed = logits < TOLERANCE and gradients < TOLERANCE and norm < NORM_TOLERANCE
    return f" {logits:.1e} | {gradients:.1e} | {norm:.1e} |", passed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
