"""Rules of the `algorithm` section, each one sentence: key, value, rule and way out."""

from megavlm.config.algorithms import GRPO, PPO, SFT, PolicyOptimization
from megavlm.config.schema import Config


def check_algorithm(config: Config) -> None:
    algorithm = config.algorithm
    if isinstance(algorithm, SFT):
        return _check_sft(config, algorithm)
    _check_rollouts(config, algorithm)
    _check_loss(algorithm)
    _check_kl(algorithm)
    _check_correction(algorithm)
    if isinstance(algorithm, PPO):
        return _check_ppo(algorithm)
    return _check_grpo(algorithm)


def _check_rollouts(config: Config, algorithm: PolicyOptimization) -> None:
    prompts, minibatches = algorithm.prompts_per_step, algorithm.minibatches
    if prompts % minibatches:
        raise ValueError(
            f"algorithm.minibatches={minibatches} must divide algorithm.prompts_per_step={prompts}:"
            " a minibatch holds whole groups of responses; change one of them"
        )
    ranks = config.parallel.data or 1
    if prompts // minibatches < ranks:
        raise ValueError(
            f"algorithm.prompts_per_step={prompts} over algorithm.minibatches={minibatches} leaves "
            f"fewer prompts than parallel.data={ranks} ranks: raise the first or lower another"
        )
    responses, new = algorithm.responses_per_prompt, config.rollout.max_new_tokens
    longest = config.data.max_prompt_tokens + responses * new
    if longest > config.data.pack_tokens:
        raise ValueError(
            f"data.pack_tokens={config.data.pack_tokens} cannot hold a prompt and its responses: "
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + {responses} x "
            f"rollout.max_new_tokens={new} is {longest}; raise it or lower one of the others"
        )
    if config.rollout.top_p != 1:
        raise ValueError(
            f"rollout.top_p={config.rollout.top_p} cuts the distribution that the trainer scores "
            "whole, so its log-probs would not be the sampler's: set rollout.top_p=1.0 for "
            f"{algorithm.name}"
        )
    if algorithm.dynamic_sampling and responses == 1:
        raise ValueError(
            f"algorithm.dynamic_sampling={algorithm.dynamic_sampling} compares the responses to a "
            "prompt, and algorithm.responses_per_prompt=1: raise that, or set dynamic_sampling=0"
        )
    if algorithm.overlong_buffer > new:
        raise ValueError(
            f"algorithm.overlong_buffer={algorithm.overlong_buffer} is above "
            f"rollout.max_new_tokens={new}, of which it is a part: lower it"
        )
    if algorithm.overlong_buffer and algorithm.mask_truncated:
        raise ValueError(
            f"algorithm.overlong_buffer={algorithm.overlong_buffer} punishes what "
            "algorithm.mask_truncated=true leaves out of training: set one of them"
        )


def _check_loss(algorithm: PolicyOptimization) -> None:
    loss = algorithm.policy_loss
    if loss == "gspo" and algorithm.loss_aggregation != "sequence_mean":
        raise ValueError(
            "algorithm.policy_loss=gspo is a mean over sequences, and algorithm.loss_aggregation="
            f"{algorithm.loss_aggregation} is not: set algorithm.loss_aggregation=sequence_mean"
        )
    if loss == "cispo" and algorithm.dual_clip is not None:
        raise ValueError(
            f"algorithm.dual_clip={algorithm.dual_clip} bounds a loss, and "
            "algorithm.policy_loss=cispo bounds weights: set algorithm.dual_clip=null"
        )
    if algorithm.dual_clip is not None and algorithm.dual_clip < 1 + algorithm.clip_high:
        raise ValueError(
            f"algorithm.dual_clip={algorithm.dual_clip} is below 1 + algorithm.clip_high="
            f"{1 + algorithm.clip_high:g}, inside the range where nothing is clipped: raise it"
        )


def _check_kl(algorithm: PolicyOptimization) -> None:
    in_loss = algorithm.kl_in == "loss"
    if algorithm.kl_coefficient and in_loss and algorithm.kl_estimator == "k1":
        raise ValueError(
            "algorithm.kl_estimator=k1 has a gradient that is zero on average, so it does nothing "
            "with algorithm.kl_in=loss: choose k2, k3 or unbiased, or algorithm.kl_in=reward"
        )
    if not in_loss and algorithm.kl_estimator == "unbiased":
        raise ValueError(
            "algorithm.kl_estimator=unbiased is about the gradient, and with algorithm.kl_in=reward"
            " there is none: choose k1, k2 or k3"
        )
    if algorithm.kl_target is not None and not algorithm.kl_coefficient:
        raise ValueError(
            f"algorithm.kl_target={algorithm.kl_target} scales algorithm.kl_coefficient, and 0 "
            "stays 0: give it a value to start from, or set algorithm.kl_target=null"
        )


def _check_correction(algorithm: PolicyOptimization) -> None:
    rejects = algorithm.reject_below is not None or algorithm.reject_above is not None
    if algorithm.old_logprobs == "rollout" and (algorithm.importance != "none" or rejects):
        key = "reject_below, reject_above" if algorithm.importance == "none" else "importance"
        raise ValueError(
            f"algorithm.{key} compares the trainer's log-probs with the rollout's, and "
            "algorithm.old_logprobs=rollout computes none of the trainer's: set "
            "algorithm.importance=none and no bounds, or algorithm.old_logprobs=trainer"
        )
    if algorithm.importance_mode == "mask" and algorithm.importance == "none":
        raise ValueError(
            "algorithm.importance_mode=mask has nothing to mask with algorithm.importance=none: "
            "set algorithm.importance=token or sequence, or algorithm.importance_mode=truncate"
        )
    if algorithm.importance_floor and algorithm.importance_mode != "mask":
        raise ValueError(
            f"algorithm.importance_floor={algorithm.importance_floor} is a bound of masks: "
            "set algorithm.importance_mode=mask, or algorithm.importance_floor=0"
        )


def _check_grpo(algorithm: GRPO) -> None:
    estimator = algorithm.advantage_estimator
    if algorithm.responses_per_prompt == 1 and estimator != "reinforce_plus_plus":
        raise ValueError(
            "algorithm.responses_per_prompt=1 leaves nothing to compare a response with under "
            f"algorithm.advantage_estimator={estimator}: raise it, or use reinforce_plus_plus"
        )
    if not algorithm.normalize_by_std and estimator != "grpo":
        raise ValueError(
            "algorithm.normalize_by_std=false is about algorithm.advantage_estimator=grpo, and it "
            f"is {estimator}: leave normalize_by_std out"
        )


def _check_ppo(algorithm: PPO) -> None:
    if algorithm.critic_warmup_steps >= algorithm.steps:
        raise ValueError(
            f"algorithm.critic_warmup_steps={algorithm.critic_warmup_steps} is not below "
            f"algorithm.steps={algorithm.steps}: the policy would never be trained; lower it"
        )


def _check_sft(config: Config, algorithm: SFT) -> None:
    ranks = config.parallel.data or 1
    if algorithm.batch_size < ranks:
        raise ValueError(
            f"algorithm.batch_size={algorithm.batch_size} is less than a row for each of "
            f"parallel.data={ranks} ranks: raise it or lower the other"
        )
