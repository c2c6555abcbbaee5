"""Episodes: the policy and its environments take turns until all episodes have ended. A response is
scored as soon as it arrives, and the next turn begins at once, so that no episode waits for
another. Rewards of a whole group are computed when its last episode has ended.

Tokens in, tokens out: a turn's request contains the token ids of all turns before it, with
responses exactly as the servers sent them. Only observations are tokenized.
"""

import asyncio
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from megavlm.config.curriculum import CurriculumStage
from megavlm.config.schema import Config
from megavlm.data.loader import Kind
from megavlm.data.processor import Processor, Prompt, PromptTooLong
from megavlm.data.rows import Row
from megavlm.environments.agent import GATEWAY
from megavlm.environments.base import ChatFormat, Observation, RecordedAction
from megavlm.environments.processes import make_environments
from megavlm.inference.generation import GenerateFn
from megavlm.inference.protocol import Response
from megavlm.inference.requests import RequestRefused, RequestTimedOut
from megavlm.rewards.manager import RewardManager
from megavlm.rollout.group_tree import tree_parts
from megavlm.rollout.observations import ObservationRenderer
from megavlm.rollout.scores import add_group_rewards, details, example
from megavlm.rollout.teachers import Generate, Teachers
from megavlm.rollout.timed_environment import TimedEnvironment, step_score
from megavlm.rollout.trajectory import Episode, Group
from megavlm.subprocess_pool.failure import CallFailure

if TYPE_CHECKING:
    from megavlm.rollout.gateway.play import AgentPlayer

T = TypeVar("T")

MAX_REPLACED = 1000  # limit of prompts in a row that cannot start an episode


