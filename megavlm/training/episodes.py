"""Episodes: the policy and its environments in turns, until all are done.

Tokens in, tokens out: what a turn's request holds is the tokens of the turns before it, responses
as the servers sent them, and only an observation is tokenised.
"""

import asyncio
import math
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from megavlm.config.schema import Config
from megavlm.data.chat import IMAGE_PLACEHOLDER, Message
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.environments import registry
from megavlm.environments.base import Context, Environment, Observation, Step, scored
from megavlm.rewards.base import Example, RewardFailure, RewardStop, Score
from megavlm.rewards.judge import Judge, Stage
from megavlm.rollout.messages import Response
from megavlm.training.turns import Episode, Turn

T = TypeVar("T")
Generate = Callable[[Sequence[Prompt], int], list[list[Response]]]  # prompts, responses to each
Phase = Callable[[str], AbstractContextManager[Any]]


class Arena:
    """Plays episodes in the environment that a recipe names, and keeps its rewards' processes."""

    def __init__(self, config: Config, processor: Processor, judge: Judge) -> None:
        """Raises ValueError for an environment that cannot be had."""
        self._settings, self._seed = config.environment, config.run.seed
        self._processor, self.judge = processor, judge
        self._system_prompt = config.data.system_prompt
        self._class = registry.load(self._settings.name, self._settings.options)
        self._runner = asyncio.Runner()

    def play(
        self,
        prompts: Sequence[Prompt],
        n: int,
        generate: Generate,
        *,
        stage: Stage | None = None,
        number: int = 0,
        phase: Phase | None = None,
    ) -> list[list[Episode]]:
        """n episodes from each prompt, or from what the environment makes of its row, but not from
        those to which `generate` gives no first responses. `number`: of the step, for the
        environments' seeds. `phase` times rollout and rewards.

        Raises ValueError for an environment that breaks its interface, RewardStop, and what
        `generate` raises.
        """
        timed = phase or (lambda _: nullcontext())
        with timed("reward"):
            groups = self._runner.run(self._begin(prompts, n, stage, number))
        # The group's first turn is one prompt with n responses; later ones are each their own.
        with timed("rollout"):
            answers = generate([group[0].prompt for group in groups], n)
        begun = [group for group, answer in zip(groups, answers, strict=True) if answer]
        waiting = [live for group in begun for live in group]
        responses = [response for answer in answers for response in answer]
        while waiting:
            with timed("reward"):
                self._runner.run(self._step(waiting, responses))
            waiting = [live for live in waiting if not live.ended]
            if waiting:
                with timed("rollout"):
                    answers = generate([live.prompt for live in waiting], 1)
                responses = [response for (response,) in answers]
        return [[live.episode() for live in group] for group in begun]

    def close(self) -> None:
        self._runner.run(self.judge.close())
        self._runner.close()

    async def _begin(
        self, prompts: Sequence[Prompt], n: int, stage: Stage | None, number: int
    ) -> list[list["_Live"]]:
        return await asyncio.gather(
            *(
                self._group(prompt, n, stage, seed_of(self._seed, number, prompt.row))
                for prompt in prompts
            )
        )

    async def _group(self, prompt: Prompt, n: int, stage: Stage | None, seed: int) -> list["_Live"]:
        row = example(prompt.row, self._system_prompt)
        group, seen = [], []
        for _ in range(n):
            live = _Live(prompt, self._settings.timeout)
            context = Context(partial(live.score, self.judge, stage), self._settings.max_turns)
            live.environment = registry.make(self._class, context, self._settings.options)
            observation = await live.bounded(live.environment.reset(row, seed))
            seen.append(self._next_row(prompt.row, observation))
            group.append(live)
        if any(other != seen[0] for other in seen):
            raise ValueError(
                f"environment.name={self._settings.name}: its reset gave different observations "
                "for one row and seed; a group of episodes starts from one prompt"
            )
        if seen[0] != self._next_row(prompt.row, Observation(row.messages, row.images)):
            start = replace(self._processor.prompt(seen[0]), row=prompt.row)
            for live in group:
                live.prompt = start
        return group

    async def _step(self, waiting: Sequence["_Live"], responses: Sequence[Response]) -> None:
        pairs = zip(waiting, responses, strict=True)
        await asyncio.gather(*(self._turn(live, response) for live, response in pairs))

    async def _turn(self, live: "_Live", response: Response) -> None:
        text = self._processor.decode(response.token_ids)
        try:
            step = await live.bounded(live.environment.step(text))
            if not math.isfinite(step.reward):
                raise RewardFailure("value", f"a step's reward is {step.reward}")
        except RewardStop:
            raise
        except RewardFailure as failure:
            step = scored(self.judge.failed(failure))
        except TimeoutError:
            step = scored(self.judge.failed(RewardFailure("timeout", "a step of the environment")))
        # An environment is the user's, and its episode is one of many: it may raise anything.
        except Exception as error:
            step = scored(self.judge.failed(RewardFailure("exception", repr(error)[:500])))
        live.turns.append(Turn(live.prompt, response, text, float(step.reward)))
        live.info = step.info
        live.ended = step.done or not self._goes_on(live, response)
        if not live.ended:
            live.prompt = self._next_prompt(live.prompt, response, step)

    def _goes_on(self, live: "_Live", response: Response) -> bool:
        """Not after a response that was cut short, or that holds a picture's token."""
        ids = response.token_ids
        whole = bool(ids) and ids[-1] == self._processor.eos_id
        vision = set(ids) & set(self._processor.vision_token_ids)
        return whole and not vision and len(live.turns) < self._settings.max_turns

    def _next_prompt(self, prompt: Prompt, response: Response, step: Step) -> Prompt:
        if step.observation is None:
            raise ValueError(
                f"environment.name={self._settings.name}: a step that is not done has no "
                "observation"
            )
        row = self._next_row(prompt.row, step.observation)
        following = self._processor.next_turn(prompt, response.token_ids, row)
        added = len(following.token_ids) - len(prompt.token_ids) - len(response.token_ids)
        if added > self._settings.max_observation_tokens:
            raise ValueError(
                f"environment.name={self._settings.name}: an observation has {added} tokens, more "
                f"than environment.max_observation_tokens={self._settings.max_observation_tokens}: "
                "raise it, or show less"
            )
        return replace(following, row=prompt.row)

    def _next_row(self, base: Row, observation: Observation) -> Row:
        messages = tuple(Message(m["role"], m["content"]) for m in observation.messages)
        images = tuple(observation.images)
        marks = sum(message.text.count(IMAGE_PLACEHOLDER) for message in messages)
        asked = [message.text for message in messages if message.role == "user"]
        if not asked or marks not in (0, len(images)):
            problem = f"{marks} <image> for {len(images)} pictures" if asked else "no user message"
            raise ValueError(
                f"environment.name={self._settings.name}: an observation has {problem}; give it a "
                "message by the user, and an <image> for each picture or none"
            )
        alone = len(messages) == 1
        return replace(base, problem=asked[-1], images=images, messages=() if alone else messages)


