"""Groups made within the step: what waits for a later step, what a checkpoint keeps, and dynamic
sampling. Episodes and rewards are real; a client answers by a script.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megavlm.config.load import load
from megavlm.config.schema import Config
from megavlm.data.processor import Prompt
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.environments.curriculum import Curriculum
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.protocol import Response, VersionSpan, is_complete
from megavlm.observability.phases import Phases
from megavlm.rollout.groups import select_groups
from megavlm.rollout.in_step import InStepSource
from megavlm.rollout.recorded import RecordedRollouts
from megavlm.rollout.replay import ReplaySource
from megavlm.rollout.sampler import Sampler
from megavlm.rollout.trajectory import Group
from tests.conftest import row, write_rows
from tests.support.responses import make_response, plain

RIGHT, FLAT = ("yes", "no"), ("no", "no")  # responses of a group with and without signal
PART, NOTHING, LATE = ("...",), (), None  # aborted responses, none, and a request that times out


class Client:
    """Answers the prompts of each call with the next items of a script."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.script: list[Any] = []
        self.asked: list[list[int]] = []  # rows, call by call
        self.prompts: list[Prompt] = []
        self.begun: list[Sequence[Response]] = []  # what earlier calls had of these prompts
        self.options: dict[str, Any] = {}

    def generate(
        self, prompts: Sequence[Prompt], *, n: int, begun: Any, enough: int, follow: Any, **how: Any
    ) -> list[list[Response]]:
        self.asked.append([prompt.row.index for prompt in prompts])
        self.prompts, self.begun, self.options = list(prompts), list(begun), how
        answers = []
        for place in range(len(prompts)):
            item = self.script.pop(0)
            answers.append([] if item is LATE else [self.respond(text) for text in item])
            if item is LATE:
                self.runner.run(follow(place, [], None))
            elif is_complete(answers[-1]) and enough:
                self.runner.run(follow(place, answers[-1], None))
                enough -= 1
        return answers

    def respond(self, text: str) -> Response:
        if text == "...":
            return make_response((7,), (-1.0,), "abort", "0", (VersionSpan("0", 0, 1),))
        ids = (*self.tokenizer(text)["input_ids"], self.eos_id)
        return make_response(ids, (-0.5,) * len(ids), "stop", "0", (VersionSpan("0", 0, len(ids)),))

    def use(self, processor: Any) -> None:
        self.tokenizer, self.eos_id = processor._tokenizer, processor.eos_id


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_tiny_model(folder / "model", ["What colour? yes no"] * 20, seed=0)
    rows = [row(problem=f"<image>What colour? {i}", answer="yes") for i in range(16)]
    write_rows(folder / "rows.parquet", rows)
    return folder


@pytest.fixture
def client() -> Client:
    return Client()


@contextmanager
def source(files: Path, client: Client, *overrides: str) -> Iterator[InStepSource]:
    path = files / "recipe.yaml"
    path.write_text(
        f"""
run: {{dir: {files / "run"}}}
model: {{folder: {files / "model"}}}
data: {{train_files: [{files / "rows.parquet"}], max_prompt_tokens: 64}}
algorithm: {{name: grpo, prompts_per_step: 2, responses_per_prompt: 2, steps: 9}}
rollout: {{mode: external, urls: ["http://127.0.0.1:1"]}}
reward: {{name: vqa, workers: 1}}
"""
    )
    config: Config = load(path, list(overrides))
    client.script.clear()
    sampler = Sampler(config, client)  # type: ignore[arg-type]
    client.use(sampler.processor)
    made = InStepSource(sampler, Curriculum(config.curriculum), Phases())
    with closing(sampler), closing(made):
        yield made


def take(source: InStepSource, client: Client, *script: Any, version: int = 0) -> list[Group]:
    client.script += script
    groups = source.take(2, version, lambda: None)
    assert not client.script, "every group of the script was asked for"
    return groups


def rows(groups: Sequence[Group]) -> list[int]:
    return [group.prompt.row.index for group in groups]


def waiting(source: InStepSource) -> list[int]:
    return [item["row"] for item in source.state_dict()["backlog"]]


OVERSAMPLE = "rollout.oversample=1.5"


def test_a_group_that_is_not_needed_waits_and_comes_first(files: Path, client: Client) -> None:
    with source(files, client, OVERSAMPLE) as made:
        groups = take(made, client, PART, RIGHT, RIGHT)
        (asked,) = client.asked
        assert rows(groups) == asked[1:] and waiting(made) == asked[:1]
        assert all(group.is_played for group in groups)

        again = take(made, client, RIGHT, NOTHING, RIGHT, version=1)
        assert client.asked[1][0] == asked[0] and not set(client.asked[1][1:]) & set(asked)
        assert [r.finish for r in client.begun[0]] == ["abort"] and not client.begun[1]
        assert rows(again) == [client.asked[1][0], client.asked[1][2]]
        assert waiting(made) == client.asked[1][1:2]


def test_a_group_too_many_is_trained_on_in_the_next_step(files: Path, client: Client) -> None:
    with source(files, client, "rollout.oversample=2.0") as made:
        groups = take(made, client, RIGHT, RIGHT, RIGHT, RIGHT)
        (asked,) = client.asked
        assert rows(groups) == asked[:2] and waiting(made) == asked[2:]
        again = take(made, client, RIGHT, RIGHT, RIGHT, RIGHT, version=1)
        assert rows(again) == asked[2:] and all(map(is_complete, client.begun[:2]))


