"""The launch scripts, with every program that they call replaced by one that notes how."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from megavlm.inference.server import HOST, ClaimedPort
from megavlm.inference.server_process import LOG_BYTES
from megavlm.process import STACKS, STACKS_WANTED
from tests.support.timeouts import scaled

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/grpo/qwen2_5_vl_7b_geo3k_nodes.yaml"
KEYS = ("MEGAVLM_ROLLOUT_API_KEY", "MEGAVLM_ROLLOUT_ADMIN_KEY")

NOTE = 'printf "%s\\n" "$(basename "$0") $*" >> "$NOTES"\n'
PROGRAMS = {
    "scontrol": NOTE + "printf 'node0\\nnode1\\nnode2\\n'\n",
    "megavlm": NOTE
    + 'case "$*" in plan*--gpus*) echo "$PLAN"; exit;; plan*) echo "$PLAN" | head -1; exit;; esac\n'
    + 'case "$*" in *--dry-run)\n'
    + '    echo "WORLD_SIZE=$WORLD_SIZE" >> "$NOTES"; exit ${MEGAVLM_CODE:-0};; esac\n'
    + 'for file in ${UNTIL:-}; do until [ -s "$file" ]; do sleep 0.05; done; done\n'
    + 'env > "$NOTES.env"\n'
    + 'if [ -n "${MEGAVLM_SAVED:-}" ]; then mkdir -p "$MEGAVLM_SAVED"; date +%N > "$_/latest"; fi\n'
    + "exit ${MEGAVLM_END:-0}\n",
    # Its own options are up to the first word that is a program.
    "srun": NOTE
    + "while [ $# -gt 0 ]; do\n"
    + 'case "$1" in env|bash|megavlm) exec "$@";; esac; shift; done; exit 9\n',
}
# Stands for the servers of a node: its arguments and environment, until SIGUSR2.
SERVERS = """#!{python}
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
with open(os.environ["NOTES"] + ".servers." + sys.argv[5], "w") as notes:
    print(sys.argv[1:], file=notes)
    print(*(os.environ.get(name) for name in ("{keys[0]}", "{keys[1]}", "SGLANG_X")), file=notes)
signal.sigwait([signal.SIGUSR2])
"""
PLAN = """run_dir=RUN_DIR
addresses=(rollout.mode=external "rollout.urls=['http://node2:1','http://node2:2']")
server_0=(env SGLANG_X=' 0 ' python -P -m megavlm.slurm.servers RUN_DIR node2 --model 'm m')"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!{shutil.which('bash')}\n{body}")
        (programs / name).chmod(0o755)
    (programs / "python").write_text(SERVERS.format(python=sys.executable, keys=KEYS))
    (programs / "python").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[0-2]")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "32")
    monkeypatch.setenv("PLAN", PLAN.replace("RUN_DIR", f"{tmp_path}/run"))
    for key in ("WORLD_SIZE", *KEYS):
        monkeypatch.delenv(key, raising=False)
    return tmp_path / "notes"


def launch(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "launch" / script), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(180))


