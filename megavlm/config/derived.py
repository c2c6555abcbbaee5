"""Defaults that follow from other keys: a key (`follows`) that is null in a recipe gets its value
here, when the recipe is loaded. What a recipe sets is kept, and refused if it breaks a rule.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.schema import Config

LEAST_PACK_TOKENS = 4096


def derive(config: Config, following: Collection[str]) -> Config:
    """Return the configuration with the values of the keys `following`, each section.key."""
    for name, value in _RULES.items():
        if name in following:
            section, _, key = name.partition(".")
            changed = replace(getattr(config, section), **{key: value(config)})
            config = replace(config, **{section: changed})
    return config


def longest_tree(config: Config) -> int:
    """Return the most tokens of a prompt with all of its episodes, for policy optimisation."""
    algorithm, environment = config.algorithm, config.environment
    assert isinstance(algorithm, PolicyOptimization)
    turns = environment.max_turns
    episode = turns * config.rollout.max_new_tokens
    episode += (turns - 1) * environment.max_observation_tokens
    return config.data.max_prompt_tokens + algorithm.responses_per_prompt * episode


def _pack_tokens(config: Config) -> int:
    if isinstance(config.algorithm, PolicyOptimization):
        return max(longest_tree(config), LEAST_PACK_TOKENS)
    return max(2 * config.data.max_prompt_tokens, LEAST_PACK_TOKENS)


# In this order: a critic's warmup leaves the policy fewer steps.
_RULES: dict[str, Callable[[Config], int]] = {
    "algorithm.critic_warmup_steps": lambda config: min(config.algorithm.steps // 12, 5),
    "optimizer.warmup_steps": lambda config: min(config.algorithm.policy_steps // 8, 20),
    "data.pack_tokens": _pack_tokens,
}