def test_requests_name_their_weights_unless_none_are_pushed(files: Path, client: Client) -> None:
    with source(files, client, "rollout.timed_out=drop") as made:
        take(made, client, RIGHT, RIGHT, version=3)
        assert client.options["weight_version"] == 3 and client.options["skip_timed_out"]
        client.script += [RIGHT, RIGHT]
        made.take(2, 3, None)
        assert client.options["weight_version"] is None


def test_a_checkpoint_keeps_prompts_steps_and_tokens(files: Path, client: Client) -> None:
    with source(files, client, OVERSAMPLE) as made:
        take(made, client, ("...", "yes"), RIGHT, RIGHT, version=4)
        state = json.loads(json.dumps(made.state_dict()))
    # Older checkpoints have no step, and tokens and log-probs as lists.
    (entry,), first = state["backlog"], client.asked[0][0]
    old_responses = [
        {**values, "token_ids": [7, *others], "logprobs": [-1.0, *others]}
        for values, others in zip(entry["responses"], ([], [1, 2]), strict=True)
    ]
    old = {**state, "backlog": [{"row": entry["row"], "responses": old_responses}]}
    for saved, step in ((state, 4), (old, 5)):
        with source(files, client, OVERSAMPLE) as made:
            made.load_state_dict(saved)
            (group, _) = take(made, client, RIGHT, RIGHT, PART, version=5)
            assert rows([group]) == [first] and group.step == step
            finishes = [response.finish for response in client.begun[0]]
            assert finishes == ["abort", "stop"]
            (begun, complete) = client.begun[0]
            assert plain(begun)[:2] == ([7], [-1.0]) and len(complete.token_ids) > 1
            assert begun.token_ids.dtype == np.int32 and begun.logprobs.dtype == np.float32
            assert not set(client.asked[-1][1:]) & set(client.asked[0])


def test_episodes_that_are_started_again_start_as_before(files: Path, client: Client) -> None:
    """An environment that makes its prompt from the seed shows the one that was begun."""
    name = "environment.name=user_environments:Seeded"
    with source(files, client, OVERSAMPLE, name) as made:
        take(made, client, PART, RIGHT, RIGHT)
        begun = client.prompts[0]
        take(made, client, RIGHT, RIGHT, PART, version=1)
        assert client.prompts[0].token_ids.equal(begun.token_ids)
        assert not client.prompts[1].token_ids.equal(begun.token_ids)


@pytest.mark.parametrize(("handling", "is_asked_again"), [("drop", False), ("requeue", True)])
def test_a_group_that_times_out_is_replaced_and_dropped_or_kept_for_a_later_step(
    files: Path, client: Client, handling: str, is_asked_again: bool
) -> None:
    with source(files, client, f"rollout.timed_out={handling}") as made:
        groups = take(made, client, LATE, RIGHT, RIGHT)
        ((late, other), (replacement,)) = client.asked
        assert rows(groups) == [other, replacement]
        assert made.measures["timed_out_groups"] == 1
        assert waiting(made) == [late] * is_asked_again
        take(made, client, RIGHT, RIGHT, version=1)
        assert (client.asked[2][0] == late) == is_asked_again
        assert made.measures["timed_out_groups"] == 0


def test_a_step_in_which_more_groups_time_out_than_it_needs_ends_the_run(
    files: Path, client: Client
) -> None:
    with source(files, client, "rollout.timed_out=requeue") as made:
        with pytest.raises(
            RolloutServerError, match=r"3 groups .*algorithm.prompts_per_step=2 .*raise"
        ):
            take(made, client, LATE, LATE, LATE, RIGHT)


def test_without_dynamic_sampling_groups_are_taken_as_they_come(
    files: Path, client: Client
) -> None:
    with source(files, client) as made:
        groups = take(made, client, FLAT, RIGHT)
    assert rows(select_groups(groups, 2)) == rows(groups) == client.asked[0]


def test_groups_without_signal_make_way_for_further_prompts(files: Path, client: Client) -> None:
    with source(files, client, "algorithm.dynamic_sampling=9") as made:
        groups = take(made, client, FLAT, FLAT, RIGHT, FLAT, RIGHT)
    assert list(map(len, client.asked)) == [2, 2, 1], "only what is missing"
    assert rows(select_groups(groups, 2)) == [client.asked[1][0], client.asked[2][0]]


@pytest.mark.parametrize("rounds", [1, 4])
def test_rounds_end_where_nothing_teaches_and_a_step_has_all_its_groups(
    files: Path, client: Client, rounds: int
) -> None:
    with source(files, client, f"algorithm.dynamic_sampling={rounds}") as made:
        groups = take(made, client, *[FLAT] * 2 * (1 + rounds))
    assert len(select_groups(groups, 2)) == 2 and len(groups) == 2 * (1 + rounds)


def test_a_replay_of_experts_needs_recorded_ones(
    files: Path, client: Client, tmp_path: Path
) -> None:
    with source(files, client) as made:
        RecordedRollouts(tmp_path).save(1, take(made, client, RIGHT, RIGHT))
    for key, reason in (("true", "has none in step 1: record them with"), ("false", None)):
        config = load(files / "recipe.yaml", [f"algorithm.routing_replay={key}"])
        sampler = Sampler(config, None)
        with closing(ReplaySource(sampler, str(tmp_path), Phases())) as replay:
            if reason is None:
                assert len(replay.take(2, 0, None)) == 2
            else:
                with pytest.raises(ValueError, match=reason):
                    replay.take(2, 0, None)
