"""The configured rewards and curriculum."""

import asyncio
import tempfile
import weakref
from dataclasses import replace

from megavlm.config.schema import Config
from megavlm.environments.curriculum import Curriculum, Term
from megavlm.environments.registry import default_reward
from megavlm.rewards.judge import Judge, Part, Stage
from megavlm.training.corpus import with_corpus


def parts(config: Config) -> list[Part]:
    reward = config.reward
    if reward.parts:
        return [
            Part(label, part.name, part.weight, part.options)
            for label, part in reward.parts.items()
        ]
    name = reward.name or default_reward(config.environment.name)
    return [Part("reward", name, options=reward.options)]


def make_judge(config: Config) -> Judge:
    """Starts a reward process. Raises ValueError for a reward that cannot be had, and for a stage
    of the curriculum that asks for what it has not.
    """
    reward = config.reward
    # Reward processes read it whenever one starts: it stays as long as the judge.
    folder = tempfile.TemporaryDirectory(prefix="megavlm_rewards_")
    judge = Judge(
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
    )
    weakref.finalize(judge, folder.cleanup)
    try:
        for term in _terms(config):
            judge.check(term.stage)
    except ValueError:
        asyncio.run(judge.close())
        raise
    return judge


def make_curriculum(config: Config) -> Curriculum:
    return Curriculum(_terms(config), config.curriculum.window)


def _terms(config: Config) -> list[Term]:
    return [
        Term(Stage(stage.weights, stage.tolerance), stage.until, stage.reward)
        for stage in config.curriculum.stages
    ]
