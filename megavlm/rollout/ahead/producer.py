"""Rollout producer: a process that draws prompts and plays episodes while the trainer trains
(rollout.max_staleness above 0). The trainer starts it as `python -m megavlm.rollout.ahead.producer
DESCRIPTOR`.

It is a process because a thread would hold the GIL and stall the trainer's kernel launches. It uses
no GPU. It starts a prompt only when the trainer allows one, so that at most (max_staleness + 1)
steps' worth of prompts are started and not yet trained on. Groups are handed over in the order in
which their prompts were drawn: the producer waits for a slow response and does not leave it out, so
there is no bias towards short responses, and no group is older than max_staleness steps. A group
that is older anyway, for example after a resume with a lower max_staleness, is dropped and counted.
So is a group whose request times out (rollout.timed_out).
"""

import asyncio
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.curriculum import CurriculumStage
from megavlm.config.schema import Config
from megavlm.data.loader import PromptStream, held_for
from megavlm.data.processor import Processor
from megavlm.data.rows import Rows
from megavlm.families import family_of
from megavlm.inference.client import RolloutClient
from megavlm.inference.errors import RolloutRequestError, RolloutServerError
from megavlm.inference.generation import Ask
from megavlm.inference.protocol import Response, Sampling
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server_main import die_with
from megavlm.parallel import platform
from megavlm.process import allow_open_files, leave, leave_to_parent
from megavlm.rewards.base import RewardStop
from megavlm.rollout.ahead.group_arrays import send_groups
from megavlm.rollout.ahead.mirror import Report, ServerMirror
from megavlm.rollout.episodes import EpisodeRunner
from megavlm.rollout.partial_rollouts import TimedOutGroups, oldest_version, response_of
from megavlm.rollout.rewards import make_reward_manager
from megavlm.rollout.trajectory import Group

TICK = 0.05  # seconds between checks of whether the servers are idle


@dataclass(frozen=True)
class ProducerSetup:
    """Arguments of a producer. state: The driver's state in a checkpoint; None starts from the
    first prompt. version: Version of the weights that the servers get first. parent: Process id of
    the trainer, filled in by RolloutProducer.
    """

    config: Config
    sampling: Sampling
    limits: RequestLimits
    state: Mapping[str, Any] | None
    version: int
    parent: int = 0


@dataclass(eq=False)
class StartedPrompt:
    """A prompt that was started at training step `step`, until the trainer takes its group."""

    group: Group
    step: int
    begun: list[Response] = field(default_factory=list)  # first-turn responses from a checkpoint
    generated: list[list[Response]] | None = None  # responses of its whole batch of prompts
    place: int = 0  # its index in `generated`

    @property
    def responses(self) -> list[Response]:
        """First-turn responses received so far."""
        return self.begun if self.generated is None else self.generated[self.place]


