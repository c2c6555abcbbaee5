"""result.json: summary of a run, made from the files that it wrote.

Everything is read from metrics.jsonl and evaluations.jsonl, so a resumed run counts as one.
Accuracies are shares in 0..1, times are seconds.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megavlm.observability.metrics import EVALUATIONS_FILE, METRICS_FILE
from megavlm.observability.phases import seconds_outside_phases
from megavlm.observability.records import finite, read_records
from megavlm.observability.text import failed_rewards, percent, points
from megavlm.writing import write_whole

RESULT_FILE = "result.json"
FINAL_EPISODES = 100  # number of last episodes whose mean reward is the final reward

# With shuffled images a model that uses them can at best guess the most frequent answer. Five
# points more may be chance.
SHUFFLED_TOLERANCE = 0.05


def build_result(
    run_dir: Path | str,
    *,
    steps: int,
    seed: int,
    extra_seconds: Mapping[str, float] | None = None,
    paths: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the result of a run of `steps` updates.

    In the result, "before" is the evaluation at step 0, "after" the one at the last step (each
    None without such an evaluation), and `evaluation` is the last one. `final_reward` is described
    at the function of that name. extra_seconds: seconds of phases outside the steps (start of
    servers, export). paths: output files by name.
    """
    run_dir = Path(run_dir)
    evaluations = {record["step"]: record for record in read_records(run_dir / EVALUATIONS_FILE)}
    before, after = evaluations.get(0), evaluations.get(steps) if steps else None
    seconds: dict[str, float] = defaultdict(float)
    metrics = read_records(run_dir / METRICS_FILE)
    for record in metrics:
        for name, value in record.items():
            section, _, phase = name.partition("/")
            if section == "seconds" and phase != "total" and value is not None:
                seconds[phase] += value
        if "seconds/total" in record:
            seconds["other"] += seconds_outside_phases(record)
    for record in evaluations.values():
        seconds["evaluation"] += record["seconds"]
    for phase, value in (extra_seconds or {}).items():
        seconds[phase] += value
    is_visual, conclusion = conclude(before, after)
    return {
        "final_reward": final_reward(metrics),
        "total_steps": steps,
        "total_episodes": round(sum(record.get("episodes") or 0 for record in metrics)),
        "metrics": str(run_dir / METRICS_FILE),
        "evaluation": evaluations[max(evaluations)] if evaluations else None,
        "accuracy_before": _share(before),
        "accuracy_after": _share(after),
        "accuracy_before_by_category": _shares(before),
        "accuracy_after_by_category": _shares(after),
        "seconds_by_phase": {phase: round(value, 3) for phase, value in seconds.items()},
        "steps": steps,
        "seed": seed,
        "gain_is_visual": is_visual,
        "conclusion": conclusion,
        "evaluation_before": before,
        "evaluation_after": after,
        "paths": dict(paths or {}),
    }


def final_reward(metrics: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean reward of the last FINAL_EPISODES episodes, or None without episodes. Of a
    step that is only partly among them, the mean reward of the step is used.
    """
    left, total = float(FINAL_EPISODES), 0.0
    for record in reversed(metrics):
        if record.get("reward") is None or left <= 0:
            continue
        counted = min(record.get("episodes") or 0, left)
        total += counted * record["reward"]
        left -= counted
    counted = FINAL_EPISODES - left
    return total / counted if counted else None


def write_result(run_dir: Path | str, result: Mapping[str, Any]) -> Path:
    """Write result.json atomically, and return its path."""
    path = Path(run_dir) / RESULT_FILE
    write_whole(path, (json.dumps(finite(result), indent=2, ensure_ascii=False) + "\n").encode())
    return path


def conclude(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> tuple[bool | None, str]:
    """Return whether the gain is visual (None if not measured), and a sentence that says so.

    If rewards failed, a second sentence says it, because measured accuracies are then too low.
    """
    is_visual, sentence = _conclude(before, after)
    failures = Counter[str]()
    for evaluation in (before, after):
        failures.update((evaluation or {}).get("failures") or {})
    if sentence and failures:
        sentence += f" {failed_rewards(failures)}."
    return is_visual, sentence


def _conclude(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> tuple[bool | None, str]:
    if after is None:
        return None, ""
    accuracy = _share(after)
    if before is None:
        gain = f"Greedy accuracy is {percent(accuracy)}, with no evaluation at the start"
    elif accuracy <= _share(before):
        change = f"from {percent(_share(before))} to {percent(accuracy)}"
        return False, f"There is no gain: greedy accuracy went {change}."
    else:
        difference = points(accuracy - _share(before)).removeprefix("+")
        gain = f"Greedy accuracy rose by {difference} points to {percent(accuracy)}"
    if after["shuffled"] is None:
        return None, f"{gain}; whether it is visual was not measured."
    if after["blind"] is None:
        return None, (
            f"{gain}; whether it is visual was not measured, because without answers there "
            "is no blind baseline."
        )
    blind = after["blind"]["overall"]["share"]
    shuffled = after["shuffled"]["overall"]["share"]
    is_visual = shuffled <= blind + SHUFFLED_TOLERANCE
    verdict = "this is visual" if is_visual else "this is NOT shown to be visual"
    limit = f"{100 * SHUFFLED_TOLERANCE:.0f} points"
    excess = "" if is_visual else f", more than {limit} above"
    return is_visual, (
        f"{gain}; {verdict}: with images shuffled between questions it is {percent(shuffled)}"
        f"{excess} (blind baseline {percent(blind)})."
    )


@dataclass(frozen=True)
class CategoryRow:
    """Row of the accuracy table. Values that were not measured are None."""

    category: str
    count: int
    before: float | None
    after: float | None
    interval: tuple[float, float] | None
    sampled: float | None
    valid: float | None
    blind: float | None
    shuffled: float | None

    @property
    def gain(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before


def category_rows(result: Mapping[str, Any]) -> list[CategoryRow]:
    """Return one row per category, and a last one for all categories. All columns except `before`
    are from the last evaluation.
    """
    before, after = result["evaluation_before"], result["evaluation_after"]
    last = after or before
    if last is None:
        return []
    rows = []
    names = list(last["greedy"]["by_category"])
    for category in [*(names if set(names) - {""} else []), None]:
        counted = _cell(last, "greedy", category)
        assert counted is not None
        rows.append(
            CategoryRow(
                category="all" if category is None else category or "(none)",
                count=counted["count"],
                before=_value(before, "greedy", category),
                after=_value(after, "greedy", category),
                interval=(counted["interval"][0], counted["interval"][1]),
                sampled=_value(last, "sampled", category),
                valid=_value(last, "valid", category),
                blind=_value(last, "blind", category),
                shuffled=_value(last, "shuffled", category),
            )
        )
    return rows


def _cell(
    evaluation: Mapping[str, Any] | None, measure: str, category: str | None
) -> Mapping[str, Any] | None:
    if evaluation is None or evaluation[measure] is None:
        return None
    if category is None:
        return evaluation[measure]["overall"]
    return evaluation[measure]["by_category"].get(category)


def _value(
    evaluation: Mapping[str, Any] | None, measure: str, category: str | None
) -> float | None:
    cell = _cell(evaluation, measure, category)
    return None if cell is None else cell["share"]


def _share(evaluation: Mapping[str, Any] | None) -> Any:
    return _value(evaluation, "greedy", None)


def _shares(evaluation: Mapping[str, Any] | None) -> dict[str, float]:
    if evaluation is None:
        return {}
    return {
        category: share["share"] for category, share in evaluation["greedy"]["by_category"].items()
    }