def test_a_failed_check_starts_nothing(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAVLM_CODE", "2")
    assert launch("slurm.sbatch", RECIPE).returncode == 2
    steps = [line for line in notes.read_text().splitlines() if line.startswith("srun ")]
    assert len(steps) == 2 and steps[1].endswith("--dry-run")


def test_slurm_fills_the_last_node_with_servers_and_trains_on_the_others(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = 10000 + 77 * 20
    monkeypatch.setenv("UNTIL", f"{notes}.servers.node2")
    done = launch("slurm.sbatch", RECIPE, "run.seed=1")
    assert (done.returncode, done.stderr) == (0, "")
    text = notes.read_text()
    asked = f"rollout.mode=external rollout.min_servers=1 rollout.urls=['http://node2:{port}']"
    assert f"megavlm plan --servers {RECIPE} run.seed=1 {asked} --gpus 8\n" in text
    urls = "rollout.urls=['http://node2:1','http://node2:2']"
    given = f"{RECIPE} run.seed=1 rollout.mode=external {urls}"
    assert f"megavlm train {given} --dry-run\nWORLD_SIZE=16" in text
    assert f"--nodelist node0,node1 megavlm train {given}\n" in text
    assert "--nodelist node2 env" in text

    environment = dict(
        line.split("=", 1)
        for line in notes.with_name("notes.env").read_text().splitlines()
        if "=" in line
    )
    assert environment["SRUN_CPUS_PER_TASK"] == "32"
    assert (environment["MEGAVLM_NODES"], environment["MEGAVLM_MASTER"]) == (
        "2",
        f"node0:{port + 19}",
    )
    assert environment["WORLD_SIZE"] == "16", "a rank for each GPU, whatever the recipe's axes"
    api_key, admin_key = (environment[key] for key in KEYS)
    assert len({api_key, admin_key}) == 2 and len(api_key) == 64
    words, variables = notes.with_name("notes.servers.node2").read_text().splitlines()
    arguments = [f"{notes.parent}/run", "node2", "--model", "m m"]
    assert words == str(["-P", "-m", "megavlm.slurm.servers", *arguments])
    assert variables == f"{api_key} {admin_key}  0 "
    for key in KEYS:
        assert environment[key] not in text  # no argument list has one


def test_all_nodes_train_where_the_trainer_starts_its_servers(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_NODES", "0")
    done = launch("slurm.sbatch", RECIPE, "rollout.colocate=true")
    assert (done.returncode, done.stderr) == (0, "")
    text = notes.read_text()
    assert f"megavlm train {RECIPE} rollout.colocate=true --dry-run\nWORLD_SIZE=24" in text
    assert f"--nodelist node0,node1,node2 megavlm train {RECIPE} rollout.colocate=true\n" in text
    assert "megavlm.slurm.servers" not in text and "rollout.urls" not in text
    environment = notes.with_name("notes.env").read_text()
    assert "MEGAVLM_NODES=3\n" in environment and "WORLD_SIZE=24\n" in environment


@pytest.mark.parametrize(
    ("code", "saved", "is_queued_again"),
    [
        (0, True, False),
        (1, True, False),
        (2, True, False),
        (69, True, True),
        (69, False, False),
        (70, True, False),
        (71, True, True),
        (71, False, False),
        (75, False, True),
        (137, True, True),
    ],
)
def test_the_exit_code_tells_whether_the_job_is_queued_again(
    notes: Path, monkeypatch: pytest.MonkeyPatch, code: int, saved: bool, is_queued_again: bool
) -> None:
    monkeypatch.setenv("ROLLOUT_NODES", "0")
    monkeypatch.setenv("MEGAVLM_END", str(code))
    if saved:
        monkeypatch.setenv("MEGAVLM_SAVED", str(notes.parent / "run/checkpoints"))
    assert launch("slurm.sbatch", RECIPE).returncode == code
    assert ("scontrol requeue 77\n" in notes.read_text()) == is_queued_again


def test_slurm_needs_nodes(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "RECIPE" in launch("slurm.sbatch").stderr
    monkeypatch.setenv("ROLLOUT_NODES", "3")
    done = launch("slurm.sbatch", RECIPE)
    assert done.returncode == 2 and "3 nodes cannot hold 3 rollout nodes" in done.stderr
    assert "srun" not in notes.read_text()


@pytest.fixture
def node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[subprocess.Popen[bytes], list[str]]]:
    """The servers of a node, with a stub of SGLang under the real server_main.py, and their
    addresses. Nothing is left of them but their logs.
    """
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests/fakes/stub_sglang'}")
    monkeypatch.setenv("STUB", "ok")
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")  # as `megavlm plan --servers` has it
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for key in KEYS:
        monkeypatch.setenv(key, key.lower())
    claim = ClaimedPort()
    port = claim.number
    command = [sys.executable, "-P", "-m", "megavlm.slurm.servers", str(tmp_path / "run")]
    with subprocess.Popen([*command, HOST, str(port), "2", "4"], cwd=ROOT) as process:
        try:
            yield process, [f"http://{HOST}:{port + index}/health" for index in range(2)]
        finally:
            process.send_signal(signal.SIGUSR2)
    assert process.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def log_of(tmp_path: Path, index: int) -> Path:
    return tmp_path / f"run/rollout_server_{HOST}_{index}.log"


def test_servers_of_a_node_start_again_and_end_with_its_process(
    node: tuple[subprocess.Popen[bytes], list[str]], tmp_path: Path
) -> None:
    process, urls = node
    servers = [wait_for_server(url, process) for url in urls]
    assert [server.cmdline()[-2:] for server in servers] == [
        ["--base-gpu-id", "0"],
        ["--base-gpu-id", "4"],
    ]
    started = psutil.Process(process.pid).children(recursive=True)
    for server in started:
        assert not {key.lower() for key in KEYS} & {*server.environ().values(), *server.cmdline()}
    servers[0].kill()
    servers[0].wait()
    assert httpx.get(urls[1], headers=KEY).is_success and process.poll() is None
    second = [servers[1], *servers[1].children(recursive=True)]
    for signalled in (process, servers[1]):  # Slurm's, to every process of the job
        signalled.send_signal(signal.SIGTERM)
    for each in second:
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            each.send_signal(number)
    assert wait_for_server(urls[0], process).pid != servers[0].pid
    assert httpx.get(urls[1], headers=KEY).is_success
    assert all(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in second)
    started += psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGUSR2)
    process.wait(scaled(180))
    _, alive = psutil.wait_procs(started, timeout=scaled(180))
    assert not alive


def test_the_logs_of_a_node_are_bounded_and_stacks_come_when_they_are_wanted(
    node: tuple[subprocess.Popen[bytes], list[str]], tmp_path: Path
) -> None:
    process, urls = node
    for url in urls:
        wait_for_server(url, process)
    os.truncate(log_of(tmp_path, 0), LOG_BYTES)
    deadline = time.monotonic() + scaled(180)
    while log_of(tmp_path, 0).stat().st_size >= LOG_BYTES:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    assert log_of(tmp_path, 0).with_suffix(".log.1").stat().st_size == LOG_BYTES
    (tmp_path / "run" / STACKS / STACKS_WANTED).write_text("yes")
    family = psutil.Process(process.pid).children(recursive=True)
    while any(each.status() != psutil.STATUS_STOPPED for each in family):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    for each in [*family, process]:  # the trainer has ended: Slurm's, to every process of the step
        each.send_signal(signal.SIGUSR2)
    process.wait(scaled(180))
    for index in range(2):
        assert "most recent call first" in log_of(tmp_path, index).read_text()


KEY = {"Authorization": "Bearer megavlm_rollout_admin_key"}


def wait_for_server(url: str, node: subprocess.Popen[bytes]) -> psutil.Process:
    """server_main.py of the server at `url`, once that answers."""
    while node.poll() is None:
        try:
            if httpx.get(url, headers=KEY).is_success:
                break
        except httpx.HTTPError:
            time.sleep(0.1)
    port = url.split(":")[2].partition("/")[0]
    processes = psutil.Process(node.pid).children(recursive=True)
    words = {process: process.cmdline() for process in processes if "python" in process.name()}
    return next(process for process, line in words.items() if port in line)