class Producer:
    def __init__(self, setup: ProducerSetup, connection: Connection) -> None:
        """Load the data, the environment and the rewards. Raises ValueError if that fails."""
        self._setup, self._connection = setup, connection
        config = self._config = setup.config
        algorithm = config.algorithm
        assert isinstance(algorithm, PolicyOptimization)
        self._n = algorithm.responses_per_prompt
        self._staleness = config.rollout.max_staleness
        self._servers = ServerMirror(self._report)
        self._client = RolloutClient(
            self._servers, setup.limits, beat=lambda: connection.send(("beat",))
        )
        self._processor = Processor(
            config.model.folder, config.data, family_of(config.model.folder)
        )
        self._rows = Rows(config.data.train_files, config.data)
        self._stream = PromptStream(
            self._rows,
            self._processor.prompt,
            config.data,
            seed=config.run.seed,
            batch_size=algorithm.prompts_per_step,
            held=held_for(config.rollout),
        )
        self._runner = EpisodeRunner(
            config, self._processor, make_reward_manager(config), self._client.runner
        )
        self._started: deque[StartedPrompt] = deque()
        self._restored: list[StartedPrompt] = []
        self._version, self._sampling = setup.version, setup.sampling
        self._stage: CurriculumStage | None = None
        self._wanted: int | None = None  # number of groups that the trainer waits for
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropped = 0
        self._timed_out = TimedOutGroups(config.rollout.timed_out, algorithm.prompts_per_step)
        self._idle = 0.0  # idle seconds since the trainer last got groups
        if setup.state is not None:
            self._load(setup.state)

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
        self._runner.close()
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
        if self._config.rollout.pause == "in_place":  # caches keep old prefixes
            self._sampling = replace(self._setup.sampling, cache_key=str(version))
            self._client.sample_by(self._sampling)

    def _allow(self, count: int) -> None:
        """Start `count` more prompts. Restored ones (from a checkpoint, or timed out) come
        first.
        """
        restored, self._restored = self._restored[:count], self._restored[count:]
        fresh = self._stream.take(count - len(restored))
        started = [*restored, *(StartedPrompt(Group(p), self._version) for p in fresh)]
        self._started += started
        task = asyncio.get_running_loop().create_task(self._play(started))
        self._tasks.add(task)
        task.add_done_callback(self._played)

    def _played(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)

    async def _play(self, started: Sequence[StartedPrompt]) -> None:
        """Play the episodes of all prompts. Each group is handed over when it is the oldest."""
        await asyncio.gather(*map(self._start, started))

        async def follow(place: int, responses: Sequence[Response], ask: Ask) -> None:
            item = started[place]
            await self._runner.play_group(item.group, responses, ask)
            item.group.responses = tuple(responses)
            self._hand_over()

        generated = [item.begun for item in started]
        for place, item in enumerate(started):
            item.generated, item.place = generated, place
        await self._client.generate_ahead(
            [item.group.first_prompt for item in started],
            n=self._n,
            sampling=self._sampling,
            accepts=self._accepts,
            refit=self._wait_for_push,
            groups=generated,
            follow=follow,
            skip_timed_out=self._config.rollout.timed_out != "fail",
        )

    async def _start(self, item: StartedPrompt) -> None:
        """Start a prompt's episodes. A prompt that cannot start is replaced by the next one."""
        (group,) = await self._runner.started_or_replaced(
            [item.group], self._n, self._stream.take, stage=self._stage, step=item.step
        )
        if group is not item.group:
            item.group, item.begun = group, []
        self._stream.skipped.update(self._runner.skipped)
        self._runner.skipped.clear()

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

    def _take(self, count: int) -> None:
        self._wanted = count
        self._hand_over()

    def _hand_over(self) -> None:
        """Send the groups that the trainer waits for, once the oldest groups are all played."""
        if self._wanted is None:
            return
        oldest = self._version - self._staleness
        for item in list(self._started):
            group = item.group
            is_old = group.is_played and oldest_version(group) < oldest
            if is_old or group.timed_out:
                self._started.remove(item)
                self._dropped += is_old
                if group.timed_out:
                    self._timed_out.add(group)
                # Another prompt takes its place, so that the trainer still gets all its groups.
                self._allow(1)
        first = list(self._started)[: self._wanted]
        if len(first) < self._wanted or not all(item.group.is_played for item in first):
            return
        for _ in first:
            self._started.popleft()
        self._wanted = None
        kept, timed_out = self._timed_out.end_step()
        self._restored += [StartedPrompt(group, self._version) for group in kept]
        measures = {
            **timed_out,
            "dropped_groups": float(self._dropped),
            "servers_idle": self._idle,
            **self._stream.measures(),
        }
        self._dropped, self._idle = 0, 0.0
        self._connection.send(("groups", measures))
        send_groups(self._connection, [item.group for item in first], self._setup.parent)

    def _send_state(self) -> None:
        waiting = [*self._started, *self._restored]
        self._connection.send(("state", self._stream.state_dict() | {"backlog": state_of(waiting)}))

    def _load(self, state: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state)
        self._restored = [
            StartedPrompt(
                Group(self._processor.prompt(self._rows[item["row"]])),
                item.get("step", self._version),
                [response_of(values) for values in item["responses"]],
            )
            for item in state["backlog"]
        ]


def state_of(started: Sequence[StartedPrompt]) -> list[dict[str, Any]]:
    """Return rows, steps and responses of started prompts as plain values."""
    return [
        {
            "row": item.group.prompt.row.index,
            "step": item.step,
            "responses": [asdict(response) for response in item.responses],
        }
        for item in started
    ]


def serve(connection: Connection, setup: ProducerSetup) -> bool:
    """Produce until the trainer is gone. Returns False after an error; the error was sent to the
    trainer.
    """
    try:
        producer = Producer(setup, connection)
        producer.run()
    except (ValueError, RolloutServerError, RolloutRequestError, RewardStop) as error:
        connection.send(("error", error))
        return False
    producer.close()
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
