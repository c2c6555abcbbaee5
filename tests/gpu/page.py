"""Writer of the results in tests/benchmarks/GPU.md, from the lines that stages wrote.

    python -m tests.gpu.page

Reads tests/benchmarks/gpu/STAGE.jsonl, of which the last run counts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megavlm.config.load import load
from megavlm.parallel import platform
from megavlm.planner.memory import GB, OVERHEAD, RunMemory
from tests.benchmarks.results import replace_part
from tests.gpu import shapes

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PAGE = BENCHMARKS / "GPU.md"
RESULTS = BENCHMARKS / "gpu"
NOTHING = "No stage has run on a GPU yet.\n"
RECIPE = Path(__file__).parents[2] / "recipes" / "grpo" / "qwen2_5_vl_3b_geo3k.yaml"

Line = Mapping[str, Any]
START = ("stage", "start")


def read_last_run(path: Path) -> list[Line]:
    """Return the lines of a stage's last run, in order; the end may be missing."""
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    starts = [i for i, line in enumerate(lines) if (line["part"], line["check"]) == START]
    assert starts, f"{path} has no line of the start of a stage"
    return lines[starts[-1] :]


def render(runs: Mapping[str, Sequence[Line]]) -> str:
    """Return the results of all stages in Markdown. runs: lines by stage."""
    if not runs:
        return NOTHING
    return "\n".join(line for stage, run in sorted(runs.items()) for line in _stage(stage, run))


def _stage(stage: str, run: Sequence[Line]) -> Iterator[str]:
    start, end = run[0], run[-1]
    took = f"{end['seconds']:.0f} s" if end["part"] == "stage" else "ended by its machine's limit"
    machine = next((x for x in run if x["check"] == "machine"), None)
    faults = [x for x in run if x["fault"]]
    yield f"### Stage {stage.upper()}, {start['date']}"
    yield ""
    if machine is not None:
        versions = {"Python": machine["python"], **machine["versions"]}
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield f"{machine['card']}, {machine['cores']} cores; {listed}."
    results = [x for x in run if x["check"] not in ("start", "end")]
    yield (
        f"`{start['command']}`, state {start['state']}, {took}; {len(results)} results, "
        f"{len(faults)} faults."
    )
    for name, rows in _tables(run).items():
        yield from ("", f"**{name}**", "", *_table(rows))
    if faults:
        yield from ("", "**Faults**", "")
        yield from (f"- {x['part']}, {x['check']}: {_one_line(x['fault'])}" for x in faults)
    yield ""


def _tables(run: Sequence[Line]) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each table: of lines of one part's module with the same values."""
    tables: dict[str, list[dict[str, str]]] = {}
    for line in sorted(run, key=lambda line: line["part"]):  # parts ran side by side
        if line["check"] in ("start", "end", "machine"):
            continue
        module, *arguments = line["part"].split()
        values = {x: y for x, y in line.items() if x not in ("stage", "part", "check", "fault")}
        if not values:
            continue  # a check that failed: it is among the faults
        if line["check"] == "model":
            values["modelled gigabytes"] = modelled_bytes(line) / GB
        title = module if module == "parity" else f"{module}: {line['check']}"
        row = {"of": " ".join(arguments)} if arguments else {}
        if module == "parity":
            row["check"] = line["check"]
        row |= {name: _cell(value) for name, value in _flat(values)}
        tables.setdefault(title, []).append(row)
    return tables


def modelled_bytes(line: Line) -> float:
    """Return the most bytes that an update allocates on one GPU which trains all layers of the
    line's model, as `megavlm plan` models them.
    """
    config = shapes.config_of(line["release"], line["layers"])
    tokens = line["tokens"]
    keys = {
        "parallel.tensor": 1,
        "parallel.sequence": "false",
        "parallel.data": 1,
        "recompute.language": "none",
        "data.pack_tokens": tokens,
        "data.max_prompt_tokens": tokens // 2,
        "rollout.max_new_tokens": tokens // 4,
        "algorithm.prompts_per_step": shapes.update_shape().trees,
        "model.fusions": str(line["engine"]).lower(),
    }
    recipe = load(RECIPE, [f"{key}={value}" for key, value in keys.items()])
    return RunMemory.of(recipe, config, 1).fullest - OVERHEAD


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name} {inner}", x) for inner, x in value.items())
        else:
            yield name, value


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return "" if value is None else str(value).replace("|", "\\|")


def _one_line(text: str) -> str:
    return " ".join(text.split())[-400:]


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    heads = list(dict.fromkeys(name for row in rows for name in row))
    lines = [heads, ["---"] * len(heads), *([row.get(x, "") for x in heads] for row in rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def read_results() -> dict[str, list[Line]]:
    """Return the last run of each stage that has run."""
    return {path.stem: read_last_run(path) for path in sorted(RESULTS.glob("*.jsonl"))}


def main() -> None:
    platform.install()
    replace_part("results", render(read_results()), PAGE)


if __name__ == "__main__":
    main()
