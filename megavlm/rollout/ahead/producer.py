"""Rollout producer: a process that draws prompts and plays episodes while the trainer trains
(rollout.max_staleness above 0, or rollout.overlap). The trainer starts it as `python -m
megavlm.rollout.ahead.producer DESCRIPTOR`.

It is a process because a thread would hold the GIL and stall the trainer's kernel launches. It uses
no GPU. It starts a prompt only when the trainer allows one, so that at most (max_staleness + 1)
steps' worth of prompts are started and not yet trained on. A step gets the groups whose prompts
were drawn first, all at once or in waves as they are played: the producer waits for a slow response
and does not leave it out, so there is no bias towards short responses, and no group is older than
max_staleness steps. A group that is older anyway, for example after a resume with a lower
max_staleness, is dropped and counted. So is a group whose request times out (rollout.timed_out).

With rollout.oversample above 1, groups that are played are handed over before slower ones that were
drawn earlier (partial rollouts). Fewer prompts are started then, so that a slow group has several
steps until it is max_staleness steps old; the producer waits for it only then.
"""

import asyncio
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.curriculum import CurriculumStage
from megavlm.config.schema import Config
from megavlm.inference.client import RolloutClient
from megavlm.inference.errors import RolloutRequestError, RolloutServerError
from megavlm.inference.generation import Ask
from megavlm.inference.protocol import Response
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server_main import die_with
from megavlm.parallel import platform
from megavlm.process import allow_open_files, leave, leave_to_parent
from megavlm.rewards.base import RewardStop
from megavlm.rollout.ahead.group_arrays import send_groups
from megavlm.rollout.ahead.in_time import Deadlines
from megavlm.rollout.ahead.mirror import Report, ServerMirror
from megavlm.rollout.backlog import TimedOutGroups, group_state, restored_group
from megavlm.rollout.sampler import Sampler, at_version
from megavlm.rollout.staleness import oldest_version
from megavlm.rollout.trajectory import Group
from megavlm.rollout.wave import num_tokens

TICK = 0.05  # seconds between checks of whether the servers are idle


@dataclass(frozen=True)
class ProducerSetup:
    """Arguments of a producer. parent: Process id of the trainer."""

    config: Config
    limits: RequestLimits
    parent: int


@dataclass(eq=False)
class StartedPrompt:
    """A prompt that was started, until the trainer takes its group. version: Oldest weight version
    of its tokens, or one before it until they are played.
    """

    group: Group
    version: int
    generated: list[list[Response]] | None = None  # responses of its whole batch of prompts
    place: int = 0  # its index in `generated`

    @property
    def responses(self) -> Sequence[Response]:
        """First-turn responses received so far."""
        return self.group.responses if self.generated is None else self.generated[self.place]


