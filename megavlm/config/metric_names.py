"""Names of a run's metrics by which its checkpoints can be compared (`checkpoint.best_metric`).

Their meaning: megavlm/observability/metrics.py.
"""

import difflib

SUPERVISED = (
    "loss", "gradient_norm", "learning_rate", "skipped_updates", "updates_without_signal",
    "skipped_bad", "skipped_long", "tokens_per_second", "memory_gib",
)  # fmt: skip
POLICY = (
    "episodes", "reward", "reward_failures", "accuracy", "turns", "curriculum_stage",
    "response_length", "truncated_share", "groups_without_signal", "kl_reference", "entropy",
    "clip_share", "clip_low_share", "clip_high_share", "clip_dual_share", "ratio_mean", "ratio_max",
    "importance_mean", "importance_corrected_share", "rejected_share", "rollout_train_kl",
    "stale_share", "stale_steps", "rollout_max_difference", "kl_coefficient", "sync_bytes",
    "sync_tensors", "sync_checked", "sync_servers",
)  # fmt: skip
CRITIC = ("value_loss", "value_clip_share", "value_mean", "explained_variance")
# Beginnings of names that end in a category, a part, a phase or a name of the user's.
OPEN = ("reward/", "accuracy/", "policy_loss/", "seconds/", "critic_")


def nearest_metrics(name: str) -> list[str]:
    """Return [] if a run may have the metric, else the names that are most like it."""
    known = (*SUPERVISED, *POLICY, *CRITIC)
    if name in known or name.startswith(OPEN):
        return []
    return difflib.get_close_matches(name, known, n=3, cutoff=0.0)
