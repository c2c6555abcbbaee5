"""The engine of rollouts: it draws prompts, plays their episodes and fills the buffer, from which
steps take their groups. It runs in turns with the trainer and in its process (LocalSource), or in a
process of its own while the trainer trains (ahead/producer.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.curriculum import CurriculumStage
from megavlm.config.schema import Config
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.protocol import Response
from megavlm.rollout.backlog import backlog_state, restored_groups
from megavlm.rollout.buffer import GroupBuffer, Started, StreamBatch, Window
from megavlm.rollout.groups import has_signal
from megavlm.rollout.sampler import Sampler, at_version
from megavlm.rollout.staleness import oldest_version
from megavlm.rollout.trajectory import Group


def window_of(config: Config) -> Window:
    """Return what a recipe's steps train on."""
    algorithm, rollout = config.algorithm, config.rollout
    assert isinstance(algorithm, PolicyOptimization)
    return Window(
        per_step=algorithm.prompts_per_step,
        steps_started=rollout.steps_started,
        staleness=rollout.max_staleness,
        order="oldest" if rollout.oversample > 1 else "drawn",
        rounds=algorithm.dynamic_sampling,
        requeue=rollout.on_timeout == "requeue",
    )


class Engine:
    """Plays groups in the client's asyncio runner. A step is `begin`, `start` of the prompts that
    it returns, and `take` until the last streamed batch.

    measures: Metrics of the last step that was taken, under their names in
    observability/metrics.py.
    """

    def __init__(
        self, sampler: Sampler, refit: Callable[[], Awaitable[None]], *, pushes_ahead: bool = False
    ) -> None:
        """refit: Waits for a weight push when no server can answer. pushes_ahead: True if weights
        may be pushed before `begin` names their version.
        """
        config = self._config = sampler.config
        assert isinstance(config.algorithm, PolicyOptimization)
        self._n = config.algorithm.responses_per_prompt
        self._sampler, self._client, self._refit = sampler, sampler.client, refit
        self._pushes_ahead, self._pushes = pushes_ahead, True
        self._episodes, self._stream = sampler.episodes, sampler.prompt_stream()
        self._buffer: GroupBuffer[Group] = GroupBuffer(window_of(config))
        self._version, self._sampling_params = 0, sampler.sampling_params
        self._stage: CurriculumStage | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts: set[asyncio.Task[None]] = set()  # those of them that start episodes
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self.measures: dict[str, float] = {}

    def begin(
        self, version: int, stage: CurriculumStage | None, *, pushes: bool = True
    ) -> list[Started[Group]]:
        """Begin the step after `version` steps, and return the prompts that start with it.

        stage: Curriculum stage of prompts that start from now on. pushes: False if servers keep the
        weights that they started with, whose versions say nothing.
        """
        self._version, self._stage, self._pushes = version, stage, pushes
        self._sampling_params = at_version(
            self._config, self._sampler.sampling_params, version if pushes else None
        )
        self._client.sample_by(self._sampling_params)
        self._client.resume()
        self._buffer.begin(version)
        return self._draw()

    async def start(self, drawn: Sequence[Started[Group]]) -> None:
        """Start the episodes of prompts, and begin to play them. A prompt that cannot start is
        replaced by the next one.
        """
        if not drawn:
            return
        groups = await self._episodes.start_or_replace(
            [item.group for item in drawn],
            self._n,
            self._stream.take,
            stage=self._stage,
            step=self._version,
        )
        self._stream.skipped.update(self._episodes.take_skipped())
        items = dict(zip(groups, drawn, strict=True))
        for group, item in items.items():
            item.group = group
        generate = partial(
            self._client.generate,
            sampling_params=self._sampling_params,
            accepts=self._accepts,
            refit=self._refit if self._pushes else None,
            skip_timed_out=self._config.rollout.on_timeout != "fail",
        )
        self._run(self._episodes.play(groups, generate, lambda group: self._played(items[group])))

    async def take(self, least_tokens: int | None = None) -> StreamBatch[Group]:
        """Wait for the step's next groups; see GroupBuffer.take. Raises the errors of rollouts."""
        while True:
            self._changed.clear()
            if self._error is not None:
                raise self._error
            streamed = self._buffer.take(least_tokens)
            self._start_allowed()
            if streamed is not None:
                break
            await self._changed.wait()
        if streamed.is_last:
            dropped, lost = self._buffer.take_counts()
            self.measures = self._stream.measures | self._client.sent_images.take_counts()
            if self._buffer.window.staleness:
                self.measures["dropped_groups"] = float(dropped)
            if self._config.rollout.on_timeout != "fail":
                self.measures["timed_out_groups"] = float(lost)
        return streamed

    async def pause(self) -> None:
        """Abort what is generated, so that the servers are idle until the next step begins; it goes
        on with the tokens so far.
        """
        if not self._buffer.is_played:
            await asyncio.gather(*self._starts)
            await self._client.pause()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as GroupSource does."""
        return {**self._stream.state_dict(), "backlog": backlog_state(self._buffer.state())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a source's state. Raises ValueError if it was taken with other data."""
        self._stream.load_state_dict(state)
        rows, prompt = self._sampler.rows, self._sampler.processor.prompt
        self._buffer.load(restored_groups(state["backlog"], lambda index: prompt(rows[index])))

    async def end(self) -> None:
        """End all work and the workers of the data."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._stream.close()

    def _draw(self) -> list[Started[Group]]:
        """Return the groups that may start now, as started ones."""
        waiting, new = self._buffer.allow()
        return [
            self._buffer.start(group, min([self._version, *_versions(group.responses)]))
            for group in (*waiting, *map(Group, self._stream.take(new)))
        ]

    def _start_allowed(self) -> None:
        if drawn := self._draw():
            self._starts.add(task := self._run(self.start(drawn)))
            task.add_done_callback(self._starts.discard)

    def _played(self, item: Started[Group]) -> None:
        """Note that a group is played or has timed out."""
        group, per_step = item.group, self._buffer.window.per_step
        if group.is_played:
            version = oldest_version(group) if self._pushes else self._version
            signal = not self._buffer.window.rounds or has_signal(group)
            self._buffer.played(item, version, group.num_tokens, signal)
        elif (count := self._buffer.lose(item, Group(group.prompt))) > per_step:
            raise RolloutServerError(
                f"the requests of {count} groups of a step timed out, more than the "
                f"algorithm.prompts_per_step={per_step} groups that it trains on: raise "
                "rollout.request_timeout, or lower rollout.concurrency, rollout.image_tokens or "
                "rollout.max_new_tokens; the run can resume from its last checkpoint"
            )
        self._start_allowed()
        self._changed.set()

    def _accepts(self, version: str) -> bool:
        """Return True for versions between current - max_staleness and current, and for current + 1
        if it may be being pushed.
        """
        number = int(version) if version.isdecimal() else -1
        oldest = self._version - self._buffer.window.staleness
        return not self._pushes or oldest <= number <= self._version + self._pushes_ahead

    def _run(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run `work` in the background. The next `take` raises its error."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._error = self._error or error
            self._changed.set()


def _versions(responses: Sequence[Response]) -> list[int]:
    return [int(span.version) for response in responses for span in response.spans]
