"""`megavlm evaluate` of a checkpoint against the HuggingFace folder that it was imported from."""

import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from tests.e2e.conftest import World

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

QUESTIONS = 12


def test_a_checkpoint_against_its_own_folder(world: World) -> None:
    model, checkpoint = world.root / "model", world.root / "imported"
    convert = [sys.executable, "-m", "checkpoint_tools", "import", str(model), str(checkpoint)]
    subprocess.run(convert, check=True, capture_output=True)
    recipe = world.recipe("compared", evaluation={"sampled": False, "shuffled": False})
    models = ("--model", checkpoint, "--baseline", model, "--episodes", str(QUESTIONS))
    done = world.megavlm("evaluate", recipe, *models)
    assert done.returncode == 0, done.stderr
    run = world.root / "compared"
    result = json.loads((run / "evaluation.json").read_text())
    assert [found["name"] for found in result["models"]] == [str(checkpoint), str(model)]
    assert [found["questions"] for found in result["models"]] == [QUESTIONS] * 2
    share = result["greedy"]["overall"]["share"]
    assert [found["overall"]["pass@1"]["value"] for found in result["models"]] == [share] * 2
    test = result["comparison"]["accuracy"]
    assert (test["difference"], test["p_value"], test["count"]) == (0, 1, QUESTIONS)
    records = pq.read_table(run / "evaluation.parquet").to_pylist()
    first, second = records[:QUESTIONS], records[QUESTIONS:]
    assert [r["response"] for r in first] == [r["response"] for r in second]
    assert {r["model"] for r in second} == {str(model)}
    assert (run / "evaluation.html").read_text().count("<article") == QUESTIONS
