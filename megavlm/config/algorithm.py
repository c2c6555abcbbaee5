"""The `algorithm` section: one dataclass per algorithm, chosen by its `name`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from megavlm.config.section import Section, bounded, follows


@dataclass(frozen=True, kw_only=True)
class PolicyOptimization(Section):
    """Keys that GRPO and PPO share."""

    name: str
    """Algorithm: grpo, ppo, sft or dpo. The other keys of the section depend on it."""

    steps: int = bounded(40, least=1)
    """Steps of the run. A step samples rollouts, trains on them and updates the servers' weights.
    The default is the demo's."""

    prompts_per_step: int = bounded(16, least=1)
    """Prompts of a step."""

    responses_per_prompt: int = bounded(8, least=1)
    """Responses sampled for each prompt (the group size)."""

    minibatches: int = bounded(1, least=1)
    """Optimizer updates in one pass over a step's rollouts. Each minibatch holds whole groups. 1 is
    strictly on-policy."""

    epochs: int = bounded(1, least=1)
    """Passes over a step's rollouts."""

    policy_loss: str = "clip"
    """Policy loss: clip (PPO's clipped surrogate, arXiv 1707.06347), gspo (one ratio per sequence,
    arXiv 2507.18071), cispo (ratios as clipped weights, arXiv 2506.13585), sapo (a smooth gate in
    place of clipping, arXiv 2511.20347), or a function of your own as package.module:function, as
    megavlm/algorithms/policy_loss.py describes."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for an advantage estimator and a policy loss of your own. Each function
    gets the options that it has parameters for."""

    clip_low: float = bounded(0.2, above=0, most=1)
    """Ratios below 1 - `clip_low` are clipped (PPO's epsilon). GSPO uses about 3e-4; 1 sets no
    lower bound, as in CISPO."""

    clip_high: float = bounded(0.2, above=0)
    """Ratios above 1 + `clip_high` are clipped. A value above `clip_low` is DAPO's clip-higher
    (0.28 in the paper, arXiv 2503.14476)."""

    dual_clip: float | None = bounded(None, above=1)
    """Upper bound c of the loss where the advantage is negative: the loss is at most c times the
    size of the advantage; 3 is usual (dual clip, arXiv 1912.09729). Null sets no bound."""

    tau_pos: float = bounded(1.0, above=0)
    """Temperature of SAPO's gate for tokens with a positive advantage: the larger it is, the faster
    the gradient decreases as the ratio leaves 1. The default is the paper's."""

    tau_neg: float = bounded(1.05, above=0)
    """Temperature of SAPO's gate for tokens with a negative advantage. The paper's default is above
    `tau_pos`, because these tokens raise the logits of many others."""

    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = (
        "token_mean"
    )
    """How the loss of an update is averaged. token_mean: mean over all tokens (DAPO, arXiv
    2503.14476). sequence_mean: mean over sequences of the mean over their tokens (GRPO, arXiv
    2402.03300). sequence_sum: mean over sequences of the sum over their tokens. constant: sum
    divided by the number of sequences times the longest possible length,
    `rollout.max_new_tokens` x `environment.max_turns` (Dr. GRPO, arXiv 2503.20783)."""

    kl_coefficient: float = bounded(0.01, least=0)
    """Coefficient of the KL divergence from the reference model, which is the model that training
    started from. With 0 no reference model is needed."""

    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """Estimator of the KL divergence per token (joschu.net/blog/kl-approx.html). With q the
    reference: k1 is log p/q, k2 (log p/q)^2 / 2, k3 q/p - 1 - log q/p as in GRPO, unbiased is k3
    weighted by the ratio to the old policy (DeepSeek-V3.2, arXiv 2512.02556)."""

    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL divergence is applied: added to the loss (GRPO) or subtracted from the
    per-token rewards (PPO, REINFORCE++)."""

    kl_target: float | None = bounded(None, above=0)
    """Target KL divergence per token of an adaptive coefficient (arXiv 1909.08593, section 2.2).
    Null keeps the coefficient constant."""

    kl_horizon: int = bounded(10000, least=1)
    """Responses over which the adaptive coefficient changes by at most a fifth. The default is the
    paper's."""

    entropy_coefficient: float = bounded(0.0, least=0)
    """Coefficient of an entropy bonus in the loss."""

    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Source of the old log-probs in the ratio. `trainer` computes them in a forward pass, which is
    skipped for the first update of a step; `rollout` uses the log-probs that the servers returned
    and saves the pass."""

    routing_replay: bool = False
    """Send each token to the experts that the rollout server chose for it, in all passes of the
    policy (R3, arXiv 2510.11370). Only for mixtures of experts. Rounding in the two engines makes
    their routers choose different experts for some tokens, whose log-probs then differ widely."""

    importance: Literal["none", "token", "sequence"] = "token"
    """Importance weights p_trainer / p_rollout of the loss. They correct for the gap between
    training and rollout engine, for each token or for each sequence (the product over its tokens).
    See fengyao.notion.site/off-policy-rl."""

    importance_cap: float = bounded(2.0, least=1)
    """Largest importance weight. Larger ones are truncated to it (TIS), or set to 0 with
    `importance_floor`."""

    importance_floor: float | None = bounded(None, least=0, most=1)
    """Smallest importance weight. Weights outside of `importance_floor`..`importance_cap` are set
    to 0 (IcePop, arXiv 2510.18855). Null sets no bound, and truncates to the cap."""

    reject_below: float | None = bounded(None, above=0, below=1)
    """Do not train on sequences whose geometric mean of p_trainer / p_rollout is below this value.
    Null sets no bound."""

    reject_above: float | None = bounded(None, above=1)
    """Do not train on sequences whose geometric mean of p_trainer / p_rollout is above this value.
    Null sets no bound."""

    dynamic_sampling: int = bounded(0, least=0)
    """Maximum number of extra sampling rounds in a step. Each replaces groups whose rewards are
    all equal by groups of other prompts (dynamic sampling in DAPO, arXiv 2503.14476). 0 turns it
    off."""

    overlong_buffer: int = bounded(0, least=0)
    """Number of tokens before `rollout.max_new_tokens` over which the reward decreases linearly
    (DAPO's soft overlong punishment, arXiv 2503.14476). Only an episode's last turn counts. 0 turns
    it off."""

    overlong_penalty: float = bounded(1.0, least=0)
    """Penalty for a response of `rollout.max_new_tokens` tokens when `overlong_buffer` is set."""

    mask_truncated: bool = False
    """Do not train on responses that reached `rollout.max_new_tokens`. Their rewards still count in
    the advantages of their group."""

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates of a step."""
        return self.epochs * self.minibatches

    @property
    def policy_steps(self) -> int:
        """Number of steps in which the policy is trained; its learning-rate schedule spans them."""
        return self.steps

    @property
    def has_reference(self) -> bool:
        """True if training compares with the reference model."""
        return self.kl_coefficient > 0

    def check(self) -> None:
        if self.prompts_per_step % self.minibatches:
            raise ValueError(
                f"algorithm.minibatches={self.minibatches} must divide "
                f"algorithm.prompts_per_step={self.prompts_per_step}: a minibatch holds whole "
                "groups of responses; change one of them"
            )
        if self.dynamic_sampling and self.responses_per_prompt == 1:
            raise ValueError(
                f"algorithm.dynamic_sampling={self.dynamic_sampling} compares the responses to a "
                "prompt, but algorithm.responses_per_prompt=1: raise that, or set "
                "dynamic_sampling=0"
            )
        if self.overlong_buffer and self.mask_truncated:
            raise ValueError(
                f"algorithm.overlong_buffer={self.overlong_buffer} punishes what "
                "algorithm.mask_truncated=true leaves out of training: set one of them"
            )
        self._check_loss()
        self._check_kl()
        self._check_correction()

    def _check_loss(self) -> None:
        if self.policy_loss == "gspo" and self.loss_aggregation != "sequence_mean":
            raise ValueError(
                "algorithm.policy_loss=gspo is a mean over sequences, but "
                f"algorithm.loss_aggregation={self.loss_aggregation} is not: set "
                "algorithm.loss_aggregation=sequence_mean"
            )
        without_clip = {"cispo": "bounds weights", "sapo": "has a smooth gate"}
        if self.dual_clip is not None and self.policy_loss in without_clip:
            raise ValueError(
                f"algorithm.dual_clip={self.dual_clip} bounds a loss, but "
                f"algorithm.policy_loss={self.policy_loss} {without_clip[self.policy_loss]}: set "
                "algorithm.dual_clip=null"
            )
        if self.dual_clip is not None and self.dual_clip < 1 + self.clip_high:
            raise ValueError(
                f"algorithm.dual_clip={self.dual_clip} is below 1 + algorithm.clip_high="
                f"{1 + self.clip_high:g}, inside the range where nothing is clipped: raise it"
            )

    def _check_kl(self) -> None:
        in_loss = self.kl_in == "loss"
        if self.kl_coefficient and in_loss and self.kl_estimator == "k1":
            raise ValueError(
                "algorithm.kl_estimator=k1 has a gradient that is zero on average, so it does "
                "nothing with algorithm.kl_in=loss: choose k2, k3 or unbiased, or "
                "algorithm.kl_in=reward"
            )
        if not in_loss and self.kl_estimator == "unbiased":
            raise ValueError(
                "algorithm.kl_estimator=unbiased is about the gradient, but with "
                "algorithm.kl_in=reward there is none: choose k1, k2 or k3"
            )
        if self.kl_target is not None and not self.kl_coefficient:
            raise ValueError(
                f"algorithm.kl_target={self.kl_target} scales algorithm.kl_coefficient, but 0 "
                "stays 0: give it a value to start from, or set algorithm.kl_target=null"
            )

    def _check_correction(self) -> None:
        rejects = self.reject_below is not None or self.reject_above is not None
        if self.old_logprobs == "rollout" and (self.importance != "none" or rejects):
            key = "reject_below, reject_above" if self.importance == "none" else "importance"
            raise ValueError(
                f"algorithm.{key} compares the trainer's log-probs with the rollout's, but "
                "algorithm.old_logprobs=rollout computes none of the trainer's: set "
                "algorithm.importance=none and no bounds, or algorithm.old_logprobs=trainer"
            )
        if self.importance_floor is not None and self.importance == "none":
            raise ValueError(
                f"algorithm.importance_floor={self.importance_floor} has nothing to mask with "
                "algorithm.importance=none: set algorithm.importance=token or sequence, or remove "
                "it"
            )


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyOptimization):
    """Policy optimisation without a critic: GRPO (arXiv 2402.03300) and its relatives."""

    name: Literal["grpo"] = "grpo"
    """Algorithm: grpo, the default."""

    advantage_estimator: str = "grpo"
    """Advantage estimator: grpo (arXiv 2402.03300), rloo (arXiv 2402.14740), reinforce_plus_plus,
    reinforce_plus_plus_baseline (arXiv 2501.03262), or a function of your own as
    package.module:function, as megavlm/algorithms/advantages.py describes."""

    normalize_by_std: bool = True
    """Divide GRPO's advantages by the standard deviation of their group. False is Dr. GRPO (arXiv
    2503.20783)."""

    def check(self) -> None:
        super().check()
        estimator = self.advantage_estimator
        if not self.normalize_by_std and estimator != "grpo" and ":" not in estimator:
            raise ValueError(
                "algorithm.normalize_by_std=false is about algorithm.advantage_estimator=grpo, but "
                f"it is {estimator}: leave normalize_by_std out"
            )


