"""The groups of a step in a stream of batches, over fake servers: when they are handed over, in
which places, and what happens when servers restart, or groups have no signal.

The producer runs in a thread.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megavlm.config.schema import Config
from megavlm.data.processor import Processor
from megavlm.data.rows import Rows
from megavlm.families import family_of
from megavlm.rollout.buffer import StreamBatch
from megavlm.rollout.trajectory import Group
from tests.support.server_pools import external, push, wait_for
from tests.unit.rollout.test_ahead import (
    config,
    fake,
    files,
    in_thread,
    no_refit,
    num_asked,
    order,
    started,
    take,
)

__all__ = ["config", "fake", "files", "in_thread"]  # fixtures
pytestmark = pytest.mark.usefixtures("in_thread")

SIZE = 4  # prompts of a step
ANY = 1  # tokens of a streamed batch


@pytest.fixture
def stream(config: Config) -> Config:
    algorithm = replace(config.algorithm, prompts_per_step=SIZE)
    rollout = replace(config.rollout, streaming=True, max_staleness=0, pause_mode="abort")
    return replace(config, algorithm=algorithm, rollout=rollout)


class Late:
    """Holds back a fake's answers to the prompts of some rows, until they are released."""

    def __init__(self, fake: Any, config: Config, rows: Sequence[int]) -> None:
        self.fake, self._answer = fake, fake.answer
        processor = Processor(config.model.folder, config.data, family_of(config.model.folder))
        found = Rows(config.data.train_files, config.data)
        self.released = {processor.prompt(found[row]).short_ids: threading.Event() for row in rows}
        fake.answer = self.answer

    def answer(self, path: str, body: Any) -> Any:
        if path == "/generate" and (event := self.released.get(tuple(body["input_ids"][0]))):
            while not event.wait(0.02) and not self.fake.closed.is_set():
                pass
        return self._answer(path, body)

    def release(self, number: int) -> None:
        [*self.released.values()][number].set()


def rows_by_index(taken: Sequence[StreamBatch[Group]]) -> list[int]:
    """Return the rows of the step's groups in the order of their places, each taken once."""
    rows = {
        index: group.prompt.row.index
        for streamed in taken
        for index, group in zip(streamed.indices, streamed.groups, strict=True)
    }
    assert sum(len(streamed.groups) for streamed in taken) == len(rows)
    return [rows[index] for index in sorted(rows)]


def test_groups_are_handed_over_before_the_last_one_is_generated(stream: Config, fake: Any) -> None:
    drawn = order(stream, 2 * SIZE)
    late = Late(fake, stream, [drawn[2], drawn[0]])
    with external(fake) as pool:
        push(pool, 0, (fake,))
        source = started(stream, pool)
        arriving = source.stream(0, no_refit, ANY)
        taken = [next(arriving)]
        wait_for(lambda: num_asked(fake) == SIZE)
        while sum(len(streamed.groups) for streamed in taken) < 2:
            taken.append(next(arriving))
        assert not any(streamed.is_last for streamed in taken)
        assert sorted(index for streamed in taken for index in streamed.indices) == [1, 3]
        late.release(0)
        taken.append(next(arriving))
        assert taken[-1].indices == [2] and not taken[-1].is_last
        late.release(1)
        taken += arriving
        assert taken[-1].is_last and taken[-1].indices == [0]
        assert num_asked(fake) == SIZE, "no prompt of the next step starts"
        push(pool, 1, (fake,))
        taken_next = [*source.stream(1, no_refit, ANY)]
        source.close()
    assert rows_by_index(taken) == drawn[:SIZE]
    assert rows_by_index(taken_next) == drawn[SIZE:]
    versions = {
        e.responses[-1].weight_version for w in taken_next for g in w.groups for e in g.episodes
    }
    assert versions == {"1"}


def test_a_wave_has_enough_tokens(stream: Config, fake: Any) -> None:
    with external(fake) as pool:
        push(pool, 0, (fake,))
        source = started(stream, pool)
        (group, *_) = take(source, 0)
        push(pool, 1, (fake,))
        # Only all four groups have as many as three and a bit.
        (streamed,) = source.stream(1, no_refit, 3 * group.num_tokens + 9)
        source.close()
    assert streamed.is_last and len(streamed.groups) == SIZE
    responses = [episode.num_tokens for episode in group.episodes]
    assert group.num_tokens == len(group.start.token_ids) + sum(responses)


def test_a_server_that_restarts_within_a_step_is_refitted(stream: Config, fake: Any) -> None:
    """The weights do not change within a step, so what was taken before still counts."""
    drawn, refits = order(stream, SIZE), list[int]()
    late = Late(fake, stream, [drawn[0]])

    with external(fake) as pool:
        push(pool, 3, (fake,))
        source = started(stream, pool)

        def refit() -> None:
            push(pool, 3, (fake,))
            refits.append(sum(len(streamed.groups) for streamed in taken))

        arriving, taken = source.stream(3, refit, ANY), list[StreamBatch[Group]]()
        while sum(len(streamed.groups) for streamed in taken) < SIZE - 1:
            taken.append(next(arriving))
        fake.weight_version = "0"  # it restarted, with the weights that it starts from
        late.release(0)
        taken += arriving
        source.close()
    assert refits == [SIZE - 1]
    assert rows_by_index(taken) == drawn
    versions = {e.responses[-1].weight_version for w in taken for g in w.groups for e in g.episodes}
    assert versions == {"3"}


def test_groups_without_signal_wait_for_the_last_batch(stream: Config, fake: Any) -> None:
    """Further rounds fill their places. Rows with an odd answer have signal."""
    algorithm = replace(stream.algorithm, dynamic_sampling=9)
    reward = replace(stream.reward, name="group_rewards:of_two_numbers")
    config = replace(stream, algorithm=algorithm, reward=reward)
    found = Rows(config.data.train_files, config.data)
    drawn = order(config, 16)
    good = [row for row in drawn if int(found[row].answer) % 2]
    assert 0 < len({*good} & {*drawn[:SIZE]}) < SIZE
    with external(fake) as pool:
        push(pool, 0, (fake,))
        source = started(config, pool)
        taken = [*source.stream(0, no_refit, ANY)]
        source.close()
    assert [streamed.is_last for streamed in taken] == [False] * (len(taken) - 1) + [True]
    rows, left_out = rows_by_index(taken), [g.prompt.row.index for g in taken[-1].left_out]
    assert {*rows} <= {*good} and not {*left_out} & {*good}
    assert sorted(rows + left_out) == sorted(drawn[: len(rows) + len(left_out)])
    assert [row for row in rows if row in drawn[:SIZE]] == [r for r in drawn[:SIZE] if r in good]
