"""The end of the demo: one result of all its stages."""

import json
from pathlib import Path

import pytest

from megavlm.demo import pipeline
from megavlm.observability.result import build_result, write_result
from tests.unit.observability.runs import write_run


def test_the_times_add_up_to_the_whole_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)  # 14 s: five steps of 2 s, and two evaluations of 2 s
    write_result(tmp_path, build_result(tmp_path, steps=5, seed=0, extra_seconds={"model": 1.0}))
    stages = {"data": 3.0, "model": 2.0, "warm start": 10.0, "training": 20.0}
    pipeline._close(tmp_path, stages, {"model": tmp_path / "model"})
    result = json.loads((tmp_path / "result.json").read_text())
    assert sum(result["seconds_by_phase"].values()) == pytest.approx(35.0)
    assert result["seconds_by_phase"]["model"] == 3.0, "making it, and loading it"
    assert result["paths"]["model"] == str(tmp_path / "model")
    shown = capsys.readouterr().out
    assert "Reward per step" in shown and "35.0 s" in shown


def test_stages_are_announced_as_they_begin(capsys: pytest.CaptureFixture[str]) -> None:
    stage = pipeline._Stages()
    with stage("data", "draw images"):
        assert capsys.readouterr().out == "[0:00] 1 of 5: draw images\n"
    with stage("model", "make a model"):
        assert capsys.readouterr().out == "[0:00] 2 of 5: make a model\n"
    assert list(stage.seconds) == ["data", "model"]
