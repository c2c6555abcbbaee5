"""The rewards of a run, from the recipe or by the default of its environment."""

import asyncio
import weakref
from contextlib import ExitStack
from dataclasses import replace

from megavlm.config.schema import Config
from megavlm.environments.registry import find_environment
from megavlm.rewards import registry
from megavlm.rewards.manager import Part, RewardManager
from megavlm.task import Task
from megavlm.temporary import temporary_folder


def reward_parts(config: Config) -> list[Part]:
    """Return the rewards that the recipe names, or else the default reward of its environment."""
    reward = config.reward
    if reward.parts:
        return [
            Part(label, part.name, part.weight, part.options, f"reward.parts.{label}.options")
            for label, part in reward.parts.items()
        ]
    name = reward.name or find_environment(config.environment.name).reward
    return [Part("reward", name, options=reward.options)]


def used_tasks(config: Config) -> list[Task]:
    """Return the tasks that the environment and the rewards of a recipe belong to."""
    names = [find_environment(config.environment.name).task]
    names += [part.name for part in reward_parts(config)]
    return [task for name in dict.fromkeys(names) if name and (task := registry.reward_task(name))]


def make_reward_manager(config: Config) -> RewardManager:
    """Start the rewards. Raises ValueError if a reward cannot be loaded, or if no reward takes the
    tolerance or weights of a curriculum stage.
    """
    # A reward process reads the files of its options whenever it starts, so the folder is kept as
    # long as the manager.
    resources = ExitStack()
    folder = str(resources.enter_context(temporary_folder("megavlm_rewards_")))
    parts = []
    for part in reward_parts(config):
        with registry.naming(part.key):
            options = registry.prepare_options(part.name, part.options, folder)
        parts.append(replace(part, options=options))
    reward_manager = RewardManager(parts, config.reward, resources)
    weakref.finalize(reward_manager, resources.close)
    try:
        for stage in config.curriculum.stages:
            reward_manager.check(stage)
    except ValueError:
        asyncio.run(reward_manager.close())
        raise
    return reward_manager
