"""The `checkpoint` section: saving, retention, resumption and export."""

import difflib
from dataclasses import dataclass
from typing import Literal

from megavlm.config.section import Section, bounded

# Metrics of a run by which its checkpoints can be compared (`checkpoint.best_metric`).
# docs/reference/metrics.md describes them.
SUPERVISED = (
    "loss", "gradient_norm", "learning_rate", "skipped_updates", "updates_without_signal",
    "skipped_bad", "skipped_long", "tokens_per_second", "memory_gib", "recording_failures",
    "tracker_failures", "flops_per_second", "mfu",
    "preference/accuracy", "preference/margin", "preference/chosen_reward",
    "preference/rejected_reward", "draft_divergence", "draft_gradient_norm",
)  # fmt: skip
POLICY = (
    "episodes", "reward", "reward_failures", "accuracy", "turns", "curriculum_stage",
    "response_length", "truncated_share", "groups_without_signal", "kl_reference", "kl_teacher",
    "entropy",
    "clip_share", "clip_low_share", "clip_high_share", "clip_dual_share", "ratio_mean", "ratio_max",
    "importance_mean", "importance_corrected_share", "rejected_share", "rollout_train_kl",
    "stale_share", "stale_steps", "dropped_groups", "timed_out_groups", "servers_idle",
    "accept_length", "kept_tokens", "kept_tokens_max", "kept_bytes",
    "image_bytes_sent", "images_named", "images_refused",
    "teacher_bytes", "teacher_rest", "waves", "trainer_idle_share",
    "rollout_max_difference",
    "kl_coefficient", "sync_bytes", "sync_seconds", "sync_tensors", "sync_checked", "sync_servers",
    "sync_density", "sync_chain_bytes",
)  # fmt: skip
CRITIC = ("value_loss", "value_clip_share", "value_mean", "explained_variance")
# Prefixes of names that end in a category, a part, a phase or a user-defined name.
OPEN = (
    "reward/", "accuracy/", "episode/", "policy_loss/", "seconds/", "modelled/", "staleness/",
    "kl_teacher/", "critic_",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Section):
    """Checkpoints of a run, in `run.dir`/checkpoints."""

    every: int = bounded(20, least=0)
    """Steps between checkpoints. 0 saves only when the run ends or stops."""

    async_save: bool = True
    """Write files in the background while training continues. Each rank then holds a second copy
    of its shards in host memory until they are written."""

    step: int | None = bounded(None, least=0)
    """Step to resume from. Null resumes from the latest."""

    keep_last: int | None = bounded(2, least=1)
    """Number of latest steps to keep; older ones are deleted. Null keeps all."""

    keep_every: int | None = bounded(None, least=1)
    """Also keep the steps that are multiples of this number, in addition to the latest
    `checkpoint.keep_last` steps."""

    best_metric: str | None = None
    """Also keep the best step by this metric: a name in metrics.jsonl, whose mean since the last
    checkpoint is compared, or evaluation/ followed by greedy, sampled, valid, blind or shuffled."""

    best_mode: Literal["max", "min"] = "max"
    """Whether the best step has the highest or the lowest value of `checkpoint.best_metric`."""

    export_hf: bool = False
    """Export the model as a HuggingFace folder at the end of the run; adapters are merged."""

    verify_export: bool = False
    """Compare the logits that transformers computes from the exported folder with the trainer's."""

    def check(self) -> None:
        if self.verify_export and not self.export_hf:
            raise ValueError(
                "checkpoint.verify_export=true has nothing to verify with "
                "checkpoint.export_hf=false: set both or neither"
            )
        if self.keep_every is None:
            return
        if self.keep_last is None:
            raise ValueError(
                f"checkpoint.keep_every={self.keep_every} keeps steps when others are deleted, but "
                "checkpoint.keep_last=null deletes none: set checkpoint.keep_last, or remove it"
            )
        if self.every == 0 or self.keep_every % self.every:
            raise ValueError(
                f"checkpoint.keep_every={self.keep_every} must be a multiple of "
                f"checkpoint.every={self.every}: no other step is saved; change one of them"
            )


def nearest_metrics(name: str) -> list[str]:
    """Return the most similar metric names, or [] if a run may have the metric itself."""
    known = (*SUPERVISED, *POLICY, *CRITIC)
    if name in known or name.startswith(OPEN):
        return []
    return difflib.get_close_matches(name, known, n=3, cutoff=0.0)