class EpisodeRunner:
    """Plays episodes in the configured environment, and owns the processes of its rewards."""

    def __init__(
        self,
        config: Config,
        processor: Processor,
        reward_manager: RewardManager,
        runner: asyncio.Runner,
        teachers: Teachers | None = None,
    ) -> None:
        """Load the environment. runner: The asyncio runner that the rollout client also uses.
        teachers: They score the responses of the groups that are trained on. Raises ValueError if
        the environment cannot be loaded.
        """
        self._config, self._settings = config, config.environment
        self._processor, self.reward_manager, self._teachers = processor, reward_manager, teachers
        self._environments = runner.run(make_environments(config.environment))
        template = processor.chat_template
        self._chat = ChatFormat(
            template.call_form,
            template.opens_thought,
            processor.coordinates,
            processor.token_side,
        )
        self._renderer = ObservationRenderer(
            processor, self._settings, config.rollout.max_new_tokens
        )
        self._agents: AgentPlayer | None = None
        if config.environment.name == GATEWAY:
            from megavlm.rollout.gateway import play  # the only user of aiohttp

            self._agents = play.AgentPlayer(config, processor, reward_manager, self._chat)
            runner.run(self._agents.server.start())
        self.skipped: Counter[Kind] = Counter()  # prompts whose episodes could not start, by reason

    async def start(
        self,
        groups: Sequence[Group],
        n: int,
        *,
        stage: CurriculumStage | None = None,
        step: int = 0,
    ) -> list[Group]:
        """Start n episodes in each group. Returns the groups that could start; other groups have no
        episodes and are counted in `skipped`.

        step: Current training step. The environments' seeds are computed from the step at which a
        group is started for the first time. Raises ValueError if
        an environment breaks its interface or makes longer prompts than the configuration allows,
        and RewardStop if a reward fails under reward.on_failure=stop.
        """
        for group in groups:
            if group.step is None:
                group.step = step
        await asyncio.gather(*(self._start(group, n, stage) for group in groups))
        return [group for group in groups if group.episodes]

    async def start_or_replace(
        self,
        groups: Sequence[Group],
        n: int,
        draw: Callable[[int], list[Prompt]],
        *,
        stage: CurriculumStage | None = None,
        step: int = 0,
    ) -> list[Group]:
        """Start n episodes in each group. A prompt whose episodes cannot start is replaced by one
        from `draw`. Raises as `start` does, and ValueError after MAX_REPLACED such prompts in a
        row.
        """
        started, replaced = await self.start(groups, n, stage=stage, step=step), 0
        while len(started) < len(groups):
            drawn = [Group(prompt) for prompt in draw(len(groups) - len(started))]
            found = await self.start(drawn, n, stage=stage, step=step)
            replaced = 0 if found else replaced + len(drawn)
            if replaced >= MAX_REPLACED:
                raise ValueError(
                    f"environment.name={self._settings.name}: none of {replaced} prompts in a row "
                    f"can start; the last reason: {self._reason}"
                )
            started += found
        for group in started:  # the groups of an evaluation have no teacher
            group.awaits_teacher = self._teachers is not None and self._teachers.scores(group)
        return started

    async def check_start(self, prompt: Prompt) -> None:
        """Raise PromptTooLong or another ValueError if no episode can start from the prompt."""
        counted, group = self.skipped.copy(), Group(prompt)
        started = await self.start([group], 1)
        _close([group])
        if not started:
            too_long = self.skipped["long"] > counted["long"]
            self.skipped = counted
            raise (PromptTooLong if too_long else ValueError)(self._reason)

    async def play(
        self,
        groups: Sequence[Group],
        generate: Generate,
        played: Callable[[Group], object] = lambda group: None,
    ) -> None:
        """Play the started episodes of all groups to their end. Responses that groups have are
        continued. played: Called with each group whose episodes have ended or timed out.

        Raises ValueError if an environment breaks its interface, RewardStop if a reward fails under
        reward.on_failure=stop, and the errors of `generate`.
        """
        groups = [group for group in groups if group.episodes]
        if not groups:
            return
        responses = [list(group.responses) for group in groups]
        for group, received in zip(groups, responses, strict=True):
            group.responses = received  # filled while they arrive

        async def on_complete(index: int, complete: Sequence[Response], ask: GenerateFn) -> None:
            await self.play_group(groups[index], complete, ask, generate)
            played(groups[index])

        # The first turn of a group is one request prompt with n responses. From the second turn on,
        # each episode has a prompt of its own. Agents ask for all of their responses.
        count = len(groups[0].episodes)
        counts = {"n": count} if self._agents is None else {"n": 0, "agents": count}
        try:
            await generate(
                [group.first_prompt for group in groups],
                **counts,
                groups=responses,
                on_complete=on_complete,
            )
        finally:
            _close(groups)

    async def play_group(
        self, group: Group, responses: Sequence[Response], ask: GenerateFn, generate: Generate
    ) -> None:
        """Play the started episodes of a group from their first responses to their end, or until a
        request times out. responses: One first response per episode; empty if the first request
        timed out. generate: As in `play`; a policy that is its own teacher scores by it.
        """
        try:
            if self._agents is not None:
                name, play = self._name(group.prompt), self._agents.play
                await asyncio.gather(
                    *(
                        play(episode, partial(ask, session=number), name)
                        for number, episode in enumerate(group.episodes)
                    )
                )
            elif responses:
                pairs = zip(group.episodes, responses, strict=True)
                await asyncio.gather(
                    *(
                        self._play(*pair, partial(ask, session=number))
                        for number, pair in enumerate(pairs)
                    )
                )
        finally:
            _close([group])
        if group.has_ended and group.awaits_reward:
            await add_group_rewards(group, self.reward_manager, self._config.data.system_prompt)
        if group.has_ended and group.awaits_teacher:
            assert self._teachers is not None
            where = self._name(group.prompt)
            await self._teachers.score(group, generate, self.reward_manager, where)
        if group.is_played:
            tree_parts(group)  # found now, while other groups are generated

    def take_skipped(self) -> Counter[Kind]:
        """Return the prompts skipped since the last call, by reason."""
        taken, self.skipped = self.skipped, Counter()
        return taken

    async def close(self) -> None:
        await self._environments.close()
        if self._agents is not None:
            await self._agents.server.close()
        if self._teachers is not None:
            await self._teachers.close()
        await self.reward_manager.close()

    async def _start(self, group: Group, n: int, stage: CurriculumStage | None) -> None:
        prompt, data = group.prompt, self._config.data
        assert group.step is not None
        seed = episode_seed(self._config.run.seed, group.step, prompt.row)
        row = example(prompt.row, data.system_prompt)
        score = partial(self.reward_manager.score, stage=stage)
        made = [
            TimedEnvironment(
                self._environments, self._settings, self._chat, score, self._name(prompt)
            )
            for _ in range(n)
        ]
        try:
            shown = await _all(environment.reset(row, seed) for environment in made)
            seen = [self._renderer.row(prompt.row, observation) for observation in shown]
            if any(other != seen[0] for other in seen):
                raise ValueError(
                    f"{self._name(prompt)}: its reset gave different observations for one row and "
                    "seed; a group of episodes starts from one prompt"
                )
            if seen[0] != self._renderer.row(prompt.row, Observation(row.messages, row.images)):
                prompt = replace(self._first_prompt(prompt, seen[0]), row=prompt.row)
        except PromptTooLong as error:
            if data.long_prompts == "refuse":
                raise PromptTooLong(f"{self._name(prompt)} adds to the prompt. {error}") from error
            self._skip("long", str(error))
        except CallFailure as failure:
            self.reward_manager.failed(failure)
            self._skip("bad", str(failure))
        else:
            group.episodes = [Episode(prompt, environment) for environment in made]
            group.stage, group.awaits_reward = stage, self.reward_manager.scores_groups
        finally:
            if not group.episodes:
                for environment in made:
                    environment.close()

    def _skip(self, kind: Kind, reason: str) -> None:
        self.skipped[kind] += 1
        self._reason = reason

    def _first_prompt(self, prompt: Prompt, row: Row) -> Prompt:
        try:
            return self._processor.prompt(row)
        except PromptTooLong:
            raise
        except ValueError as error:  # such as an unreadable image
            raise CallFailure("value", f"{self._name(prompt)}: {error}") from error

    async def _play(self, episode: Episode, response: Response, ask: GenerateFn) -> None:
        """Play an episode from its first response to its end, or until a request times out."""
        await self._step(episode, response)
        with suppress(RequestTimedOut):
            while (prompt := episode.next_prompt) is not None:
                try:
                    following = await ask(prompt, first_routed=_first_unrouted(episode, prompt))
                except RequestRefused as error:
                    failure = CallFailure("remote", f"{self._name(prompt)}: {error}")
                    episode.fail(self.reward_manager.failed(failure))
                else:
                    await self._step(episode, following)

    async def _step(self, episode: Episode, response: Response) -> None:
        ids, prompt = response.token_ids.tolist(), episode.next_prompt
        text = self._processor.decode(ids)
        environment, following, actions = episode.environment, None, list[RecordedAction]()
        assert prompt is not None and environment is not None
        sizes = {image.digest.hex(): image.shown_size for image in prompt.images}
        keys = {image.digest.hex(): image.key for image in prompt.images}
        try:
            step = await environment.step(text, details(response, [*episode.texts, text]), sizes)
            reward, score = step_score(step, self._name(prompt), sum(episode.rewards))
            episode.count(step.info.get("counts", {}))
            actions = [replace(one, image=keys.get(one.image, "")) for one in step.actions]
            if not step.done and self._has_next_turn(episode, response):
                if step.observation is None:
                    raise CallFailure(
                        "value", f"{self._name(prompt)}: a step that is not done has no observation"
                    )
                num_first = len((episode.prompts or [prompt])[0].images)
                following, counts = self._renderer.next_prompt(
                    prompt, ids, step.observation, num_first
                )
                episode.count(counts)
        except CallFailure as failure:
            score = self.reward_manager.failed(failure)
            reward = score.reward
        else:
            if following is None and not step.done:
                # The response was truncated, or no turns or tokens are left: score it as an answer.
                score = await environment.score(text)
                reward += score.reward
        episode.add_turn(response, text, reward, score, following, actions)

    def _has_next_turn(self, episode: Episode, response: Response) -> bool:
        """Return False after the last turn, and after a response that was truncated or contains an
        image token.
        """
        ids = response.token_ids
        is_whole = len(ids) > 0 and ids[-1] in self._processor.end_ids
        vision = np.isin(ids, self._processor.vision_token_ids).any()
        return is_whole and not vision and len(episode.responses) + 1 < self._settings.max_turns

    def _name(self, prompt: Prompt) -> str:
        return f"environment.name={self._settings.name}, {prompt.row.source}"


def _close(groups: Sequence[Group]) -> None:
    """Close the episodes that are not played on."""
    for group in groups:
        for episode in group.episodes:
            episode.close()


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all calls, and return their results. Raises the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    found: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found


def _first_unrouted(episode: Episode, prompt: Prompt) -> int:
    """Return the first token of a later prompt whose routes the last turn's answer does not
    have.
    """
    before, response = episode.prompts[-1], episode.responses[-1]
    known = torch.cat([before.token_ids, torch.from_numpy(response.token_ids)])
    keys = [image.key for image in before.images]
    extends = torch.equal(prompt.token_ids[: len(known)], known) and keys == [
        image.key for image in prompt.images[: len(keys)]
    ]
    return response.first_unrouted(len(before.token_ids)) if extends else 0


def episode_seed(seed: int, step: int, row: Row) -> int:
    return zlib.crc32(f"{seed}/{step}/{row.index}".encode())
