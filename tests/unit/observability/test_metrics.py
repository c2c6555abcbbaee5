"""Metrics files: what is written, and that a kill and a resume leave each step once."""

import json
import math
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megavlm.observability.metrics import EVALUATIONS_FILE, METRICS_FILE, MetricsWriter
from megavlm.observability.phases import Phases
from megavlm.observability.records import append_record, read_records
from tests.support.glossary import unexplained

from .runs import evaluation, metrics


def steps(folder: Path, name: str = METRICS_FILE) -> list[int]:
    return [record["step"] for record in read_records(folder / name)]


def write(folder: Path, start_step: int, last: int, reward: float = 0.0) -> None:
    with MetricsWriter(folder, start_step) as writer:
        for step in range(start_step + 1, last + 1):
            writer.write(step, {"reward": reward})


def test_a_step_is_one_line_with_its_metrics(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"reward": 0.5, "seconds/rollout": 2})
    (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()
    record = json.loads(line)
    assert record.pop("time") > 0
    assert record == {"step": 1, "reward": 0.5, "seconds/rollout": 2.0}


def test_the_last_step_is_text_for_prometheus_while_the_run_lives(tmp_path: Path) -> None:
    text = tmp_path / "metrics.prom"
    with MetricsWriter(tmp_path) as writer:
        for step, reward in ((1, 0.25), (2, math.nan)):
            writer.write(step, {"reward": reward, 'reward/a "b"\n': 0.5})
        (family,) = text_string_to_metric_families(text.read_text())
        values = {sample.labels["name"]: sample.value for sample in family.samples}
        assert {sample.labels["run"] for sample in family.samples} == {tmp_path.name}
        assert math.isnan(values.pop("reward")) and values.pop("time") > 0
        assert values == {"step": 2, 'reward/a "b"\n': 0.5}
    assert not text.exists()


def test_a_resume_drops_what_lies_beyond_it(tmp_path: Path) -> None:
    write(tmp_path, 0, 5, reward=0.1)
    write(tmp_path, 3, 6, reward=0.9)
    records = read_records(tmp_path / METRICS_FILE)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["reward"] for record in records] == [0.1] * 3 + [0.9] * 3


def test_a_run_from_the_start_drops_everything(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write_evaluation(0, evaluation(0.5))
        writer.write(1, {"reward": 0.5})
    MetricsWriter(tmp_path).close()
    assert steps(tmp_path) == [] and steps(tmp_path, EVALUATIONS_FILE) == []


def test_a_line_torn_by_a_kill_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, 0, 2)
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write('{"step": 3, "é'.encode()[:-1])  # in the middle of a letter
    assert steps(tmp_path) == [1, 2]
    write(tmp_path, 2, 3)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_separator_of_lines_in_a_text_does_not_tear_it(tmp_path: Path) -> None:
    text = "a\u2028b\x85c\x0cd\ne"
    append_record(tmp_path / "records.jsonl", {"text": text})
    assert read_records(tmp_path / "records.jsonl") == [{"text": text}]


def test_values_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": math.nan, "gradient_norm": math.inf})
    text = (tmp_path / METRICS_FILE).read_text()
    assert "NaN" not in text and "Infinity" not in text
    (record,) = read_records(tmp_path / METRICS_FILE)
    assert record["loss"] is None and record["gradient_norm"] is None


def test_a_step_twice_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, 3) as writer, pytest.raises(AssertionError):
        writer.write(3, {})


def test_an_evaluation_replaces_one_of_the_same_step(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write_evaluation(0, evaluation(0.5))
        writer.write_evaluation(4, evaluation(0.6))
    with MetricsWriter(tmp_path, 4) as writer:
        writer.write_evaluation(4, evaluation(0.7))
    records = read_records(tmp_path / EVALUATIONS_FILE)
    found = [(record["step"], record["greedy"]["overall"]["share"]) for record in records]
    assert found == [(0, 0.5), (4, 0.7)]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    write(tmp_path, 0, 4, reward=0.25)
    with MetricsWriter(tmp_path, 2) as writer:
        writer.write(3, {"reward": 0.75})
        writer.write_evaluation(3, evaluation(0.5))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("reward")]
    assert found == [(1, 0.25), (2, 0.25), (3, 0.75)]
    assert events.Scalars("evaluation/greedy/colour")[0].value == 0.5


def test_phases_add_up_and_the_total_runs_from_the_start_of_the_step() -> None:
    ticks = iter([0.0, 1.0, 3.0, 3.5, 4.0, 6.0, 10.0, 11.0, 12.0, 15.0])
    phases = Phases(clock=lambda: next(ticks))
    with phases("rollout"):  # 1 to 3
        pass
    with phases("rollout"):  # 3.5 to 4
        pass
    assert phases.take() == {"seconds/rollout": 2.5, "seconds/total": 6.0}
    phases.begin()  # at 10
    with phases("update"):
        pass
    assert phases.take() == {"seconds/update": 1.0, "seconds/total": 5.0}


def test_phases_wait_for_the_device_at_both_ends() -> None:
    order: list[str] = []
    phases = Phases(synchronize=lambda: order.append("wait"))
    with phases("update"):
        order.append("work")
    assert order == ["wait", "work", "wait"]


def test_every_metric_of_a_step_is_explained() -> None:
    assert unexplained(metrics(1)) == set()
    assert unexplained(["reward/part/format", "critic_gradient_norm", "policy_loss/mine"]) == set()
    assert unexplained(["rewards", "seconds/", "kl"]) == {"rewards", "seconds/", "kl"}


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for damage in (b"\0" * 9, b'{"step": 1', b"\xff"):
        path.write_bytes(b'{"step": 0}\n' + damage + b'\n{"step": 2}\n')
        with pytest.raises(ValueError, match=rf"line 2 of {path} is damaged \(.*\): delete it"):
            read_records(path)
