"""Rules of the sections `environment`, `reward` and `curriculum`."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise

from megavlm.config.environments import Stage
from megavlm.config.schema import Config, PolicyOptimization

_LABEL = re.compile(r"[A-Za-z_][\w-]*")


def check_environment(config: Config) -> None:
    _check_reward(config)
    _check_stages(config)
    environment, algorithm = config.environment, config.algorithm
    if environment.max_turns > 1 and isinstance(algorithm, PolicyOptimization):
        turns, new = environment.max_turns, config.rollout.max_new_tokens
        episode = turns * new + (turns - 1) * environment.max_observation_tokens
        longest = config.data.max_prompt_tokens + algorithm.responses_per_prompt * episode
        if longest > config.data.pack_tokens:
            raise ValueError(
                f"data.pack_tokens={config.data.pack_tokens} cannot hold a prompt and its episodes:"
                f" environment.max_turns={turns} responses of rollout.max_new_tokens={new} with "
                "observations of environment.max_observation_tokens="
                f"{environment.max_observation_tokens} between them make up to {longest} tokens; "
                "raise it or lower one of the others"
            )


def _check_reward(config: Config) -> None:
    reward = config.reward
    if reward.parts and (reward.name is not None or reward.options):
        key = "name" if reward.name is not None else "options"
        raise ValueError(
            f"reward.{key}={getattr(reward, key)} would not be used with reward.parts: "
            "make it one of the parts, or remove the parts"
        )
    for label, part in reward.parts.items():
        if not _LABEL.fullmatch(label):
            raise ValueError(f"reward.parts has the label {label!r}: use letters, digits, _ and -")
        if not part.name:
            raise ValueError(f"reward.parts.{label} has no name: say which reward it is")
        if not math.isfinite(part.weight):
            raise ValueError(f"reward.parts.{label}.weight={part.weight} must be a finite number")


def _check_stages(config: Config) -> None:
    stages, parts = config.curriculum.stages, config.reward.parts
    for number, stage in enumerate(stages):
        key = f"curriculum.stages[{number}]"
        last = number == len(stages) - 1
        if last != (stage.until is None and stage.reward is None):
            raise ValueError(
                f"{key} {'ends, but it is the last' if last else 'never ends'}: every stage but "
                "the last needs until or reward, and the last has neither"
            )
        if stage.reward is not None and not math.isfinite(stage.reward):
            raise ValueError(f"{key}.reward={stage.reward} must be a finite number")
        if stage.tolerance is not None and not 0 < stage.tolerance < math.inf:
            raise ValueError(f"{key}.tolerance={stage.tolerance} must be above 0")
        if not all(0 <= weight < math.inf for weight in stage.weights.values()):
            raise ValueError(f"{key}.weights={stage.weights} must be numbers of at least 0")
        if parts and (unknown := sorted(set(stage.weights) - set(parts))):
            raise ValueError(
                f"{key}.weights names {unknown[0]!r}, which reward.parts does not: it has "
                f"{', '.join(parts)}"
            )
    _check_order(stages)


def _check_order(stages: Sequence[Stage]) -> None:
    ends = [stage.until for stage in stages if stage.until is not None]
    if any(later <= earlier for earlier, later in pairwise(ends)) or (ends and ends[0] <= 0):
        raise ValueError(f"curriculum.stages end at {ends}: each must end after the one before")
