"""`megavlm evaluate` of a model that is always right, and what stands between that and its page."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from megavlm.config.load import load
from megavlm.data.processor import Prompt
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.evaluation.result import EvaluationResult
from megavlm.inference.protocol import Response
from megavlm.run.evaluate import ModelPlayer, write_files
from tests.support.responses import make_response

GREEDY = {"sampled": False, "shuffled": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("model") / "hf"
    make_tiny_model(folder, ["Colour?", "red"], seed=0, num_layers=1, vision_depth=1)
    return {"folder": str(folder)}


class Right:
    """A client whose servers answer what the row says."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.runner = tokenizer, asyncio.Runner()

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    async def generate(
        self, prompts: Sequence[Prompt], *, n: int, on_complete: Any, **_: Any
    ) -> list[list[Response]]:
        answers = [[self._respond(prompt)] * n for prompt in prompts]
        for index, answer in enumerate(answers):
            await on_complete(index, answer, self.ask)
        return answers

    async def ask(self, *_: Any, **__: Any) -> Response:
        raise AssertionError("an episode of one turn asks once")

    def _respond(self, prompt: Prompt) -> Response:
        ids = tuple(self._tokenizer(prompt.row.answer)["input_ids"])
        return make_response(ids, (0.0,) * len(ids), "stop", "0")


def evaluated(recipe: Path, *overrides: str) -> EvaluationResult:
    config = load(recipe, list(overrides))
    client: Any = Right(None)
    player = ModelPlayer(config, client)
    client._tokenizer = player._sampler.processor._tokenizer
    try:
        result = player.measures()
        Path(config.run.dir).mkdir()
        write_files(Path(config.run.dir), result, [player.candidate("m")])
    finally:
        player.close()
    return result


def test_a_reward_that_cannot_be_reached_is_told_everywhere(
    model: dict[str, str], write_recipe: Callable[..., Path], tmp_path: Path, capsys: Any
) -> None:
    """A closed port is not a bad model."""
    reward = {"name": "http://127.0.0.1:9/score", "options": {"attempts": 1}}
    recipe = write_recipe(model=model, reward=reward, evaluation=GREEDY)
    result = evaluated(recipe)
    assert result.greedy.overall.share == 0 and result.failures == {"remote": 2}
    told = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert told["failures"] == told["models"][0]["failures"] == {"remote": 2}
    records = pq.read_table(tmp_path / "run" / "evaluation.parquet").to_pylist()
    assert [record["failure"] for record in records] == ["remote"] * 2
    sentence = "2 responses count as incorrect because their reward failed (remote 2)"
    assert f"m: {sentence}" in (tmp_path / "run" / "evaluation.html").read_text()
    assert capsys.readouterr().out.count(sentence) == 2


def test_test_answers_are_not_what_a_blind_model_has_learnt(
    model: dict[str, str], write_recipe: Callable[..., Path]
) -> None:
    recipe = write_recipe(model=model, evaluation=GREEDY)
    assert evaluated(recipe, "run.dir=" + str(recipe.parent / "a")).blind is not None
    without = evaluated(recipe, "run.dir=" + str(recipe.parent / "b"), "data.train_files=[]")
    assert without.greedy.overall.share == 1
    assert without.blind is None and without.valid is None