class _Live:
    """An episode that is being played."""

    environment: Environment

    def __init__(self, prompt: Prompt, timeout: float) -> None:
        self.prompt, self._timeout = prompt, timeout
        self.turns: list[Turn] = []
        self.info: Mapping[str, Any] = {}
        self.ended = False
        self._clock: asyncio.Timeout | None = None

    async def bounded(self, waiting: Awaitable[T]) -> T:
        async with asyncio.timeout(self._timeout) as self._clock:
            return await waiting

    async def score(self, judge: Judge, stage: Stage | None, text: str, row: Example) -> Score:
        """Waiting for a reward process is no time of the environment's."""
        loop, clock = asyncio.get_running_loop(), self._clock
        assert clock is not None
        left = (clock.when() or loop.time()) - loop.time()
        clock.reschedule(None)
        found = await judge.score(text, row, stage)
        clock.reschedule(loop.time() + left)
        return found

    def episode(self) -> Episode:
        total = sum(turn.reward for turn in self.turns)
        score = self.info.get("score")
        if score is None:
            parts = {str(k): float(v) for k, v in self.info.get("parts", {}).items()}
            score = Score(total, bool(self.info.get("correct", total >= 1)), parts)
        return Episode(tuple(self.turns), replace(score, reward=total))


def example(row: Row, system_prompt: str | None = None) -> Example:
    """`system_prompt`: that of a row which has none of its own."""
    messages = row.messages or (Message("user", row.problem),)
    if system_prompt is not None and messages[0].role != "system":
        messages = (Message("system", system_prompt), *messages)
    chat = tuple({"role": m.role, "content": m.text} for m in messages)
    return Example(row.problem, row.answer, row.category, row.images, row.extra, chat)


def seed_of(seed: int, number: int, row: Row) -> int:
    return zlib.crc32(f"{seed}/{number}/{row.index}".encode())
