"""Rewards, environments and curriculum of a configuration."""

import asyncio
import tempfile
import weakref
from dataclasses import replace

from megavlm.config.environment import EnvironmentConfig
from megavlm.config.schema import Config
from megavlm.data.caption_corpus import with_corpus
from megavlm.environments.curriculum import Curriculum, Term
from megavlm.environments.registry import BUILT_IN_ENVIRONMENTS, default_reward
from megavlm.environments.remote import EnvironmentPool, Local
from megavlm.rewards.manager import Part, RewardManager, Stage


def parts(config: Config) -> list[Part]:
    reward = config.reward
    if reward.parts:
        return [
            Part(label, part.name, part.weight, part.options)
            for label, part in reward.parts.items()
        ]
    name = reward.name or default_reward(config.environment.name)
    return [Part("reward", name, options=reward.options)]


def make_reward_manager(config: Config) -> RewardManager:
    """Start the rewards. Raises ValueError for a reward that cannot be loaded, and for a curriculum
    stage whose tolerance or weights no reward takes.
    """
    reward = config.reward
    # Reward processes read it whenever one starts: it stays as long as the reward manager.
    folder = tempfile.TemporaryDirectory(prefix="megavlm_rewards_")
    reward_manager = RewardManager(
        [
            replace(part, options=with_corpus(part.options, folder.name))
            if part.name == "caption"
            else part
            for part in parts(config)
        ],
        on_failure=reward.on_failure,
        workers=reward.workers,
        timeout=reward.timeout,
        memory_mb=reward.memory_mb,
        failure_value=reward.failure_value,
    )
    weakref.finalize(reward_manager, folder.cleanup)
    try:
        for term in _terms(config):
            reward_manager.check(term.stage)
    except ValueError:
        asyncio.run(reward_manager.close())
        raise
    return reward_manager


def environments(settings: EnvironmentConfig) -> Local | EnvironmentPool:
    """Load the environment. A user's class runs in processes, the first of which starts here.

    Raises ValueError if it cannot be loaded or does not take the options.
    """
    if settings.name in BUILT_IN_ENVIRONMENTS:
        return Local(settings.name, settings.options, timeout=settings.timeout)
    return EnvironmentPool(
        settings.name,
        settings.options,
        workers=settings.workers,
        timeout=settings.timeout,
        memory_mb=settings.memory_mb,
    )


def make_curriculum(config: Config) -> Curriculum:
    return Curriculum(_terms(config), config.curriculum.window)


def _terms(config: Config) -> list[Term]:
    return [
        Term(Stage(stage.weights, stage.tolerance), stage.until, stage.reward)
        for stage in config.curriculum.stages
    ]