class Producer:
    def __init__(self, setup: ProducerSetup, connection: Connection) -> None:
        """Load the data, the environment and the rewards. Raises ValueError if that fails."""
        self._setup, self._connection = setup, connection
        config = self._config = setup.config
        algorithm = config.algorithm
        assert isinstance(algorithm, PolicyOptimization)
        self._n = algorithm.responses_per_prompt
        self._staleness = config.rollout.max_staleness
        self._deadlines: Deadlines | None = None  # of partial rollouts
        if config.rollout.oversample > 1:
            self._deadlines = Deadlines(self._staleness, algorithm.prompts_per_step)
        self._servers = ServerMirror(self._report)
        self._client = RolloutClient(
            self._servers, setup.limits, beat=lambda: connection.send(("beat",))
        )
        self._sampler = Sampler(config, self._client)
        self._episodes, self._stream = self._sampler.episodes, self._sampler.prompt_stream()
        self._started: deque[StartedPrompt] = deque()
        self._waiting: list[Group] = []  # from a checkpoint, or timed out; they start first
        self._version, self._sampling = 0, self._sampler.sampling
        self._stage: CurriculumStage | None = None
        self._wanted: int | None = None  # number of groups that the step still needs
        self._least_tokens: int | None = None  # tokens of a wave; None: all groups at once
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropped = 0
        self._timed_out = TimedOutGroups(config.rollout.timed_out, algorithm.prompts_per_step)
        self._idle = 0.0  # idle seconds since the trainer last got groups

    def run(self) -> None:
        """Serve the trainer until it is gone. Raises the error that ends the rollouts."""
        self._client.runner.run(self._serve())

    async def _serve(self) -> None:
        loop, self._servers_changed = asyncio.get_running_loop(), asyncio.Event()
        self._ended = loop.create_future()
        # Any failure ends the process, and with it the run.
        loop.set_exception_handler(lambda _, context: self._fail(context.get("exception")))
        loop.add_reader(self._connection.fileno(), self._receive)
        watch = loop.create_task(self._watch())
        try:
            await self._ended
        finally:
            loop.remove_reader(self._connection.fileno())
            for task in (watch, *self._tasks):
                task.cancel()
            await asyncio.gather(watch, *self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """Count the seconds in which the servers have no requests."""
        while True:
            await asyncio.sleep(TICK)
            self._idle += TICK * self._client.is_idle

    def close(self) -> None:
        """End the processes of data, environments and rewards."""
        self._stream.close()
        self._sampler.close()
        self._client.close()

    def _receive(self) -> None:
        """Handle one message from the trainer: a name, and the arguments of its handler."""
        try:
            name, *arguments = self._connection.recv()
        except (EOFError, OSError):
            if not self._ended.done():
                self._ended.set_result(None)
            return
        handlers: dict[str, Callable[..., None]] = {
            "load": self._load,
            "servers": self._update_servers,
            "advance": self._advance,
            "allow": self._allow,
            "take": self._take,
            "state": self._send_state,
        }
        handlers[name](*arguments)

    def _fail(self, error: BaseException | None) -> None:
        if error is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _report(self, report: Report) -> None:
        self._connection.send(("report", report))

    def _update_servers(self, servers: Any) -> None:
        self._servers.update(servers)
        self._servers_changed.set()

    def _advance(self, version: int, stage: CurriculumStage | None) -> None:
        """Note that a push gave the servers the weights `version`. stage: Curriculum stage of
        prompts that start from now on.
        """
        self._version, self._stage = version, stage
        self._sampling = at_version(self._config, self._sampler.sampling, version)
        self._client.sample_by(self._sampling)

    def _allow(self, count: int) -> None:
        """Start `count` more prompts; waiting ones come first."""
        waiting, self._waiting = self._waiting[:count], self._waiting[count:]
        fresh = map(Group, self._stream.take(count - len(waiting)))
        started = [
            StartedPrompt(group, min([self._version, *_versions(group.responses)]))
            for group in (*waiting, *fresh)
        ]
        self._started += started
        task = asyncio.get_running_loop().create_task(self._play(started))
        self._tasks.add(task)
        task.add_done_callback(self._played)

    def _played(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)

    async def _play(self, started: Sequence[StartedPrompt]) -> None:
        """Play the episodes of all prompts, and hand over their groups."""
        await asyncio.gather(*map(self._start, started))

        async def follow(place: int, responses: Sequence[Response], ask: Ask) -> None:
            item = started[place]
            await self._episodes.play_group(item.group, responses, ask)
            item.group.responses = tuple(responses)
            if item.group.is_played:
                item.version = oldest_version(item.group)
            self._hand_over()

        generated = [list(item.group.responses) for item in started]
        for place, item in enumerate(started):
            item.generated, item.place = generated, place
        await self._client.generate_ahead(
            [item.group.first_prompt for item in started],
            n=self._episodes.num_first(self._n),
            sampling=self._sampling,
            accepts=self._accepts,
            refit=self._wait_for_push,
            groups=generated,
            follow=follow,
            skip_timed_out=self._config.rollout.timed_out != "fail",
        )

    async def _start(self, item: StartedPrompt) -> None:
        """Start a prompt's episodes. A prompt that cannot start is replaced by the next one."""
        (item.group,) = await self._episodes.started_or_replaced(
            [item.group], self._n, self._stream.take, stage=self._stage, step=self._version
        )
        self._stream.skipped.update(self._episodes.take_skipped())

    def _accepts(self, version: str) -> bool:
        """Return True for versions between current - max_staleness and current, and for current +
        1, the version that may be being pushed.
        """
        number = int(version) if version.isdecimal() else -1
        return self._version - self._staleness <= number <= self._version + 1

    async def _wait_for_push(self) -> None:
        """Tell the trainer that no server has usable weights, and wait until the servers change."""
        self._servers_changed.clear()
        self._connection.send(("refit",))
        await self._servers_changed.wait()

    def _take(self, count: int, least_tokens: int | None) -> None:
        self._wanted, self._least_tokens = count, least_tokens
        self._hand_over()

    def _hand_over(self) -> None:
        """Send groups that the trainer waits for: all that its step needs, or a wave once there are
        enough tokens.
        """
        if self._wanted is None:
            return
        self._replace_lost()
        needed = self._next_prompts(self._wanted)
        played = {i: item for i, item in enumerate(needed) if item.group.is_played}
        groups = [item.group for item in played.values()]
        counts: dict[str, float] = {}
        if len(groups) < self._wanted:
            least = self._least_tokens
            if least is None or sum(map(num_tokens, groups)) < least:
                return
        else:
            kept, counts = self._timed_out.end_step()
            self._waiting += kept
        for item in played.values():
            self._started.remove(item)
        self._wanted = None
        counts |= {"dropped_groups": float(self._dropped), "servers_idle": self._idle}
        self._dropped, self._idle = 0, 0.0
        self._connection.send(("groups", list(played), counts, self._stream.measures))
        send_groups(self._connection, groups, self._setup.parent)

    def _next_prompts(self, wanted: int) -> list[StartedPrompt]:
        """Return the prompts whose groups the trainer gets next: the first in their order, played
        or not, or those that `Deadlines` chooses.
        """
        started = list(self._started)
        if self._deadlines is None:
            return started[:wanted]
        versions = [item.version for item in started]
        played = [item.group.is_played for item in started]
        chosen = self._deadlines.choose(versions, played, wanted, self._version)
        return [started[number] for number in chosen]

    def _replace_lost(self) -> None:
        """Drop groups that timed out or are too old. Another prompt takes the place of each, so
        that the trainer still gets all its groups.
        """
        oldest = self._version - self._staleness
        for item in list(self._started):
            group = item.group
            is_old = group.is_played and item.version < oldest
            if is_old or group.timed_out:
                self._started.remove(item)
                self._dropped += is_old
                if group.timed_out:
                    self._timed_out.add(group)
                self._allow(1)

    def _send_state(self) -> None:
        started = [group_state(item.group, item.responses) for item in self._started]
        waiting = [group_state(group, group.responses) for group in self._waiting]
        backlog = {"backlog": [*started, *waiting]}
        self._connection.send(("state", self._stream.state_dict() | backlog))

    def _load(self, state: Mapping[str, Any]) -> None:
        """Continue from a source's state. Raises ValueError if it was taken with other data."""
        sampler = self._sampler
        self._stream.load_state_dict(state)
        self._waiting = [
            restored_group(values, lambda index: sampler.processor.prompt(sampler.rows[index]))
            for values in state["backlog"]
        ]


def _versions(responses: Sequence[Response]) -> list[int]:
    return [int(span.version) for response in responses for span in response.spans]


def serve(connection: Connection, setup: ProducerSetup) -> bool:
    """Produce until the trainer is gone. Returns False after an error; the error was sent to the
    trainer.
    """
    with ExitStack() as stack:  # environments are closed after an error, too
        try:
            producer = Producer(setup, connection)
            stack.callback(producer.close)
            producer.run()
        except (ValueError, RolloutServerError, RolloutRequestError, RewardStop) as error:
            connection.send(("error", error))
            return False
    return True


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    # The pickle is trusted: the trainer sent it through a private pipe.
    setup: ProducerSetup = connection.recv()
    die_with(setup.parent, by=signal.SIGKILL)
    leave_to_parent()
    allow_open_files()
    platform.install()
    leave(0 if serve(connection, setup) else 2)  # exit at once: tasks may still run after an error


if __name__ == "__main__":
    main()
