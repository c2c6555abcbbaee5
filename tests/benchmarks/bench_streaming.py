"""`make bench`: prints the seconds of a step whose groups arrive one after the other, in a stream
of batches and all at once, and the share in which the trainer waits. One rank trains a tiny model;
a source in place of servers hands over groups when their time has come. Its clock is the process's
time on a core and the time that the trainer would wait, so that other work on the machine does not
count.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megavlm.config.load import load
from megavlm.data.processor import Prompt
from megavlm.rewards.base import Score
from megavlm.rollout.buffer import StreamBatch
from megavlm.rollout.trajectory import Episode, Group
from tests.conftest import row, write_rows
from tests.parity.table import Ranks
from tests.support.fork import launch
from tests.support.random_images import image
from tests.support.responses import make_response
from tests.support.trainers import PROMPTS, RESPONSES, Source, recipe, trainer_of

STEPS, LENGTH = 5, 240  # tokens of a response
LONG = {"data": {"pack_tokens": 1024}, "rollout": {"max_new_tokens": LENGTH}}
# Times at which groups arrive, in parts of the rollout: lengths that are even, and a long tail.
ARRIVALS = {
    "one after the other": [(place + 1) / PROMPTS for place in range(PROMPTS)],
    "all but one by a third": [*[(place + 1) / 18 for place in range(PROMPTS - 1)], 1.0],
    "all at the end": [1.0] * PROMPTS,
}


def long_group(prompt: Prompt, index: int) -> Group:
    episodes = []
    for number in range(RESPONSES):
        episode, tokens = Episode(prompt), range(LENGTH)
        response = make_response(tokens, [-5.5] * LENGTH, "stop", "0")
        reward = float((index + number) % 2)
        episode.add_turn(response, "", reward, Score(reward, False), None)
        episodes.append(episode)
    return Group(prompt, episodes=episodes)


class Slow(Source):
    """A rollout of `seconds`, whose groups arrive at `parts` of it. waited: Seconds in which the
    trainer waited for them.
    """

    seconds, parts, waited = 0.0, [0.0] * PROMPTS, 0.0

    def stream(
        self, version: int, refit: Any, least_tokens: int | None = None
    ) -> Iterator[StreamBatch[Group]]:
        begun, places = self.now(), [*range(PROMPTS)]
        groups = [long_group(self._prompts[place], place) for place in places]
        if least_tokens is None:
            self._wait(self.seconds)
        while places:
            arrives = self.seconds * self.parts[places[0]]
            self._wait(max(0.0, arrives - (self.now() - begun)))
            passed = self.now() - begun
            ready = [place for place in places if self.seconds * self.parts[place] <= passed]
            places = [place for place in places if place not in ready]
            yield StreamBatch([groups[place] for place in ready], ready, is_last=not places)

    def now(self) -> float:
        return time.process_time() + self.waited

    def _wait(self, seconds: float) -> None:
        self.waited += seconds


def steps(path: Path, overlap: bool, seconds: float, parts: list[float]) -> tuple[float, float]:
    """Return the seconds of the quickest step, and the share of them in which the trainer waits."""
    trainer = trainer_of(load(path, [f"rollout.streaming={str(overlap).lower()}"]), Slow)
    source = trainer.source
    trainer.driver.recorder.record_step = lambda *_: None
    trainer.train_step()  # warms up; the policy is the reference
    source.seconds, source.parts, found = seconds, parts, []
    for _ in range(STEPS):
        begun, waited = source.now(), source.waited
        trainer.train_step()
        total = source.now() - begun
        found.append((total, (source.waited - waited) / total))
    return min(found)


def bench_streaming(tmp_path: Path) -> None:
    rows = [
        row(problem="<image>How many?", images=[{"bytes": image(96, 96, i), "path": None}])
        for i in range(PROMPTS)
    ]
    write_rows(tmp_path / "rows.parquet", rows)
    path = recipe(tmp_path, tmp_path, "qwen2_5_vl", Ranks(), **LONG)
    ((work, _),) = launch(1, steps, path, False, 0.0, [0.0] * PROMPTS)
    rollout = 1.5 * work
    print(f"\n{work:.2f} s of training, and groups that arrive within {rollout:.2f} s")
    print(f"{'groups arrive':24} {'at once':>8} {'in stream':>9} {'ratio':>6}   trainer waits")
    for name, parts in ARRIVALS.items():
        ((serial, idle),) = launch(1, steps, path, False, rollout, parts)
        ((stream, waits),) = launch(1, steps, path, True, rollout, parts)
        print(
            f"{name:24} {serial:6.2f} s {stream:7.2f} s {serial / stream:5.2f}x   "
            f"{idle:.0%}, {waits:.0%}"
        )
