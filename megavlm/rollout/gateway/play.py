"""Episodes whose environment is an agent."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from megavlm.config.schema import Config
from megavlm.data.processor import Processor, Prompt
from megavlm.environments.agent import reward_step
from megavlm.environments.base import ChatFormat, Step
from megavlm.inference.generation import GenerateFn
from megavlm.inference.protocol import Response
from megavlm.inference.requests import RequestTimedOut
from megavlm.rewards.base import ResponseDetails, Score
from megavlm.rewards.manager import RewardManager
from megavlm.rollout.gateway.server import GatewayServer, new_key
from megavlm.rollout.gateway.session import GatewaySession, SessionLimits
from megavlm.rollout.scores import details
from megavlm.rollout.timed_environment import TimedEnvironment, step_score
from megavlm.rollout.trajectory import Episode
from megavlm.subprocess_pool.failure import CallFailure

RETURN_SECONDS = 1.0  # that an agent has to return once it has posted a reward


class AgentPlayer:
    """Plays episodes in which an agent asks the gateway for responses."""

    def __init__(
        self, config: Config, processor: Processor, reward_manager: RewardManager, chat: ChatFormat
    ) -> None:
        """chat: Form of the policy's responses. The caller starts and closes `server`."""
        settings = config.environment
        self._processor, self._reward_manager, self._chat = processor, reward_manager, chat
        assert settings.max_tokens is not None, "the configuration is checked"
        self._limits = SessionLimits(
            config.rollout.max_new_tokens,
            settings.max_turns,
            settings.max_tokens,
            settings.max_images,
        )
        self.server = GatewayServer(settings.options.get("host", "127.0.0.1"))

    async def play(self, episode: Episode, ask: GenerateFn, name: str) -> None:
        """Play an episode to its end, or until a request times out. name: Name of the environment
        and the row, for messages.
        """
        environment, prompt = episode.environment, episode.next_prompt
        assert environment is not None and prompt is not None

        async def sample(prompt: Prompt, most: int) -> Response:
            with environment.paused():
                return await ask(prompt, most)

        session = GatewaySession(
            new_key(),
            prompt.row,
            self._processor,
            self._chat,
            self._limits,
            sample,
            lambda response, texts: environment.note(details(response, texts)),
        )
        with suppress(RequestTimedOut):
            async with self.server.open(session) as url:
                try:
                    step = await _run(environment, session, url)
                    reward, score = step_score(step, name, 0.0)
                except CallFailure as failure:
                    score = self._reward_manager.failed(failure)
                    reward = score.reward
            if not session.calls:
                score = self._reward_manager.failed(
                    CallFailure("value", f"{name}: the agent has ended without a call")
                )
                await self._add_untrained(episode, prompt, ask, score)
            else:
                self._add_calls(episode, session, reward, score)
        episode.count(session.counts)

    def _add_calls(
        self, episode: Episode, session: GatewaySession, reward: float, score: Score
    ) -> None:
        """Add the calls as turns of the episode. The last one gets the reward."""
        calls = session.calls
        episode.next_prompt = calls[0].prompt
        for call, following in pairwise(calls):
            nothing = Score(0.0, False)
            episode.add_turn(call.response, call.text, 0.0, nothing, following.prompt)
        episode.add_turn(calls[-1].response, calls[-1].text, reward, score, None)

    async def _add_untrained(
        self, episode: Episode, prompt: Prompt, ask: GenerateFn, score: Score
    ) -> None:
        """Add a response to the row's prompt that is not trained on: an episode has a turn."""
        response = await ask(prompt)
        text = self._processor.decode(response.token_ids.tolist())
        episode.add_turn(response, text, score.reward, replace(score, skipped=True), None)


async def _run(environment: TimedEnvironment, session: GatewaySession, url: str) -> Step:
    """Run the agent until it returns, posts a reward or gets no response in time. Raises
    CallFailure and RequestTimedOut.
    """
    agent = asyncio.ensure_future(environment.step(url, ResponseDetails(), {}))
    try:
        await asyncio.wait({agent, session.ended}, return_when=asyncio.FIRST_COMPLETED)
        if session.ended.done():
            posted = reward_step(session.ended.result())
            await asyncio.wait({agent}, timeout=RETURN_SECONDS)
            return posted
        return agent.result()
    finally:
        agent.cancel()
