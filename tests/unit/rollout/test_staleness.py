"""Tokens that older weights sampled, and what is measured without them."""

import pytest
import torch

from megavlm.inference.protocol import Response, VersionSpan
from megavlm.rollout.staleness import stale_tokens, staleness_metrics
from megavlm.training.losses import engine_gap
from tests.support.columns import columns
from tests.support.responses import make_response


def response(finish: str, *spans: tuple[str, int]) -> Response:
    bounds, start = [], 0
    for version, length in spans:
        bounds.append(VersionSpan(version, start, start + length))
        start += length
    return make_response((5,) * start, (-1.0,) * start, finish, spans[-1][0], tuple(bounds))


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
