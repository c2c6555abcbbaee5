"""`make parity`: the whole matrix, and RESULTS.md with what each case differs by.

python -m tests.parity.run [WORDS]     only cases whose name has all of the words
python -m tests.parity.run --subset    what `make test-all` runs
"""

import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from tests.parity.cases import Differences
from tests.parity.table import Case, everything, subset
from tests.parity.test_parity import NORM_TOLERANCE, TOLERANCE, run

RESULTS = Path(__file__).with_name("RESULTS.md")
HEADER = """# The model against transformers

fp32 on CPUs, random weights, norms and biases. Logits (and a critic's values) and the gradient of
every parameter: largest difference over all ranks, relative to the largest entry of the tensor.
Norm: relative difference of the whole gradient's norm. Bounds: {tolerance:.0e}, {tolerance:.0e},
{norm:.0e}. {scope}

Qwen3.5's tiny models are well conditioned. Under weights as large as the other families' (0.05 in
place of 0.02 and 0.03), half an ulp of the weights moves transformers' own gradients by 7.6e-06,
and its fp32 gradients are up to 2.2e-05 from its fp64 ones. That equality is not the small weights'
doing is seen in fp64: logits and gradients of Qwen3.5 within 1e-09 (`test_double.py`). A tensor's
norm is taken in fp64: torch's fp32 norm of a matrix whose rows differ in size is off by 1e-06.

| family | layout | inputs | options | logits | gradient | norm |
|---|---|---|---|---|---|---|
"""


def main(words: Sequence[str]) -> int:
    is_subset = list(words) == ["--subset"]
    cases = list(subset() if is_subset else everything())
    if not is_subset:
        cases = [case for case in cases if all(word in str(case) for word in words)]
    cases.sort(key=_place)
    lines, failed = [], 0
    for place, group in groupby(cases, key=_place):
        started = time.monotonic()
        results = [_line(case, found) for case, found in _run(list(group))]
        lines += [line for line, _ in results]
        misses = sum(not passed for _, passed in results)
        failed += misses
        note = f"   {misses} FAILED" if misses else ""
        seconds = time.monotonic() - started
        name = ", ".join(part for part in (*place[:2], "tied" if place[2] else "") if part)
        print(f"{len(lines)}/{len(cases)}  {name}  {seconds:.0f} s{note}", flush=True)
    if not words or is_subset:
        scope = "Written by `make parity`."
        if is_subset:
            scope = "The cases of `make test-all`; `make parity` writes all of the matrix."
        header = HEADER.format(tolerance=TOLERANCE, norm=NORM_TOLERANCE, scope=scope)
        RESULTS.write_text(header + "\n".join(lines) + "\n")
    print(f"{len(cases) - failed} of {len(cases)} cases within the bounds")
    return 1 if failed else 0


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


def _line(case: Case, results: list[Differences]) -> tuple[str, bool]:
    options = ", ".join(x for x in (case.options, "tied embeddings" if case.tied else "") if x)
    start = f"| {case.family} | {case.layout} | {case.inputs} | {options} | "
    if not results:
        return f"{start}failed | | |", False
    logits, gradients, norm = (
        max(getattr(result, name) for result in results) for name in ("logits", "gradients", "norm")
    )
    passed = logits < TOLERANCE and gradients < TOLERANCE and norm < NORM_TOLERANCE
    return f"{start}{logits:.1e} | {gradients:.1e} | {norm:.1e} |", passed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
