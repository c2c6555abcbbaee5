"""`make bench-trl`: steps of TRL's GRPOTrainer and of megavlm in turn, on the same model and data.

`python -m tests.benchmarks.bench_trl TRL_PYTHON [CASE ...]` writes its part of RESULTS.md; of some
cases it only prints.

Both train every weight but the tower's with AdamW in fp32, one update a step, on responses of equal
length; lengths, rewards, learning rate and the clipped loss are the same. TRL generates with
transformers in its own process, and trains on sequences. megavlm generates on SGLang servers, which
get the weights in a sync, and trains on trees.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from megavlm.parallel import platform

platform.install()  # before the first import of megatron-core

from tests.benchmarks.bench_trl.cases import CASES, PROCESSES, Case, prepare  # noqa: E402
from tests.benchmarks.bench_trl.measure import Run, megavlm, trl  # noqa: E402
from tests.benchmarks.results import replace_part  # noqa: E402

HEAD = """| Case | Prompt | Responses | TRL | megavlm | Steps an hour | Processor time | Goal |
|---|---|---|---|---|---|---|---|
"""
PHASES = ("rollout", "vision", "update", "sync")


def measured(case: Case, python: Path, rounds: int) -> tuple[list[Run], list[Run]]:
    theirs, ours = list[Run](), list[Run]()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, case.name)
            prepare(case, folder)
            theirs.append(trl(folder, python, processes=PROCESSES))
            print(f"{case.name}: TRL {theirs[-1].median:.2f} s a step", flush=True)
            ours.append(megavlm(folder))
            print(f"{case.name}: megavlm {ours[-1].median:.2f} s a step", flush=True)
    return theirs, ours


def row(case: Case, theirs: list[Run], ours: list[Run]) -> str:
    seconds = [statistics.median(run.median for run in runs) for runs in (theirs, ours)]
    spent = [statistics.median(run.processor for run in runs) for runs in (theirs, ours)]
    goal = "" if case.goal is None else f"{case.goal:g} x"
    images = f", {case.images} image" if case.images else ""
    return (
        f"| {case.name} | {case.prompt} tokens{images} | {case.prompts} x {case.n} of "
        f"{case.length} | {seconds[0]:.2f} s | {seconds[1]:.2f} s | "
        f"**{seconds[0] / seconds[1]:.2f} x** | {spent[0]:.1f} s, {spent[1]:.1f} s: "
        f"{spent[0] / spent[1]:.2f} x | {goal} |"
    )


def phases(case: Case, runs: list[Run]) -> str:
    """Return a line of where megavlm's step goes."""
    means = {
        name: statistics.mean(run.phases.get(name, 0.0) for run in runs)
        for name in (*PHASES, "total")
    }
    rest = means["total"] - sum(means[name] for name in PHASES)
    cells = [f"{means[name]:.2f} s" for name in PHASES]
    return f"| {case.name} | {' | '.join(cells)} | {rest:.2f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", type=Path)
    parser.add_argument("cases", nargs="*", help=", ".join(names := [case.name for case in CASES]))
    parser.add_argument("--rounds", type=int, default=3, help="of TRL and megavlm in turn")
    options = parser.parse_args()
    if unknown := {*options.cases} - {*names}:
        parser.error(f"no case {', '.join(unknown)}: choose from {', '.join(names)}")
    chosen = [case for case in CASES if not options.cases or case.name in options.cases]
    results = {case: measured(case, options.python, options.rounds) for case in chosen}
    lines = [row(case, *runs) for case, runs in results.items()]
    lines += ["", f"| Case | {' | '.join(PHASES)} | other |", "|---" * (len(PHASES) + 2) + "|"]
    lines += [phases(case, ours) for case, (_, ours) in results.items()]
    text = HEAD + "\n".join(lines) + "\n"
    print(text)
    if not options.cases:
        replace_part("bench-trl", text)


if __name__ == "__main__":
    main()
