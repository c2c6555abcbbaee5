"""launch/slurm.sbatch on a real Slurm: signals, requeues, servers and nodes. Ranks train nothing
(tests/unit/run/fake_training), and SGLang is a stub.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from megavlm.demo.tiny_model import make_tiny_model
from tests.slurm.cluster import Cluster, missing
from tests.support.cache import cached_folder
from tests.support.timeouts import scaled

ROOT = Path(__file__).parents[2]
STUBS = [ROOT / "tests/unit/run/fake_training", ROOT / "tests/fakes/stub_sglang"]
WAIT = scaled(500)  # seconds after which a job hangs; Slurm holds one that is queued again for 120

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(bool(missing()), reason=f"a Slurm cluster needs {', '.join(missing())}"),
]

WriteRecipe = Callable[..., Path]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm"), count=3) as running:
        yield running


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    path = os.pathsep.join(map(str, [*STUBS, ROOT]))
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": path,
        "STUB": "ok",
        "STEP_SECONDS": "2",
        "GPUS_PER_NODE": "1",
        "MAX_REQUEUES": "2",
        "TMPDIR": "/tmp",  # noqa: S108 a short name, for sockets
    }


@pytest.fixture
def submit(
    cluster: Cluster,
    environment: dict[str, str],
    tmp_path: Path,
    write_recipe: WriteRecipe,
) -> Callable[..., str]:
    def submit(
        seed: int, nodes: int, rollout_nodes: int, *overrides: str, options: Sequence[str] = ()
    ) -> str:
        layout = f"parallel.data={nodes - rollout_nodes}"
        model = cached_folder(
            "cli-model", "", lambda path: make_tiny_model(path, ["red"] * 9, seed=0)
        )
        recipe = write_recipe(
            run={"dir": str(tmp_path / "run"), "seed": seed}, model={"folder": str(model)}
        )
        script = tmp_path / "job.sbatch"
        script.write_text((ROOT / "launch/slurm.sbatch").read_text() + "\n")
        first = nodes - rollout_nodes if ":" in options else nodes  # of components
        arguments = [
            *(f"--nodes={first}", "--gpus-per-node=1", "--cpus-per-task=2", "--time=10"),
            *("--mem=100", "--signal=B:USR1@10", f"--chdir={ROOT}"),
            f"--output={tmp_path}/job.log",
            *options,
        ]
        variables = environment | {"ROLLOUT_NODES": str(rollout_nodes)}
        text = script.read_text().replace('"$@"', f'"{recipe}" {layout} {" ".join(overrides)}')
        script.write_text(text)
        return cluster.submit(script, *arguments, environment=variables)

    return submit


def wait_for(text: str, log: Path, cluster: Cluster, job: str) -> None:
    deadline = time.monotonic() + WAIT
    while not log.exists() or text not in log.read_text():
        state = cluster.show(job)["JobState"]
        assert state in ("PENDING", "CONFIGURING", "RUNNING"), (state, log.read_text())
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def left_behind(cluster: Cluster, run: Path) -> list[str]:
    """Return the processes of a run that are still there: servers of the cluster, and others whose
    arguments name the run.
    """
    configuration = cluster.environment["SLURM_CONF"]
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        line = " ".join(process.info["cmdline"] or [])
        is_ours = (process.info["environ"] or {}).get("SLURM_CONF") == configuration
        if (is_ours and "server_main.py" in line) or (str(run) in line and "slurm" not in line):
            found.append(line)
    return found


def signalled(
    cluster: Cluster, job: str, log: Path, number: signal.Signals
) -> tuple[dict[str, str], str]:
    """Send a signal to a job that is in a step. Returns its end as Slurm shows it, and its log."""
    wait_for("working", log, cluster, job)
    cluster.signal(job, number)
    return cluster.wait(job, WAIT), log.read_text()


def test_a_warning_saves_and_the_job_is_queued_again(
    cluster: Cluster, submit: Callable[..., str], tmp_path: Path
) -> None:
    """Two trainer nodes; Slurm's warning comes in a step."""
    shown, text = signalled(cluster, submit(6, 2, 0), tmp_path / "job.log", signal.SIGUSR1)
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1"), text
    assert "megavlm: exit code 75; the job is queued again, restart 1 of 2" in text
    assert {path.name for path in (tmp_path / "run").glob("saved-*")} == {"saved-0", "saved-1"}


