"""Metrics of a step, computed from measures that are summed over all ranks.
observability/metrics.py describes each metric.
"""

from collections.abc import Mapping, Sequence

from megavlm.algorithms.value_loss import explained_variance
from megavlm.training.losses import CUSTOM, OF_TEACHER

Report = Mapping[str, float]

# Metric -> the summed measure that it is the mean per token of.
_SHARES = {
    "entropy": "entropy",
    "ratio_mean": "ratio",
    "clip_share": "clipped",
    "clip_low_share": "clipped_low",
    "clip_high_share": "clipped_high",
    "clip_dual_share": "clipped_dual",
    "importance_mean": "importance",
    "importance_corrected_share": "corrected",
    "rejected_share": "rejected",
    "kl_reference": "kl_reference",
    "kl_teacher": "kl_teacher",
    "draft_divergence": "draft_divergence",
}


def policy_metrics(reports: Sequence[Report]) -> dict[str, float]:
    """Return means per token over a step's updates."""
    metrics = {
        "loss": sum(report["loss"] for report in reports) / len(reports),
        "ratio_max": max(report["largest_ratio"] for report in reports),
    }
    for metric, name in _SHARES.items():
        if name in reports[0]:
            metrics[metric] = _per_token(reports, name)
    for name in reports[0]:
        if name.startswith(CUSTOM):
            metrics[name] = _per_token(reports, name)
        elif name.startswith(OF_TEACHER):
            scored = sum(
                report[f"teacher_tokens/{name.removeprefix(OF_TEACHER)}"] for report in reports
            )
            if scored:
                metrics[name] = sum(report[name] for report in reports) / scored
    return metrics | engine_metrics(reports) | _update(reports)


def engine_metrics(reports: Sequence[Report]) -> dict[str, float]:
    """Return the difference between trainer and rollout engine, over the tokens that can be
    compared.
    """
    tokens = max(sum(report["engine_tokens"] for report in reports), 1.0)
    return {
        "rollout_train_kl": sum(report["rollout_train_kl"] for report in reports) / tokens,
        "rollout_max_difference": max(report["largest_rollout_difference"] for report in reports),
    }


def value_metrics(reports: Sequence[Report]) -> dict[str, float]:
    """Return the critic's metrics over a step's updates. The explained variance covers all passes
    and uses the values from which the advantages were computed.
    """
    total = {name: sum(report[name] for report in reports) for name in reports[0]}
    sums = ("value_tokens", "returns", "returns_squared", "errors", "errors_squared")
    return {
        "value_loss": total["value_loss"] / len(reports),
        "value_clip_share": total["value_clipped"] / max(total["value_tokens"], 1.0),
        "value_mean": total["values"] / max(total["value_tokens"], 1.0),
        "explained_variance": explained_variance(*(total[name] for name in sums)),
    }


def critic_metrics(reports: Sequence[Report]) -> dict[str, float]:
    """Return the metrics of a critic with an optimizer of its own."""
    update = _update(reports)
    return value_metrics(reports) | {f"critic_{name}": value for name, value in update.items()}


def supervised_metrics(report: Report) -> dict[str, float]:
    shares = [name for name in ("loss", "draft_divergence") if name in report]
    return {name: _per_token([report], name) for name in shares} | _update([report])


def preference_metrics(report: Report) -> dict[str, float]:
    """Return means over the pairs of a step. A response's reward is beta log p / p_reference."""
    mean = {
        name: report[name] / report["pairs"]
        for name in ("chosen_reward", "rejected_reward", "preferred")
    }
    return {
        "loss": report["loss"],
        "preference/accuracy": mean["preferred"],
        "preference/margin": mean["chosen_reward"] - mean["rejected_reward"],
        "preference/chosen_reward": mean["chosen_reward"],
        "preference/rejected_reward": mean["rejected_reward"],
    } | _update([report])


def _per_token(reports: Sequence[Report], name: str) -> float:
    return sum(report[name] for report in reports) / sum(report["tokens"] for report in reports)


def _update(reports: Sequence[Report]) -> dict[str, float]:
    norms = [report["gradient_norm"] for report in reports]
    skipped = sum(report["skipped_updates"] for report in reports)
    drafts = [x["draft_gradient_norm"] for x in reports if "draft_gradient_norm" in x]
    return {
        "gradient_norm": sum(norms) / len(norms),
        **({"draft_gradient_norm": sum(drafts) / len(drafts)} if drafts else {}),
        "learning_rate": reports[-1]["learning_rate"],
        "skipped_updates": skipped,
        "updates_without_signal": sum(report["updates_without_signal"] for report in reports),
    }