@dataclass(frozen=True, kw_only=True)
class PPO(PolicyOptimization):
    """Policy optimisation with a critic and generalised advantage estimation (arXiv 1707.06347)."""

    name: Literal["ppo"] = "ppo"
    """Algorithm: ppo."""

    critic: Literal["separate", "shared"] = "separate"
    """Kind of critic: a separate model as large as the policy (separate), or a value head on the
    policy (shared), which needs no extra memory."""

    critic_lr: float = bounded(1e-5, above=0)
    """Learning rate of a separate critic, or of a shared critic's value head; the policy keeps
    `optimizer.lr`. A critic starts with an untrained head and needs a higher rate."""

    critic_warmup_steps: int = follows(0, least=0)
    """Number of steps at the start of the run that train only the critic. Null uses a twelfth of
    `algorithm.steps`, at most 5."""

    gamma: float = bounded(1.0, least=0, most=1)
    """Discount factor of rewards per token, or per turn with `gae_level` turn. 1 suits a reward at
    the end of an episode."""

    lam: float = bounded(0.95, least=0, most=1)
    """Lambda of generalised advantage estimation (arXiv 1506.02438): 0 trusts the critic, 1 the
    sampled rewards."""

    gae_level: Literal["token", "turn"] = "token"
    """Unit that generalised advantage estimation treats as one action: a token, or a whole turn."""

    value_coefficient: float = bounded(0.5, above=0)
    """Coefficient of a shared critic's loss when it is added to the policy loss."""

    value_clip: float | None = bounded(0.2, above=0)
    """Clip range of the critic's loss around the old value. Null does not clip."""

    @property
    def policy_steps(self) -> int:
        return self.steps - self.critic_warmup_steps

    def check(self) -> None:
        super().check()
        if self.critic_warmup_steps >= self.steps:
            raise ValueError(
                f"algorithm.critic_warmup_steps={self.critic_warmup_steps} is not below "
                f"algorithm.steps={self.steps}: the policy would never be trained; lower it"
            )


