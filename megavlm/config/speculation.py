"""The `speculation` section: training of the head with which servers draft tokens."""

from dataclasses import dataclass

from megavlm.config.section import Section, bounded


@dataclass(frozen=True, kw_only=True)
class Speculation(Section):
    """Training of the draft head, with which servers guess tokens and verify several in one pass:
    `mtp.*` of Qwen3.5 (`rollout.server_args.speculative_algorithm: NEXTN`), or an EAGLE-3 head of
    Qwen2.5-VL or Qwen3-VL (EAGLE3), which lies in the folder
    `rollout.server_args.speculative_draft_model_path`.
    """

    train: bool = False
    """Train the draft head to predict what the policy predicts, on the packs of each update and
    without a gradient to the policy. Weight updates then send the head, too. Without it the head
    stays as it is, and servers accept fewer of its drafts as the policy changes."""

    lr: float = bounded(1e-4, above=0)
    """Learning rate of the draft head after warmup, on the schedule of `optimizer.lr`. It is higher
    than a policy's, because the head follows a policy that moves, and one layer is cheap to
    teach."""

    clip_grad: float = bounded(1.0, least=0)
    """Maximum norm of the draft head's gradient, which does not count in `optimizer.clip_grad`. 0
    turns clipping off."""
