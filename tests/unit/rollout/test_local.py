"""Groups made in the trainer's process, over a fake server: what stops between steps, which weights
answer, and what a checkpoint keeps. Episodes and rewards are real.
"""

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megavlm.config.load import load
from megavlm.config.schema import Config
from megavlm.environments.curriculum import Curriculum
from megavlm.inference.client import RolloutClient
from megavlm.inference.requests import RequestLimits
from megavlm.observability.phases import Phases
from megavlm.rollout.local import LocalSource
from megavlm.rollout.recorded import RecordedRollouts
from megavlm.rollout.replay import ReplaySource
from megavlm.rollout.sampler import Sampler
from megavlm.rollout.trajectory import Group
from tests.support.server_pools import external, push
from tests.support.timeouts import scaled
from tests.unit.rollout.test_ahead import SIZE, N, backlog, config, fake, files, no_refit, order

__all__ = ["config", "fake", "files"]  # fixtures


@pytest.fixture
def partial(config: Config) -> Config:
    """Three prompts are started for a step of two."""
    rollout = replace(config.rollout, max_staleness=1, oversample=1.5, colocate=True)
    return replace(config, rollout=rollout)


@contextmanager
def source(config: Config, pool: Any) -> Iterator[tuple[LocalSource, RolloutClient]]:
    with RolloutClient(pool, RequestLimits(retry_delay=0.0)) as client:
        sampler = Sampler(config, client)
        made = LocalSource(sampler, Curriculum(config.curriculum), Phases())
        with closing(sampler), closing(made):
            yield made, client


def rows(groups: Sequence[Group]) -> list[int]:
    return [group.prompt.row.index for group in groups]


def take(source: LocalSource, version: int, refit: Callable[[], Any] = no_refit) -> list[Group]:
    (streamed,) = source.stream(version, refit)
    return list(streamed.groups)


def hold(fake: Any, config: Config, row: int) -> None:
    """Do not answer the first request of a row before it is aborted."""
    answer, sampler = fake.answer, Sampler(config, None)
    ids = sampler.processor.prompt(sampler.rows[row]).short_ids

    def answer_others(path: str, body: Any) -> Any:
        if path != "/generate" or tuple(body["input_ids"][0]) != ids:
            return answer(path, body)
        assert fake.aborted.wait(scaled(60))
        return [fake._item(ids, number, "0", aborted=True) for number in range(N)]

    fake.answer = answer_others


def test_responses_stop_between_steps_and_go_on_with_new_weights(
    partial: Config, fake: Any
) -> None:
    slow = order(partial, 1)[0]
    hold(fake, partial, slow)
    with external(fake) as pool, source(partial, pool) as (made, client):
        push(pool, 0, (fake,))
        first = take(made, 0)
        assert slow not in rows(first) and rows(first) == order(partial, 3)[1:]
        assert client.is_idle and "/abort_request" in fake.paths()
        (waiting,) = backlog(made.state_dict())
        assert waiting["row"] == slow and waiting["step"] == 0
        assert [values["finish"] for values in waiting["responses"]] == ["abort"] * N
        push(pool, 1, (fake,))
        groups = take(made, 1)
    assert rows(groups)[0] == slow, "it would be too old in the next step"
    spans = [[span.version for span in e.responses[0].spans] for e in groups[0].episodes]
    assert spans == [["0", "1"]] * N


def test_a_checkpoint_keeps_prompts_steps_and_tokens(partial: Config, fake: Any) -> None:
    slow = order(partial, 1)[0]
    hold(fake, partial, slow)
    with external(fake) as pool:
        push(pool, 0, (fake,))
        with source(partial, pool) as (made, _):
            take(made, 0)
            state = made.state_dict()
        # The release before had arrays in base64.
        values = {
            "token_ids": base64.b64encode(np.array([50, 51], "<i4").tobytes()).decode(),
            "logprobs": base64.b64encode(np.array([-0.5, -1.5], "<f4").tobytes()).decode(),
            "finish": "abort",
            "weight_version": "0",
            "spans": [{"version": "0", "start": 0, "end": 2}],
        }
        old = {**state, "backlog": [{"row": slow, "step": 0, "responses": [values] * N}]}
        push(pool, 1, (fake,))
        for saved in (state, old):
            with source(partial, pool) as (made, _):
                made.load_state_dict(saved)
                (group, _) = take(made, 1)
            assert rows([group]) == [slow] and group.step == 0
            response = group.episodes[0].responses[0]
            assert response.token_ids.tolist()[:2] == [50, 51] and len(response.token_ids) == 4
            assert response.logprobs.tolist() == [-0.5, -1.5] * 2
            assert response.token_ids.dtype == np.int32 and response.logprobs.dtype == np.float32


def test_only_the_step_s_weights_answer_unless_none_are_pushed(config: Config, fake: Any) -> None:
    config = replace(config, rollout=replace(config.rollout, max_staleness=0))
    refits: list[list[str]] = []
    with external(fake) as pool, source(config, pool) as (made, _):
        push(pool, 3, (fake,))
        fake.weight_version = "4"  # it restarted with other weights
        groups = take(made, 3, lambda: refits.append(push(pool, 3, (fake,))))
        assert refits == [[fake.url]]
        versions = {e.responses[0].weight_version for g in groups for e in g.episodes}
        assert versions == {"3"}
        fake.weight_version = "start"
        (streamed,) = made.stream(4, None)
        assert streamed.groups[0].episodes[0].responses[0].weight_version == "start"
    keys = [body["extra_key"].partition("-")[2] for body in fake.bodies("/generate")]
    assert set(keys[:-SIZE]) == {"3"} and keys[-1] == ""


def test_a_replay_of_experts_needs_recorded_ones(config: Config, fake: Any, tmp_path: Path) -> None:
    with external(fake) as pool, source(config, pool) as (made, _):
        push(pool, 0, (fake,))
        RecordedRollouts(tmp_path).save(1, take(made, 0))
    for key, reason in (("true", "has none in step 1: record them with"), ("false", None)):
        config = load(tmp_path / "recipe.yaml", [f"algorithm.routing_replay={key}"])
        sampler = Sampler(config, None)
        with closing(ReplaySource(sampler, str(tmp_path), Phases())) as replay:
            if reason is None:
                (streamed,) = replay.stream(0, None)
                assert len(streamed.groups) == SIZE
            else:
                with pytest.raises(ValueError, match=reason):
                    [*replay.stream(0, None)]
