"""The rewards of a run, from the recipe or by the default of its environment."""

import asyncio
import weakref
from contextlib import ExitStack
from dataclasses import replace

from megavlm.config.schema import Config
from megavlm.environments.registry import default_reward
from megavlm.rewards.manager import Part, RewardManager
from megavlm.tasks.caption.corpus import with_corpus
from megavlm.temporary import temporary_folder


def reward_parts(config: Config) -> list[Part]:
    """Return the rewards that the recipe names, or else the default reward of its environment."""
    reward = config.reward
    if reward.parts:
        return [
            Part(label, part.name, part.weight, part.options)
            for label, part in reward.parts.items()
        ]
    name = reward.name or default_reward(config.environment.name)
    return [Part("reward", name, options=reward.options)]


def make_reward_manager(config: Config) -> RewardManager:
    """Start the rewards. Raises ValueError if a reward cannot be loaded, or if no reward takes the
    tolerance or weights of a curriculum stage.
    """
    # A reward process reads the corpus whenever it starts, so the folder is kept as long as the
    # manager.
    resources = ExitStack()
    folder = str(resources.enter_context(temporary_folder("megavlm_rewards_")))
    parts = [
        replace(part, options=with_corpus(part.options, folder)) if part.name == "caption" else part
        for part in reward_parts(config)
    ]
    reward_manager = RewardManager(parts, config.reward, resources)
    weakref.finalize(reward_manager, resources.close)
    try:
        for stage in config.curriculum.stages:
            reward_manager.check(stage)
    except ValueError:
        asyncio.run(reward_manager.close())
        raise
    return reward_manager