@dataclass(frozen=True, kw_only=True)
class DataTraining(Section):
    """Training on responses of the data. Nothing is sampled."""

    steps: int = bounded(300, least=1)
    """Steps of the run, each one optimizer update. The default is that of the demo's warm start."""

    batch_size: int = bounded(32, least=1)
    """Rows in a step."""

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates of a step."""
        return 1

    @property
    def policy_steps(self) -> int:
        """Number of steps in which the model is trained."""
        return self.steps

    @property
    def has_reference(self) -> bool:
        """True if training compares with the reference model."""
        return False


@dataclass(frozen=True, kw_only=True)
class SFT(DataTraining):
    """Supervised fine-tuning on the answers of the data."""

    name: Literal["sft"] = "sft"
    """Algorithm: sft."""


@dataclass(frozen=True, kw_only=True)
class DPO(DataTraining):
    """Direct preference optimisation (arXiv 2305.18290) on pairs of responses, of which one is
    preferred: `data.answer_key` over `data.rejected_key`.
    """

    name: Literal["dpo"] = "dpo"
    """Algorithm: dpo."""

    beta: float = bounded(0.1, above=0)
    """Strength of the tie to the reference model, which is the model that training started from. A
    smaller value lets the policy move further."""

    loss_type: Literal["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust"] = "sigmoid"
    """Loss of a pair, under TRL's names. sigmoid: DPO. sigmoid_norm: the same of log-probs per
    token (arXiv 2411.15124). hinge: SLiC (arXiv 2305.10425). ipo: squared distance of the margin
    per token from 1 / 2 `beta` (arXiv 2310.12036). robust: unbiased for labels of which
    `label_smoothing` are wrong (arXiv 2403.00409)."""

    label_smoothing: float = bounded(0.0, least=0, below=0.5)
    """Share of the pairs whose labels are taken to be wrong. With sigmoid it is conservative DPO
    (ericmitchell.ai/cdpo.pdf)."""

    reference_free: bool = False
    """Use the log-probs themselves instead of their ratios to a reference model, as if it gave all
    responses the same probability."""

    sft_coefficient: float = bounded(0.0, least=0)
    """Coefficient of the negative log-likelihood per token of the chosen response in the loss
    (arXiv 2404.19733). Without it both responses of a pair may become less likely, in favour of
    others that the data has no pair of."""

    @property
    def has_reference(self) -> bool:
        return not self.reference_free

    def check(self) -> None:
        if self.label_smoothing and self.loss_type in ("hinge", "ipo"):
            raise ValueError(
                f"algorithm.label_smoothing={self.label_smoothing} is for losses of type sigmoid, "
                f"sigmoid_norm and robust, but algorithm.loss_type={self.loss_type}: set one of "
                "them, or label_smoothing=0"
            )
        if self.loss_type == "robust" and not self.label_smoothing:
            raise ValueError(
                "algorithm.loss_type=robust with algorithm.label_smoothing=0 is sigmoid: set "
                "label_smoothing, or algorithm.loss_type=sigmoid"
            )


Algorithm = GRPO | PPO | SFT | DPO


def replays_routing(algorithm: Algorithm) -> bool:
    """Return True if the trainer's routers replay the experts that the servers have chosen."""
    return isinstance(algorithm, PolicyOptimization) and algorithm.routing_replay


ALGORITHMS: dict[str, type[Algorithm]] = {"grpo": GRPO, "ppo": PPO, "sft": SFT, "dpo": DPO}
