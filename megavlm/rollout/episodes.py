"""Episodes: the policy and its environments in turns, until all are done.

Tokens in, tokens out: what a turn's request holds is the tokens of the turns before it, responses
as the servers sent them, and only an observation is tokenised.
"""

import asyncio
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from megavlm.config.schema import Config
from megavlm.data.chat import IMAGE_PLACEHOLDER, Message
from megavlm.data.loader import Kind
from megavlm.data.processor import Processor, Prompt, PromptTooLong
from megavlm.data.rows import Row
from megavlm.environments.base import Context, Observation, Step
from megavlm.inference.protocol import Response
from megavlm.rewards.base import Example, RewardFailure, RewardStop
from megavlm.rewards.manager import RewardManager, Stage
from megavlm.rollout.active_episode import ActiveEpisode, checked
from megavlm.rollout.scoring import environments
from megavlm.rollout.trajectory import Episode, Turn

MAX_IN_VAIN = 1000  # prompts in a row that cannot start

T = TypeVar("T")
Start = list["ActiveEpisode"]  # n episodes that start from one prompt
Generate = Callable[[Sequence[Prompt], int], list[list[Response]]]  # prompts, responses to each
Phase = Callable[[str], AbstractContextManager[Any]]


class EpisodeRunner:
    """Plays episodes in the environment that a recipe names, and keeps its rewards' processes."""

    def __init__(self, config: Config, processor: Processor, reward_manager: RewardManager) -> None:
        """Raises ValueError for an environment that cannot be had."""
        self._settings, self._seed = config.environment, config.run.seed
        self._processor, self.reward_manager = processor, reward_manager
        self._system_prompt = config.data.system_prompt
        self._long_prompts = config.data.long_prompts
        self._environments = environments(config.environment)
        self._runner = asyncio.Runner()
        self.skipped: Counter[Kind] = Counter()  # prompts that could not start

    def play(
        self, prompts: Sequence[Prompt], n: int, generate: Generate, **how: Any
    ) -> list[list[Episode]]:
        """n episodes from each prompt, empty where they cannot start; `how`: see begin and go_on.

        Raises what they raise.
        """
        phase = how.pop("phase", None)
        groups = self.begin(prompts, n, **how)
        played = iter(self.go_on([group for group in groups if group], generate, phase=phase))
        return [next(played) if group else [] for group in groups]

    def begin(
        self,
        prompts: Sequence[Prompt],
        n: int,
        *,
        draw: Callable[[int], list[Prompt]] | None = None,
        stage: Stage | None = None,
        number: int = 0,
    ) -> list[Start]:
        """n episodes that start from each prompt, or from what the environment makes of its row.
        One that cannot start is counted, and an empty list; or, with `draw`, it is left out, and
        others are drawn for it. `number`: of the step, for the environments' seeds.

        Raises ValueError for an environment that breaks its interface, or makes prompts longer than
        the recipe has them, and RewardStop.
        """
        groups = self._runner.run(self._begin(prompts, n, stage, number))
        if draw is None:
            return groups
        started, in_vain = [group for group in groups if group], 0
        while len(started) < len(prompts):
            drawn = draw(len(prompts) - len(started))
            found = [group for group in self.begin(drawn, n, stage=stage, number=number) if group]
            in_vain = 0 if found else in_vain + len(drawn)
            if in_vain >= MAX_IN_VAIN:
                raise ValueError(
                    f"environment.name={self._settings.name}: none of {in_vain} prompts in a row "
                    f"can start; the last reason: {self._reason}"
                )
            started += found
        return started

    def check_start(self, prompt: Prompt) -> None:
        """Raises PromptTooLong or another ValueError where no episode can start from the prompt."""
        counted = self.skipped.copy()
        if not self.begin([prompt], 1)[0]:
            too_long = self.skipped["long"] > counted["long"]
            self.skipped = counted
            raise (PromptTooLong if too_long else ValueError)(self._reason)

    def go_on(
        self, groups: Sequence[Start], generate: Generate, *, phase: Phase | None = None
    ) -> list[list[Episode]]:
        """The episodes of each group, none of those to which `generate` gives no first responses.
        `phase` times rollout and rewards.

        Raises ValueError for an environment that breaks its interface, RewardStop, and what
        `generate` raises.
        """
        if not groups:
            return []
        timed = phase or (lambda _: nullcontext())
        # The group's first turn is one prompt with n responses; later ones are each their own.
        with timed("rollout"):
            answers = generate([group[0].prompt for group in groups], len(groups[0]))
        waiting = [
            active
            for group, answer in zip(groups, answers, strict=True)
            if answer
            for active in group
        ]
        responses = [response for answer in answers for response in answer]
        while waiting:
            with timed("reward"):
                self._runner.run(self._step(waiting, responses))
            waiting = [active for active in waiting if not active.ended]
            if waiting:
                with timed("rollout"):
                    answers = generate([active.prompt for active in waiting], 1)
                responses = [response for (response,) in answers]
        return [[active.episode() for active in group if active.turns] for group in groups]

    def close(self) -> None:
        self._environments.close()
        self._runner.run(self.reward_manager.close())
        self._runner.close()

    async def _begin(
        self, prompts: Sequence[Prompt], n: int, stage: Stage | None, number: int
    ) -> list[Start]:
        return await asyncio.gather(
            *(
                self._group(prompt, n, stage, seed_of(self._seed, number, prompt.row))
                for prompt in prompts
            )
        )

    async def _group(self, prompt: Prompt, n: int, stage: Stage | None, seed: int) -> Start:
        row = example(prompt.row, self._system_prompt)
        group = [self._active(prompt, row, stage) for _ in range(n)]
        try:
            shown = [
                await self._answer(active, active.environment.reset(row, seed)) for active in group
            ]
            seen = [self._next_row(prompt.row, observation) for observation in shown]
            if any(other != seen[0] for other in seen):
                raise ValueError(
                    f"{self._name(prompt)}: its reset gave different observations for one row and "
                    "seed; a group of episodes starts from one prompt"
                )
            if seen[0] != self._next_row(prompt.row, Observation(row.messages, row.images)):
                start = replace(self._start(prompt, seen[0]), row=prompt.row)
                for active in group:
                    active.prompt = start
        except PromptTooLong as error:
            if self._long_prompts == "refuse":
                raise PromptTooLong(f"{self._name(prompt)} adds to the prompt. {error}") from error
            return self._left_out("long", str(error))
        except RewardFailure as failure:
            self.reward_manager.failed(failure)
            return self._left_out("bad", str(failure))
        return group

    def _active(self, prompt: Prompt, row: Example, stage: Stage | None) -> "ActiveEpisode":
        active = ActiveEpisode(prompt, row, partial(self.reward_manager.score, stage=stage))
        context = Context(active.score, self._settings.max_turns)
        active.environment = self._environments.make(context)
        return active

    def _left_out(self, kind: Kind, reason: str) -> Start:
        self.skipped[kind] += 1
        self._reason = reason
        return []

    def _start(self, prompt: Prompt, row: Row) -> Prompt:
        try:
            return self._processor.prompt(row)
        except PromptTooLong:
            raise
        except ValueError as error:  # an image
            raise RewardFailure("value", f"{self._name(prompt)}: {error}") from error

    async def _answer(self, active: "ActiveEpisode", call: Awaitable[T]) -> T:
        """What the environment says; RewardFailure, with its name and row, where it does not."""
        name = self._name(active.prompt)
        try:
            return await active.bounded(call, self._environments.timeout)
        except RewardStop:
            raise
        except RewardFailure as failure:
            raise RewardFailure(failure.kind, f"{name}: {failure}") from failure
        except TimeoutError as error:
            message = f"{name}: no answer in {self._settings.timeout:g} s"
            raise RewardFailure("timeout", message) from error
        # An environment may raise anything, and its episode is one of many.
        except Exception as error:
            raise RewardFailure("exception", f"{name}: {error!r}"[:500]) from error

    async def _step(
        self, waiting: Sequence["ActiveEpisode"], responses: Sequence[Response]
    ) -> None:
        pairs = zip(waiting, responses, strict=True)
        await asyncio.gather(*(self._turn(active, response) for active, response in pairs))

    async def _turn(self, active: "ActiveEpisode", response: Response) -> None:
        text = self._processor.decode(response.token_ids)
        following = None
        try:
            step = await self._answer(active, active.environment.step(text))
            before = sum(turn.reward for turn in active.turns)
            worth, score = checked(step, self._name(active.prompt), before)
            if not step.done and self._goes_on(active, response):
                following = self._next_prompt(active.prompt, response, step)
        except RewardFailure as failure:
            score = self.reward_manager.failed(failure)
            worth = score.reward
        else:
            if following is None and not step.done:
                # Cut short, or out of turns: it is worth what its last words are, as an answer.
                score = await active.score(text, active.row)
                worth += score.reward
        active.turns.append(Turn(active.prompt, response, text, worth))
        active.last = score
        active.ended = following is None
        active.prompt = following or active.prompt

    def _goes_on(self, active: "ActiveEpisode", response: Response) -> bool:
        """Not after a response that was cut short, or that holds an image's token."""
        ids = response.token_ids
        whole = bool(ids) and ids[-1] == self._processor.eos_id
        vision = set(ids) & set(self._processor.vision_token_ids)
        return whole and not vision and len(active.turns) + 1 < self._settings.max_turns

    def _next_prompt(self, prompt: Prompt, response: Response, step: Step) -> Prompt:
        """Raises RewardFailure for an image that cannot be used."""
        name = self._name(prompt)
        if step.observation is None:
            raise ValueError(f"{name}: a step that is not done has no observation")
        row = self._next_row(prompt.row, step.observation)
        try:
            following = self._processor.next_turn(prompt, response.token_ids, row)
        except ValueError as error:
            raise RewardFailure("value", f"{name}: {error}") from error
        added = len(following.token_ids) - len(prompt.token_ids) - len(response.token_ids)
        if added > self._settings.max_observation_tokens:
            raise ValueError(
                f"{name}: an observation has {added} tokens, more than "
                f"environment.max_observation_tokens={self._settings.max_observation_tokens}: "
                "raise it, or show less"
            )
        return replace(following, row=prompt.row)

    def _next_row(self, base: Row, observation: Observation) -> Row:
        messages = tuple(Message(m["role"], m["content"]) for m in observation.messages)
        images = tuple(observation.images)
        marks = sum(message.text.count(IMAGE_PLACEHOLDER) for message in messages)
        asked = [message.text for message in messages if message.role == "user"]
        if not asked or marks not in (0, len(images)):
            problem = f"{marks} <image> for {len(images)} images" if asked else "no user message"
            raise ValueError(
                f"environment.name={self._settings.name}, {base.source}: an observation has "
                f"{problem}; give it a message by the user, and an <image> for each image or none"
            )
        alone = len(messages) == 1
        return replace(base, problem=asked[-1], images=images, messages=() if alone else messages)

    def _name(self, prompt: Prompt) -> str:
        return f"environment.name={self._settings.name}, {prompt.row.source}"


def example(row: Row, system_prompt: str | None = None) -> Example:
    """`system_prompt`: that of a row which has none of its own."""
    messages = row.messages or (Message("user", row.problem),)
    if system_prompt is not None and messages[0].role != "system":
        messages = (Message("system", system_prompt), *messages)
    chat = tuple({"role": m.role, "content": m.text} for m in messages)
    return Example(row.problem, row.answer, row.category, row.images, row.extra, chat)


def seed_of(seed: int, number: int, row: Row) -> int:
    return zlib.crc32(f"{seed}/{number}/{row.index}".encode())
