"""From sums over all ranks to the metrics of observability/metrics.py."""

from collections.abc import Mapping, Sequence

Report = Mapping[str, float]


def policy_metrics(reports: Sequence[Report]) -> dict[str, float]:
    """Means per token over a step's minibatches."""
    metrics = {
        "loss": _per_token(reports, "loss"),
        "entropy": _per_token(reports, "entropy"),
        "clip_share": _per_token(reports, "clipped"),
        "rollout_kl": _per_token(reports, "rollout_kl"),
        "rollout_max_difference": max(report["largest_rollout_difference"] for report in reports),
    }
    if "kl_reference" in reports[0]:
        metrics["kl_reference"] = _per_token(reports, "kl_reference")
    return metrics | _update(reports)


def supervised_metrics(report: Report) -> dict[str, float]:
    return {"loss": _per_token([report], "loss")} | _update([report])


def _per_token(reports: Sequence[Report], name: str) -> float:
    return sum(report[name] for report in reports) / sum(report["tokens"] for report in reports)


def _update(reports: Sequence[Report]) -> dict[str, float]:
    norms = [report["gradient_norm"] for report in reports]
    skipped = sum(report["skipped_updates"] for report in reports)
    return {
        "gradient_norm": sum(norms) / len(norms),
        "learning_rate": reports[-1]["learning_rate"],
        "skipped_updates": skipped,
    }
