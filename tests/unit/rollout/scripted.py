"""A policy that says what its script says, and episodes played with it."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from megavlm.config.environment import EnvironmentConfig
from megavlm.config.reward import Reward
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.inference.protocol import Response, Scored
from megavlm.rewards.base import Example, Score
from megavlm.rewards.manager import RewardManager
from megavlm.rollout.episodes import EpisodeRunner
from megavlm.rollout.teachers import Teachers
from megavlm.rollout.trajectory import Episode, Group
from megavlm.subprocess_pool.failure import CallFailure
from tests.conftest import png
from tests.support.responses import make_response

ROW = Row(5, "<image>How many?", "3", (png(),), "counting", "rows:5")


RUNNER = asyncio.Runner()  # of all episodes of the tests, which are played one after the other


class Policy:
    """Says what its script says next; keeps what it was asked."""

    def __init__(self, processor: Processor, *texts: str, cut: bool = False) -> None:
        self.processor, self.texts, self.cut = processor, list(texts), cut
        self.asked: list[tuple[list[Prompt], int]] = []

    async def __call__(
        self,
        prompts: Sequence[Prompt],
        n: int,
        groups: Sequence[list[Response]],
        on_complete: Any,
        scored: Scored | None = None,
        agents: int = 0,
    ) -> None:
        if scored:  # the log-prob of each token is the negative length of the prompt
            logprob = -np.float32(len(prompts[0].short_ids))
            groups[0][:] = [
                replace(r, teacher_logprobs=np.full(len(r.token_ids), logprob))
                for r in scored.responses
            ]
            return
        self.asked.append((list(prompts), n))
        for group in groups:
            group[:] = [self.respond() for _ in range(n)]
        await self.on_complete(groups, on_complete)

    async def on_complete(self, answers: Sequence[list[Response]], on_complete: Any) -> None:
        """Play on from complete answers; the others are empty."""
        indices = [index for index, answer in enumerate(answers) if answer]
        await asyncio.gather(*(on_complete(index, answers[index], self.ask) for index in indices))

    async def ask(self, prompt: Prompt, **_: Any) -> Response:
        self.asked.append(([prompt], 1))
        return self.respond()

    def respond(self) -> Response:
        ids = self.processor.encode_answer(self.texts.pop(0))
        ids = ids[:-1] if self.cut else ids
        return make_response(tuple(ids), tuple(-0.1 * i for i in range(len(ids))), "stop", "0")


def episode_runner(
    processor: Processor,
    manager: RewardManager,
    name: str,
    long_prompts: str = "refuse",
    max_new_tokens: int = 32,
    teachers: Teachers | None = None,
    **settings: Any,
) -> EpisodeRunner:
    config: Any = SimpleNamespace(
        environment=EnvironmentConfig(name=name, **settings),
        rollout=SimpleNamespace(max_new_tokens=max_new_tokens),
        run=SimpleNamespace(seed=1),
        data=SimpleNamespace(
            system_prompt=processor.chat_template.system_prompt, long_prompts=long_prompts
        ),
    )
    return EpisodeRunner(config, processor, manager, RUNNER, teachers)


def play(
    processor: Processor,
    manager: RewardManager,
    policy: Policy,
    name: str,
    n: int = 2,
    row: Row = ROW,
    **settings: Any,
) -> list[Episode]:
    playing = episode_runner(processor, manager, name, **settings)
    group = Group(processor.prompt(row))
    try:
        RUNNER.run(playing.play(RUNNER.run(playing.start([group], n)), policy))
    finally:
        RUNNER.run(playing._environments.close())  # the reward manager is the tests' own
    return group.episodes


def graded(wrong: float = 0.0) -> RewardManager:
    class Graded(RewardManager):
        async def score(self, response: str, example: Example, *_: Any, **__: Any) -> Any:
            return Score(1.0 if response == "3" else wrong, response == "3")

    return Graded([], Reward(on_failure="zero", workers=1, timeout=1, memory_mb=1024))


def fails(policy: Any) -> RewardManager:
    """A judge whose reward fails for long responses."""

    class Short(RewardManager):
        async def score(self, response: str, example: Example, *_: Any, **__: Any) -> Any:
            if len(response) > 5:
                return self.failed(CallFailure("timeout", "as told"))
            return Score(1.0 if response == "3" else 0.5, response == "3")

    return Short([], Reward(on_failure=policy, workers=1, timeout=1, memory_mb=1024))
