"""The `algorithm` section: one dataclass per algorithm, chosen by its `name`."""

from dataclasses import dataclass
from typing import Literal

from megavlm.config.bounds import bounded


@dataclass(frozen=True, kw_only=True)
class PolicyOptimization:
    """What GRPO and PPO share. `prompts_per_step` x `responses_per_prompt` rollouts a step, trained
    on `epochs` times, in `minibatches` updates each.

    `policy_loss`: clip (PPO's surrogate; `clip_high` above `clip_low` is clip-higher; `dual_clip`
    bounds the loss of bad tokens), gspo (one ratio per sequence), cispo (ratios as clipped
    weights). `loss_aggregation`: token_mean, sequence_mean, sequence_sum, or constant (divided by
    the longest possible, `rollout.max_new_tokens` x `environment.max_turns`, for each episode).

    `kl_coefficient` times `kl_estimator` of the KL to the reference is added to the loss, or taken
    from the reward (`kl_in`). `kl_target`: the coefficient follows the measured KL, over
    `kl_horizon` responses.

    `old_logprobs`: of the trainer (a pass of its own), or those that the rollout servers gave.
    `importance`: the loss is weighted by p_trainer / p_rollout per token or per sequence,
    truncated at `importance_cap`, or masked outside of `importance_floor`..`importance_cap`.
    Sequences whose mean ratio per token is outside of `reject_below`..`reject_above` are left out.

    `dynamic_sampling`: groups whose rewards are all equal are replaced by other prompts', in at
    most that many further rounds a step. `overlong_buffer`: the last tokens before
    `rollout.max_new_tokens`, over which the reward falls by `overlong_penalty`; of several turns
    the last one counts, which alone may have been cut.
    `mask_truncated`: responses that ran into the limit are not trained on."""

    name: str
    steps: int = bounded(40, least=1)
    prompts_per_step: int = bounded(16, least=1)
    responses_per_prompt: int = bounded(8, least=1)
    minibatches: int = bounded(1, least=1)
    epochs: int = bounded(1, least=1)
    policy_loss: Literal["clip", "gspo", "cispo"] = "clip"
    clip_low: float = bounded(0.2, above=0, most=1)
    clip_high: float = bounded(0.2, above=0)
    dual_clip: float | None = bounded(None, above=1)
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = (
        "token_mean"
    )
    kl_coefficient: float = bounded(0.01, least=0)
    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_target: float | None = bounded(None, above=0)
    kl_horizon: int = bounded(10000, least=1)
    entropy_coefficient: float = bounded(0.0, least=0)
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    importance: Literal["none", "token", "sequence"] = "token"
    importance_mode: Literal["truncate", "mask"] = "truncate"
    importance_cap: float = bounded(2.0, least=1)
    importance_floor: float = bounded(0.0, least=0, most=1)
    reject_below: float | None = bounded(None, above=0, below=1)
    reject_above: float | None = bounded(None, above=1)
    dynamic_sampling: int = bounded(0, least=0)
    overlong_buffer: int = bounded(0, least=0)
    overlong_penalty: float = bounded(1.0, least=0)
    mask_truncated: bool = False

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.minibatches

    @property
    def policy_steps(self) -> int:
        """Steps in which the policy learns: its learning rate's schedule is theirs."""
        return self.steps


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyOptimization):
    """Policy optimisation without a critic. `advantage_estimator`: grpo, rloo,
    reinforce_plus_plus, or reinforce_plus_plus_baseline; `normalize_by_std` is of grpo, false for
    Dr. GRPO."""

    name: Literal["grpo"] = "grpo"
    advantage_estimator: Literal[
        "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = "grpo"
    normalize_by_std: bool = True


@dataclass(frozen=True, kw_only=True)
class PPO(PolicyOptimization):
    """Policy optimisation with a critic: `separate`, a model of its own with `critic_lr`, or
    `shared`, a value head on the policy, which learns with `critic_lr`, the rest with
    `optimizer.lr`. `gamma`, `lam`: of generalised advantage estimation, over tokens or turns
    (`gae_level`). `value_coefficient` weighs a shared critic's loss; `value_clip` null: not
    clipped. The first `critic_warmup_steps` steps train the critic alone."""

    name: Literal["ppo"] = "ppo"
    critic: Literal["separate", "shared"] = "separate"
    critic_lr: float = bounded(1e-5, above=0)
    critic_warmup_steps: int = bounded(0, least=0)
    gamma: float = bounded(1.0, least=0, most=1)
    lam: float = bounded(0.95, least=0, most=1)
    gae_level: Literal["token", "turn"] = "token"
    normalize_advantages: bool = True
    value_coefficient: float = bounded(0.5, above=0)
    value_clip: float | None = bounded(0.2, above=0)

    @property
    def policy_steps(self) -> int:
        return self.steps - self.critic_warmup_steps


@dataclass(frozen=True, kw_only=True)
class SFT:
    """Supervised fine-tuning on the answers, `batch_size` rows a step."""

    name: Literal["sft"] = "sft"
    steps: int = bounded(300, least=1)
    batch_size: int = bounded(32, least=1)

    @property
    def updates_per_step(self) -> int:
        return 1

    @property
    def policy_steps(self) -> int:
        return self.steps


Algorithm = GRPO | PPO | SFT
ALGORITHMS: dict[str, type[Algorithm]] = {"grpo": GRPO, "ppo": PPO, "sft": SFT}
