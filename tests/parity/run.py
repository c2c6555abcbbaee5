"""`make parity`: the whole matrix, and RESULTS.md with what each case differs by.

python -m tests.parity.run [WORDS]     only cases whose name has all of the words
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.parity.table import Case, everything
from tests.parity.test_parity import NORM_TOLERANCE, TOLERANCE, Library

RESULTS = Path(__file__).with_name("RESULTS.md")
HEADER = """# The model against transformers

fp32 on CPUs, random weights, norms and biases. Logits (and a critic's values) and the gradient of
every parameter: largest difference over all ranks, relative to the largest entry of the tensor.
Norm: relative difference of the whole gradient's norm. Bounds: {tolerance:.0e}, {tolerance:.0e},
{norm:.0e}. Written by `make parity`.

| family | layout | inputs | options | logits | gradient | norm |
|---|---|---|---|---|---|---|
"""


def main(words: Sequence[str]) -> int:
    cases = [case for case in everything() if all(word in str(case) for word in words)]
    lines, failed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        library = Library(Path(folder))
        for number, case in enumerate(cases, 1):
            started = time.monotonic()
            line, passed = _run(library, case)
            failed += not passed
            lines.append(line)
            mark = "" if passed else "   FAILED"
            seconds = time.monotonic() - started
            print(f"{number}/{len(cases)}  {case}  {seconds:.1f} s{mark}", flush=True)
    if not words:
        header = HEADER.format(tolerance=TOLERANCE, norm=NORM_TOLERANCE)
        RESULTS.write_text(header + "\n".join(lines) + "\n")
    print(f"{len(cases) - failed} of {len(cases)} cases within the bounds")
    return 1 if failed else 0


def _run(library: Library, case: Case) -> tuple[str, bool]:
    options = ", ".join(x for x in (case.options, "tied embeddings" if case.tied else "") if x)
    start = f"| {case.family} | {case.layout} | {case.inputs} | {options} | "
    try:
        results = library.run(case)
    except (RuntimeError, TimeoutError) as error:
        print(error)
        return f"{start}failed | | |", False
    logits, gradients, norm = (
        max(getattr(result, name) for result in results) for name in ("logits", "gradients", "norm")
    )
    passed = logits < TOLERANCE and gradients < TOLERANCE and norm < NORM_TOLERANCE
    return f"{start}{logits:.1e} | {gradients:.1e} | {norm:.1e} |", passed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
