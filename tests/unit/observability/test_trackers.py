"""Trackers over stand-ins of their packages, whose functions have the same signatures."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from megavlm.config.run import RunConfig
from megavlm.observability import trackers as module
from megavlm.observability.trackers import Trackers, check_trackers
from tests.support.server_pools import wait_for
from tests.support.timeouts import scaled

GUIDE = Path(__file__).parents[3] / "docs/guides/watching.md"
MLFLOW = "my_trackers:Mlflow"
CONFIG = {"run": {"dir": "x"}, "optimizer": {"lr": 1e-3}}


class Log(list[tuple[str, Any]]):
    """Calls in order. fails: names of functions that raise."""

    def __init__(self) -> None:
        self.fails: set[str] = set()

    def add(self, name: str, *values: Any) -> None:
        if name in self.fails:
            raise ConnectionError(name)
        self.append((name, values[0] if len(values) == 1 else values))

    def of(self, name: str) -> list[Any]:
        return [value for called, value in self if called == name]


def logging_runs(log: Log, *, has_steps: bool) -> Any:
    """SwanLab, or wandb without steps of its own, which could not go back on a resume."""

    class Run:
        def define_metric(self, name: str, step_metric: str | None = None) -> None:
            log.add("define", name, step_metric)

        def log(self, data: dict[str, Any], step: int | None = None) -> None:
            assert has_steps == (step is not None)
            log.add("log", (step if has_steps else data.pop("step"), data))

        def finish(self) -> None:
            log.add("finish", None)

    def init(*, project: Any, id: Any, name: Any, config: Any, resume: Any, **how: Any) -> Run:
        assert resume == "allow" and Path(how["log_dir" if has_steps else "dir"]).is_dir()
        assert has_steps or (how["settings"], how["reinit"]) == ({"console": "off"}, "create_new")
        log.add("init", (id, name, config))
        return Run()

    return SimpleNamespace(
        init=init,
        Image=lambda data_or_path, caption=None: (data_or_path, caption),
        Settings=lambda **values: values,
    )


def mlflow(log: Log) -> Any:
    threads = set[int]()
    state: dict[str, Any] = {}

    def start_run(run_id: str | None = None, run_name: str | None = None) -> Any:
        threads.add(threading.get_ident())
        state.update(id=run_id or "made", name=run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id=state["id"]))

    def log_dict(dictionary: dict[str, Any], artifact_file: str) -> None:
        assert artifact_file == "config.yaml"
        log.add("init", (state["id"], state["name"], dictionary))

    def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
        assert threading.get_ident() in threads, "its active run is that of a thread"
        assert not any(set("/()") & set(name) for name in metrics)
        log.add("log", (step, {name.replace(".", "/"): x for name, x in metrics.items()}))

    def log_image(image: Image.Image, artifact_file: str | None = None) -> None:
        assert artifact_file is not None
        step = int(artifact_file.split("/")[1])
        log.add("image", (step, image.size))

    return SimpleNamespace(
        set_experiment=lambda name: None,
        start_run=start_run,
        log_dict=log_dict,
        log_metrics=log_metrics,
        log_image=log_image,
        log_text=lambda text, artifact_file: log.add("text", (artifact_file, text)),
        end_run=lambda: log.add("finish", None),
    )


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture(params=["wandb", "my_trackers:Swanlab", MLFLOW])
def name(
    request: pytest.FixtureRequest, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """wandb, and the classes in the guide."""
    monkeypatch.setitem(sys.modules, "wandb", logging_runs(log, has_steps=False))
    monkeypatch.setitem(sys.modules, "swanlab", logging_runs(log, has_steps=True))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow(log))
    monkeypatch.delitem(sys.modules, "my_trackers", raising=False)
    code = GUIDE.read_text().partition('title="my_trackers.py"\n')[2].partition("```")[0]
    (tmp_path / "code").mkdir()
    (tmp_path / "code/my_trackers.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path / "code")
    check_trackers({request.param} - {"wandb"})  # its stand-in has no spec
    RunConfig(dir="x", trackers=(request.param,)).check()
    return str(request.param)


def test_a_tracker_that_cannot_be_made_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"run.trackers names 'mlflow': take wandb, or a class"):
        RunConfig(dir="x", trackers=("mlflow",)).check()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"wandb needs .* pip install 'megavlm\[wandb\]'"):
        check_trackers(["wandb"])
    with pytest.raises(ValueError, match=r"run.trackers=none:Tracker cannot be imported"):
        check_trackers(["none:Tracker"])


def test_a_run_and_its_resume_are_one_run(name: str, log: Log, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for start in (0, 2):
        trackers = Trackers([name], folder, CONFIG, start)
        trackers.scalars(start + 1, {"reward": 0.5, "kl": float("nan")})
        trackers.scalars(start + 2, {"evaluation/greedy/a": 1.0})
        trackers.close()
        assert trackers.failures == 0
    (first, _, _), (second, shown, config) = log.of("init")
    assert first == second and shown == "mine" and config == CONFIG
    assert json.loads((folder / "trackers.json").read_text()) == {name: first}
    assert log.of("log") == [
        (1, {"reward": 0.5}),
        (2, {"evaluation/greedy/a": 1.0}),
        (3, {"reward": 0.5}),
        (4, {"evaluation/greedy/a": 1.0}),
    ]
    assert len(log.of("finish")) == 2
    if name != MLFLOW:  # which makes ids itself
        Trackers([name], folder, CONFIG, 0).close()
        assert log.of("init")[2][0] != first, "a run that starts anew is another one"


def test_images_of_samples(name: str, log: Log, tmp_path: Path) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    response = {"text": "three", "reward": 0.5}
    group = {"prompt": "How many?", "answer": "3", "responses": [response]}
    trackers = Trackers([name], tmp_path, CONFIG, 0)
    trackers.samples(7, [group | {"images": ["a.png"] * 5}, group | {"images": []}], tmp_path)
    trackers.samples(8, [group | {"images": []}], tmp_path)
    trackers.close()
    caption = "How many?\n\nthree\n\nreward 0.5, answer 3"
    if name == MLFLOW:
        assert log.of("image") == [(7, (30, 20))] * 2
        assert log.of("text") == [("samples/7/captions.txt", f"{caption}\n\n{caption}")]
    else:
        assert log.of("log") == [(7, {"samples": [(str(tmp_path / "a.png"), caption)] * 2})]


def test_failures_are_counted_and_said_once(
    name: str, log: Log, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log.fails = {"log", "finish"}
    trackers = Trackers([name], tmp_path, CONFIG, 0)
    for step in (1, 2, 3):
        trackers.scalars(step, {"reward": 0.5})
    trackers.close()
    assert trackers.failures == 4
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        f"run.trackers: {name} failed, the run goes on without it"
    ]


def test_a_network_that_comes_back(name: str, log: Log, tmp_path: Path) -> None:
    """A run that could not begin begins with a later record."""
    log.fails = {"init"}
    trackers = Trackers([name], tmp_path, CONFIG, 0)
    trackers.scalars(1, {"reward": 0.5})
    wait_for(lambda: trackers.failures == 2)
    log.fails = set()
    trackers.scalars(2, {"reward": 0.5})
    trackers.close()
    assert trackers.failures == 2 and [step for step, _ in log.of("log")] == [2]


def test_a_tracker_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    code = f"""
import sys, threading, types
from megavlm.observability import trackers
sys.modules["wandb"] = types.SimpleNamespace(
    Settings=dict, init=lambda **_: threading.Event().wait()
)
trackers.CLOSE_SECONDS = 0.1
tracking = trackers.Trackers(["wandb"], {str(tmp_path)!r}, {{}}, 0)
tracking.scalars(1, {{"reward": 0.5}})
tracking.close()
print("closed")
"""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=scaled(180), check=True)
    assert done.stdout == "closed\n" and not done.stderr


def test_a_slow_tracker_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    slow = ModuleType("wandb")
    slow.__dict__["Settings"] = dict
    slow.__dict__["init"] = lambda **_: go.wait(60) and None
    monkeypatch.setitem(sys.modules, "wandb", slow)
    monkeypatch.setattr(module, "WAITING", 3)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.01)
    trackers = Trackers(["wandb"], tmp_path, CONFIG, 0)
    for step in range(10):
        trackers.scalars(step, {"reward": 0.5})
    assert trackers.failures == 7
    trackers.close()
    go.set()
