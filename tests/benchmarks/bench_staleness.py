"""`make bench`: prints a simulation of rollouts while training (`rollout.max_staleness`), partial
rollouts (`rollout.oversample`) among them, of a 7B model on 4 + 4 GPUs. Nothing in it is measured
on a GPU.

Modelled are the times of the planner: a server's decoding step at its number of running responses,
each of the mean number of tokens, prefill, the trainer's phases, and the sync, under which servers
stand still. Not covered: rewards, the transfer of groups, and responses that are computed again.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megavlm.parallel import platform

platform.install()  # before the first import of megatron-core

from megavlm.planner.time import StepModel  # noqa: E402
from megavlm.rollout.buffer import GroupBuffer, Started, Window  # noqa: E402
from tests.unit.planner.estimates import SET_UPS, resolved  # noqa: E402

STEPS = 12  # the first third is not counted
CHUNK = 8  # tokens after which a server looks for responses that have ended
# Lengths of the texts of 330 problems of MATH-Vision over their mean, at every twentieth of them.
LENGTHS = (
    0.15, 0.42, 0.55, 0.62, 0.73, 0.77, 0.82, 0.86, 0.92, 0.95, 0.98,
    1.02, 1.05, 1.10, 1.17, 1.23, 1.29, 1.35, 1.42, 1.61, 2.42,
)  # fmt: skip


def as_texts(chance: random.Random) -> float:
    place = chance.random() * (len(LENGTHS) - 1)
    low = int(place)
    return LENGTHS[low] + (place - low) * (LENGTHS[low + 1] - LENGTHS[low])


def long_tailed(chance: random.Random) -> float:
    """Return a length of a log-normal distribution, of which one in a thousand is 9 x the mean."""
    return chance.lognormvariate(0.0, 0.8)


# Shape of lengths, and the longest over the mean: the recipe's limit, and a distant one.
# rollout.max_staleness and rollout.oversample.
SETTINGS: tuple[tuple[int, float | None], ...] = (
    (0, None),
    (1, None),
    (2, None),
    (2, 2.0),
    (2, 2.5),
    (4, 2.5),
)
CASES: tuple[tuple[Callable[[random.Random], float], int], ...] = ((as_texts, 2), (long_tailed, 8))


def drawn(shape: Callable[[random.Random], float], mean: int, longest: int) -> list[int]:
    """Return lengths of a shape, cut at `longest`, whose mean is `mean`."""
    chance = random.Random(0)
    relative, scale = [shape(chance) for _ in range(STEPS * 4096)], float(mean)
    for _ in range(10):
        scale *= mean * len(relative) / sum(min(r * scale, longest) for r in relative)
    return [max(1, min(round(r * scale), longest)) for r in relative]


@dataclass
class Server:
    """One server, whose running responses get a token each in a step of decoding. `left`: tokens of
    responses that run, and their groups; `waiting`: of those that do not yet.
    """

    model: StepModel
    most: int
    time: float = 0.0
    busy: float = 0.0
    prefill: float = 0.0  # seconds of prompts that came
    left: list[tuple[int, int]] = field(default_factory=list)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    open: dict[int, int] = field(default_factory=dict)  # responses that a group still lacks

    def add(self, group: int, lengths: list[int]) -> None:
        self.open[group] = len(lengths)
        self.waiting += [(length, group) for length in lengths]
        self.prefill += self.model.server.prefill_seconds(self.model.step)

    def run(self, end: float, is_enough: Callable[[], object] | None = None) -> None:
        """Generate up to a time, or until enough groups are complete."""
        while self.time < end and not (is_enough and is_enough()):
            room = self.most - len(self.left)
            self.left, self.waiting = self.left + self.waiting[:room], self.waiting[room:]
            if not self.left:
                assert is_enough is None, "a group is waited for that was not started"
                self.time = end
                return
            context = self.model.step.prompt + self.model.step.resident
            seconds = self.model.server.decode_seconds(len(self.left), context)
            tokens = max(CHUNK, min(left for left, _ in self.left))
            if is_enough is None:
                tokens = min(tokens, int((end - self.time) / seconds) + 1)
            self.busy += tokens * seconds + self.prefill
            self.time += tokens * seconds + self.prefill
            self.prefill = 0.0
            running = [(left - tokens, group) for left, group in self.left]
            for left, group in running:
                if left <= 0:
                    self.open[group] -= 1
            self.left = [item for item in running if item[0] > 0]


@dataclass(frozen=True)
class Result:
    steps_per_hour: float
    trainer_idle: float  # shares of the time
    server_idle: float
    staleness: float  # mean age of a group's weights in steps


def simulate(
    model: StepModel, lengths: list[int], k: int, oversample: float | None = None
) -> Result:
    """Train STEPS steps with a single server. A step's worth of prompts is started when a step has
    ended, k more at the beginning; steps train them in their order. With `oversample`, prompts of
    that many steps are started at the beginning, and steps train those that `GroupBuffer` chooses.
    """
    step, train, sync = model.step, sum(model.training().values()), model.seconds()["sync"]
    server = Server(model, model.server.max_running(step))
    window = Window(
        per_step=step.prompts,
        steps_started=oversample or k + 1,
        staleness=k,
        order="oldest" if oversample else "drawn",
    )
    buffer: GroupBuffer[int] = GroupBuffer(window)
    versions: list[int] = []
    playing: list[Started[int]] = []
    waited, counted_from = 0.0, STEPS // 3
    start = now = busy = 0.0

    def begin(version: int) -> None:
        buffer.begin(version)
        for _ in range(buffer.allow()[1]):
            place = len(versions) * step.responses
            server.add(len(versions), lengths[place : place + step.responses])
            playing.append(buffer.start(len(versions), version))
            versions.append(version)

    def take(trained: list[int]) -> bool:
        """Add the groups of a step to `trained` once they are complete. Returns True then."""
        for item in [item for item in playing if not server.open[item.group]]:
            playing.remove(item)
            buffer.played(item, item.version, 1, True)
        if not trained and (streamed := buffer.take()):
            trained += streamed.groups
        return bool(trained)

    begin(0)
    ages: list[int] = []
    for number in range(STEPS):
        if number == counted_from:
            start, waited, busy = now, 0.0, server.busy
        server.run(now)
        trained: list[int] = []
        if not take(trained):
            server.run(float("inf"), partial(take, trained))
        ages += [number - versions[group] for group in trained]
        waited += max(0.0, server.time - now)
        now = max(now, server.time) + train
        server.run(now)
        server.time = now = max(now, server.time) + sync  # it stands still
        begin(number + 1)
    total, count = now - start, STEPS - counted_from
    ages = ages[counted_from * step.prompts :]
    return Result(
        count / total * 3600,
        waited / total,
        1 - (server.busy - busy) / total,
        sum(ages) / len(ages),
    )


def bench_staleness(tmp_path: Path) -> None:
    for shape, limit in CASES:
        for set_up in SET_UPS[:2]:
            cluster = set_up.cluster
            config, hf_config = resolved(set_up, tmp_path)
            model = StepModel(config, hf_config, cluster.trainers, cluster.servers)
            mean = model.step.response
            made = drawn(shape, mean, limit * mean)
            results = [simulate(model, made, *settings) for settings in SETTINGS]
            print(
                f"\n{set_up.name}, {cluster.name} GPUs, {shape.__name__}, up to {limit} x the mean"
            )
            for (k, oversample), found in zip(SETTINGS, results, strict=True):
                faster = found.steps_per_hour / results[0].steps_per_hour
                print(
                    f"  max_staleness {k}, oversample {oversample or 1:3.1f}: "
                    f"{found.steps_per_hour:5.1f} steps/h, {faster:4.2f} x; "
                    f"idle: trainer {found.trainer_idle:4.0%}, servers {found.server_idle:4.0%}; "
                    f"age {found.staleness:.1f}"
                )
