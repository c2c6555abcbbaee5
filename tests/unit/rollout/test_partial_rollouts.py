"""Partial rollouts: what waits for a later step, what it records, and what a checkpoint keeps."""

import json

import pytest
import torch

from megavlm.data.processor import Prompt
from megavlm.inference.protocol import Response, VersionSpan
from megavlm.rollout.partial_rollouts import PartialRolloutBuffer, older, staleness
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


def rows(partial_rollouts: PartialRolloutBuffer) -> list[int]:
    return [item["row"] for item in partial_rollouts.state_dict()]


def test_what_is_not_needed_waits_and_is_asked_first() -> None:
    partial_rollouts, stream = PartialRolloutBuffer(), Stream()
    asked = partial_rollouts.ask(2, 1.5, stream.draw)
    assert [item.prompt.row.index for item in asked] == [0, 1, 2]
    kept = partial_rollouts.split(asked, [PART, DONE, DONE], 2)
    assert kept == [[], DONE, DONE] and rows(partial_rollouts) == [0]

    asked = partial_rollouts.ask(2, 1.5, stream.draw)
    assert [item.prompt.row.index for item in asked] == [0, 3, 4]
    assert list(asked[0].responses) == PART and asked[1].responses == ()
    kept = partial_rollouts.split(asked, [DONE, [], DONE], 2)
    assert kept == [DONE, [], DONE] and rows(partial_rollouts) == [3]


def test_a_group_too_many_is_trained_on_in_the_next_step() -> None:
    partial_rollouts, stream = PartialRolloutBuffer(), Stream()
    asked = partial_rollouts.ask(2, 2.0, stream.draw)
    assert partial_rollouts.split(asked, [DONE] * 4, 2) == [DONE, DONE, [], []]
    again = partial_rollouts.ask(2, 1.0, stream.draw)
    assert [list(item.responses) for item in again] == [DONE, DONE] and stream.next == 4
    assert rows(partial_rollouts) == []


def test_what_a_smaller_round_does_not_ask_for_keeps_waiting() -> None:
    partial_rollouts, stream = PartialRolloutBuffer(), Stream()
    partial_rollouts.split(partial_rollouts.ask(4, 1.0, stream.draw), [PART] * 4, 4)
    asked = partial_rollouts.ask(1, 2.0, stream.draw)
    assert [item.prompt.row.index for item in asked] == [0, 1] and rows(partial_rollouts) == [2, 3]
    partial_rollouts.split(asked, [PART, DONE], 1)
    assert rows(partial_rollouts) == [0, 2, 3]


def test_a_checkpoint_keeps_prompts_and_tokens() -> None:
    partial_rollouts, stream = PartialRolloutBuffer(), Stream()
    mixed = [response("abort", ("2", 1), ("3", 2)), response("stop", ("2", 2))]
    partial_rollouts.split(partial_rollouts.ask(3, 1.0, stream.draw), [mixed, [], DONE], 1)
    state = json.loads(json.dumps(partial_rollouts.state_dict()))
    resumed = PartialRolloutBuffer()
    resumed.load_state_dict(state, lambda index: make_prompt(first_id=index))
    assert [list(item.responses) for item in resumed.ask(2, 1.0, stream.draw)] == [mixed, []]


def test_without_oversampling_nothing_waits() -> None:
    partial_rollouts, stream = PartialRolloutBuffer(), Stream()
    assert (
        len(partial_rollouts.ask(3, 1.0, stream.draw)) == 3 and partial_rollouts.state_dict() == []
    )


def test_tokens_of_older_weights() -> None:
    one = response("stop", ("3", 1), ("5", 2))
    assert older(one, 5).tolist() == [1, 0, 0] and older(one, 6).tolist() == [1, 1, 1]
    other = response("length", ("5", 3))
    assert staleness([one, other]) == {"stale_share": pytest.approx(1 / 6), "stale_steps": 2.0}
    assert staleness([other]) == {}


def test_the_gap_of_engines_is_told_by_tokens_of_the_present_weights() -> None:
    trainer, rollout = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-4.0, -2.0, -3.5])
    stale = columns(3, rollout_logprobs=rollout, is_stale=torch.tensor([True, False, False]))
    gap = engine_gap(trainer, stale)
    assert gap["engine_tokens"] == 2 and gap["largest_rollout_difference"] == 0.5
    fresh = columns(3, rollout_logprobs=rollout)
    assert engine_gap(trainer, fresh)["largest_rollout_difference"] == 3.0
