"""The configured rewards and curriculum."""

from megavlm.config.schema import Config
from megavlm.environments.curriculum import Curriculum, Term
from megavlm.environments.registry import default_reward
from megavlm.rewards.judge import Judge, Part, Stage


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
    """Starts a reward process. Raises ValueError for a reward that cannot be had."""
    reward = config.reward
    return Judge(
        parts(config),
        on_failure=reward.on_failure,
        workers=reward.workers,
        timeout=reward.timeout,
        memory_mb=reward.memory_mb,
    )


def make_curriculum(config: Config) -> Curriculum:
    terms = [
        Term(Stage(stage.weights, stage.tolerance), stage.until, stage.reward)
        for stage in config.curriculum.stages
    ]
    return Curriculum(terms, config.curriculum.window)
