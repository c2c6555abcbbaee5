"""Rewards of a run: those of the recipe or of its environment, ready for its curriculum."""

import asyncio
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from megavlm.config.schema import Config
from megavlm.data.caption_corpus import with_corpus
from megavlm.environments.registry import default_reward
from megavlm.rewards.manager import Part, RewardManager

PREFIX = "megavlm_rewards_"  # of folders in the temporary directory
LEFT_FOR = 3600.0  # seconds


def reward_parts(config: Config) -> list[Part]:
    """Return the rewards that the recipe names, or the one of its environment."""
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
    remove_leftovers()
    # Reward processes read the corpus whenever one starts: it stays as long as the manager.
    resources = ExitStack()
    folder = resources.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX))
    lock = os.open(folder, os.O_RDONLY)
    resources.callback(os.close, lock)
    fcntl.flock(lock, fcntl.LOCK_SH)
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


def remove_leftovers() -> None:
    """Remove this user's folders of rewards whose process was killed, which lost its lock then.
    Those of the last hour stay: a process may be about to lock them.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is in use, or somebody else has removed it
            stat = folder.lstat()
            if stat.st_uid != os.getuid() or time.time() - stat.st_ctime < LEFT_FOR:
                continue
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)
