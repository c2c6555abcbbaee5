"""The launch scripts, with every program that they call replaced by one that notes how."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from megavlm.inference.server import free_port

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/grpo/qwen2_5_vl_7b_geo3k_nodes.yaml"
KEYS = ("MEGAVLM_ROLLOUT_API_KEY", "MEGAVLM_ROLLOUT_ADMIN_KEY")

NOTE = 'printf "%s\\n" "$(basename "$0") $*" >> "$NOTES"\n'
PROGRAMS = {
    "scontrol": NOTE + "printf 'node0\\nnode1\\nnode2\\n'\n",
    "megavlm": NOTE
    + 'if [ "$1" = plan ]; then echo "$PLAN"; exit; fi\n'
    + 'case "$*" in *--dry-run)\n'
    + '    echo "WORLD_SIZE=$WORLD_SIZE" >> "$NOTES"; exit ${MEGAVLM_CODE:-0};; esac\n'
    + 'for port in ${PORTS:-}; do until [ -s "$NOTES.$port" ]; do sleep 0.05; done; done\n'
    + 'env > "$NOTES.env"\n'
    + 'if [ -n "${MEGAVLM_SAVED:-}" ]; then mkdir -p "$MEGAVLM_SAVED"; date +%N > "$_/latest"; fi\n'
    + "exit ${MEGAVLM_END:-0}\n",
    # Its own options are up to the first word that is a program.
    "srun": NOTE
    + "while [ $# -gt 0 ]; do\n"
    + 'case "$1" in env|bash|megavlm) exec "$@";; esac; shift; done; exit 9\n',
}
# Stands for the server: its parent's process id, its keys, and then it serves until it is ended.
SERVER = """#!{python}
import os, sys, time
if sys.argv[1] == "-c":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
port = sys.argv[sys.argv.index("--port") + 1]
leads = os.getpgid(0) == os.getpid()
with open(os.environ["NOTES"] + "." + port, "w") as notes:
    print(int(sys.argv[3]) == os.getppid(), leads, *sys.argv[4:], file=notes)
    print(sys.stdin.readline().strip(), file=notes)
    print(*os.environ, os.environ.get("SGLANG_X"), os.environ["TMPDIR"], file=notes)
while int(sys.argv[3]) == os.getppid():
    time.sleep(0.05)
"""
PLAN = """run_dir=RUN_DIR
tensor_parallel=4
server_environment=(SGLANG_X=' 0 ')
server_arguments=(--model-path 'models/m m' --tp-size 4)"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!{shutil.which('bash')}\n{body}")
        (programs / name).chmod(0o755)
    (programs / "python").write_text(SERVER.format(python=sys.executable))
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
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_failed_check_starts_nothing(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAVLM_CODE", "2")
    assert launch("slurm.sbatch", RECIPE).returncode == 2
    steps = [line for line in notes.read_text().splitlines() if line.startswith("srun ")]
    assert len(steps) == 2 and steps[1].endswith("--dry-run")


def test_slurm_fills_the_last_node_with_servers_and_trains_on_the_others(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = 10000 + 77 * 20
    monkeypatch.setenv("PORTS", f"{port} {port + 1}")
    done = launch("slurm.sbatch", RECIPE, "run.seed=1")
    assert (done.returncode, done.stderr) == (0, "")
    text = notes.read_text()
    urls = f"rollout.urls=['http://node2:{port}','http://node2:{port + 1}']"
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
    api_key, admin_key = (environment[key] for key in KEYS)
    assert len({api_key, admin_key}) == 2 and len(api_key) == 64
    folders = set()
    for index in range(2):
        words, keys, names = notes.with_name(f"notes.{port + index}").read_text().splitlines()
        assert words == (
            "True True --model-path models/m m --tp-size 4 --mem-fraction-static 0.85 "
            f"--host node2 --port {port + index} --base-gpu-id {4 * index}"
        )
        assert keys == f'{{"api_key": "{api_key}", "admin_api_key": "{admin_key}"}}'
        assert not set(KEYS) & set(names.split()) and "  0  " in names
        folders.add(names.split()[-1])
    assert len(folders) == 2, "each is removed with its server"
    for key in KEYS:
        assert environment[key] not in text  # no argument list has one


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


def test_slurm_needs_nodes_and_gpus(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "RECIPE" in launch("slurm.sbatch").stderr
    monkeypatch.setenv("GPUS_PER_NODE", "2")
    done = launch("slurm.sbatch", RECIPE)
    assert done.returncode == 2 and "rollout.tensor_parallel=4 is more than the 2" in done.stderr
    monkeypatch.setenv("ROLLOUT_NODES", "3")
    done = launch("slurm.sbatch", RECIPE)
    assert done.returncode == 2 and "3 nodes cannot hold 3 rollout nodes" in done.stderr
    assert "srun" not in notes.read_text().replace("srun --nodes 1 --ntasks 1", "", 1)


def test_servers_of_a_node_start_again_and_end_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real server_main.py, with a stub of SGLang under it."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/fakes/stub_sglang"))
    monkeypatch.setenv("STUB", "ok")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for key in KEYS:
        monkeypatch.setenv(key, key.lower())
    port = free_port()
    command = [str(ROOT / "megavlm/slurm/servers.sh"), "127.0.0.1", str(port), "2", "4"]
    node = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        urls = [f"http://127.0.0.1:{port + index}/health" for index in range(2)]
        servers = [wait_for_server(url, node) for url in urls]
        started = psutil.Process(node.pid).children(recursive=True)
        servers[0].kill()
        servers[0].wait()
        assert httpx.get(urls[1], headers=KEY).is_success and node.poll() is None
        node.send_signal(signal.SIGTERM)  # Slurm's, to every process of the job
        servers[1].send_signal(signal.SIGTERM)
        assert wait_for_server(urls[0], node).pid != servers[0].pid
        assert servers[1].is_running() and httpx.get(urls[1], headers=KEY).is_success
        started += psutil.Process(node.pid).children(recursive=True)
    finally:
        node.send_signal(signal.SIGUSR2)
        node.wait()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive and not list(tmp_path.iterdir())


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
