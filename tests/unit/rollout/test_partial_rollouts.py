"""Partial rollouts: what waits for a later step, what it records, and what a checkpoint keeps."""

import json

import pytest
import torch

from megavlm.data.processor import Prompt
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.protocol import Response, VersionSpan, is_complete
from megavlm.rollout.partial_rollouts import (
    PartialRolloutBuffer,
    TimedOutGroups,
    stale_tokens,
    staleness_metrics,
)
from megavlm.rollout.trajectory import Episode, Group
from megavlm.training.losses import engine_gap
from tests.columns import columns
from tests.unit.inference.prompts import make_prompt


def response(finish: str, *spans: tuple[str, int]) -> Response:
    bounds, start = [], 0
    for version, length in spans:
        bounds.append(VersionSpan(version, start, start + length))
        start += length
    return Response((5,) * start, (-1.0,) * start, finish, spans[-1][0], tuple(bounds))


DONE, PART = [response("stop", ("3", 2))] * 2, [response("abort", ("3", 1))] * 2


class Stream:
    """Prompts 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.next = 0

    def draw(self, count: int) -> list[Prompt]:
        self.next += count
        return [make_prompt(first_id=i) for i in range(self.next - count, self.next)]


def make_buffer(handling: str = "fail") -> PartialRolloutBuffer:
    return PartialRolloutBuffer(TimedOutGroups(handling, most=2))


def rows(partial_rollouts: PartialRolloutBuffer) -> list[int]:
    return [item["row"] for item in partial_rollouts.state_dict()]


def rolled_out(groups: list[Group], answers: list[list[Response]], enough: int) -> list[Group]:
    """Give the groups their answers and end the episodes of the first `enough` complete ones."""
    played = 0
    for group, answer in zip(groups, answers, strict=True):
        group.responses = answer
        group.episodes = [Episode(group.prompt)]
        if is_complete(answer) and played < enough:
            group.episodes[0].next_prompt = None
            played += 1
    return groups


def test_what_is_not_needed_waits_and_is_taken_first() -> None:
    buffer, stream = make_buffer(), Stream()
    groups = buffer.take(3, stream.draw)
    assert [group.prompt.row.index for group in groups] == [0, 1, 2]
    assert buffer.split(rolled_out(groups, [PART, DONE, DONE], 2)) == groups[1:]
    assert rows(buffer) == [0]

    groups = buffer.take(3, stream.draw)
    assert [group.prompt.row.index for group in groups] == [0, 3, 4]
    assert groups[0].responses == PART and groups[1].responses == ()
    assert not groups[0].episodes, "they are started anew"
    assert buffer.split(rolled_out(groups, [DONE, [], DONE], 2)) == [groups[0], groups[2]]
    assert rows(buffer) == [3]


def test_a_group_too_many_is_trained_on_in_the_next_step() -> None:
    buffer, stream = make_buffer(), Stream()
    groups = buffer.take(4, stream.draw)
    assert buffer.split(rolled_out(groups, [DONE] * 4, 2)) == groups[:2]
    again = buffer.take(2, stream.draw)
    assert [group.responses for group in again] == [DONE, DONE] and stream.next == 4
    assert rows(buffer) == []


def test_what_a_smaller_round_does_not_take_keeps_waiting() -> None:
    buffer, stream = make_buffer(), Stream()
    buffer.split(rolled_out(buffer.take(4, stream.draw), [PART] * 4, 4))
    groups = buffer.take(2, stream.draw)
    assert [group.prompt.row.index for group in groups] == [0, 1] and rows(buffer) == [2, 3]
    buffer.split(rolled_out(groups, [PART, DONE], 1))
    assert rows(buffer) == [0, 2, 3]


def test_a_checkpoint_keeps_prompts_and_tokens() -> None:
    buffer, stream = make_buffer(), Stream()
    mixed = [response("abort", ("2", 1), ("3", 2)), response("stop", ("2", 2))]
    buffer.split(rolled_out(buffer.take(3, stream.draw), [mixed, [], DONE], 1))
    state = json.loads(json.dumps(buffer.state_dict()))
    resumed = make_buffer()
    resumed.load_state_dict(state, lambda index: make_prompt(first_id=index))
    assert [list(group.responses) for group in resumed.take(2, stream.draw)] == [mixed, []]


@pytest.mark.parametrize(("handling", "asked_again"), [("drop", []), ("requeue", [0])])
def test_a_group_that_timed_out_is_counted_and_dropped_or_kept_for_the_next_step(
    handling: str, asked_again: list[int]
) -> None:
    buffer, stream = make_buffer(handling), Stream()
    groups = rolled_out(buffer.take(2, stream.draw), [[], DONE], 1)
    groups[0].timed_out = True
    assert buffer.split(groups) == groups[1:] and rows(buffer) == []
    assert buffer.end_step() == {"timed_out_groups": 1.0} and rows(buffer) == asked_again
    assert buffer.end_step() == {"timed_out_groups": 0.0}


def test_a_step_in_which_more_groups_time_out_than_it_needs_ends_the_run() -> None:
    buffer, stream = make_buffer("requeue"), Stream()
    groups = buffer.take(3, stream.draw)
    for group in groups:
        group.timed_out = True
    buffer.split(groups[:2])
    with pytest.raises(
        RolloutServerError, match=r"3 groups .*algorithm.prompts_per_step=2 .*raise"
    ):
        buffer.split(groups[2:])
    assert make_buffer("fail").end_step() == {}


def test_tokens_of_older_weights() -> None:
    one = response("stop", ("3", 1), ("5", 2))
    assert stale_tokens(one, 5).tolist() == [1, 0, 0] and stale_tokens(one, 6).tolist() == [1, 1, 1]
    other = response("length", ("5", 3))
    assert staleness_metrics([one, other]) == {
        "stale_share": pytest.approx(1 / 6),
        "stale_steps": 2.0,
        "staleness/0": 0.5,
        "staleness/1": 0.0,
        "staleness/2": 0.5,
    }
    assert staleness_metrics([other], 6)["staleness/1"] == 1.0
    assert staleness_metrics([other]) == {}


def test_the_gap_of_engines_is_told_by_tokens_of_the_present_weights() -> None:
    trainer, rollout = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-4.0, -2.0, -3.5])
    stale = columns(3, rollout_logprobs=rollout, is_stale=torch.tensor([True, False, False]))
    gap = engine_gap(trainer, stale)
    assert gap["engine_tokens"] == 2 and gap["largest_rollout_difference"] == 0.5
    fresh = columns(3, rollout_logprobs=rollout)
    assert engine_gap(trainer, fresh)["largest_rollout_difference"] == 3.0