def test_a_stop_that_the_user_asks_for_is_not_queued_again(
    cluster: Cluster, submit: Callable[..., str], tmp_path: Path
) -> None:
    shown, text = signalled(cluster, submit(6, 1, 0), tmp_path / "job.log", signal.SIGTERM)
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "75:0"), text
    assert (tmp_path / "run/saved-0").exists()


def test_a_user_s_error_ends_the_job_with_its_sentence(
    cluster: Cluster, submit: Callable[..., str], tmp_path: Path
) -> None:
    shown = cluster.wait(submit(1, 1, 0), WAIT)
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "2:0")
    sentences = [
        line for line in (tmp_path / "job.log").read_text().splitlines() if "megavlm:" in line
    ]
    assert sentences[-1].startswith("megavlm: every rank refuses this")


def test_servers_start_again_on_their_node_and_end_with_the_trainer(
    cluster: Cluster, submit: Callable[..., str], tmp_path: Path
) -> None:
    """Two trainer nodes and a rollout node of one server, which is killed once."""
    shown = cluster.wait(submit(7, 3, 1), WAIT)
    text = (tmp_path / "job.log").read_text()
    assert shown["JobState"] == "COMPLETED", text
    (url,) = (tmp_path / "run/restarted").read_text().split()
    assert url.startswith("http://node2:")
    assert "ended with exit code -9; the end of" in text and "it starts again in 1 s" in text
    assert (tmp_path / "run/rollout_server_node2_0.log").read_text().count("all arguments") == 2
    assert "error" not in text, "the servers' step ended as it should"
    assert left_behind(cluster, tmp_path) == []


def test_a_server_over_two_nodes_starts_again_as_a_whole(
    cluster: Cluster, submit: Callable[..., str], tmp_path: Path
) -> None:
    """A trainer node and two rollout nodes of one server, whose first node's process is killed."""
    shown = cluster.wait(submit(7, 3, 2, "rollout.tensor_parallel=2"), WAIT)
    text = (tmp_path / "job.log").read_text()
    assert shown["JobState"] == "COMPLETED", text
    (url,) = (tmp_path / "run/restarted").read_text().split()
    assert url.startswith("http://node1:")
    assert text.count("ended with exit code -9; the end of") == 1
    assert text.count("ended on another of its nodes") == 1
    for node in ("node1", "node2"):
        log = (tmp_path / f"run/rollout_server_{node}_0.log").read_text()
        assert log.count("all arguments") == 2
    assert left_behind(cluster, tmp_path) == []


def test_a_run_that_hangs_leaves_the_stacks_of_its_servers(
    cluster: Cluster, submit: Callable[..., str], tmp_path: Path
) -> None:
    shown = cluster.wait(submit(8, 3, 1, "run.watchdog=3"), WAIT)
    text = (tmp_path / "job.log").read_text()
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "71:0"), text
    assert "most recent call first" in (tmp_path / "run/rollout_server_node2_0.log").read_text()
    assert left_behind(cluster, tmp_path) == []


def test_a_sweep_numbers_its_runs(
    cluster: Cluster, submit: Callable[..., str], tmp_path: Path
) -> None:
    """%a of an override is the number of the task; outside of an array it is 0."""
    job = submit(0, 1, 0, f"run.dir={tmp_path}/sweep-%a", options=["--array=1-2"])
    for task in (1, 2):
        shown = cluster.wait(f"{job}_{task}", WAIT)
        assert shown["JobState"] == "COMPLETED", (tmp_path / "job.log").read_text()
        assert (tmp_path / f"sweep-{task}/ran-0").exists()


def test_a_heterogeneous_job_has_its_servers_in_the_second_component(
    cluster: Cluster,
    submit: Callable[..., str],
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    """Two trainer nodes, which are stopped and queued again, and one of two servers."""
    environment["ROLLOUT_GPUS_PER_NODE"] = "2"
    component = [":", "--nodes=1", "--gpus-per-node=2", "--cpus-per-task=1", "--mem=100"]
    job = submit(6, 3, 1, options=component)
    shown, text = signalled(cluster, job, tmp_path / "job.log", signal.SIGUSR1)
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1"), text
    assert {path.name for path in (tmp_path / "run").glob("saved-*")} == {"saved-0", "saved-1"}
    logs = {path.name for path in (tmp_path / "run").glob("rollout_server_*.log")}
    assert logs == {"rollout_server_node2_0.log", "rollout_server_node2_1.log"}
    assert left_behind(cluster, tmp_path) == []
