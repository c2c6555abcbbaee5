"""The launch scripts, with every program that they call replaced by one that notes how."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/grpo/qwen2_5_vl_7b_geo3k_nodes.yaml"
KEYS = ("MEGAVLM_ROLLOUT_API_KEY", "MEGAVLM_ROLLOUT_ADMIN_KEY")

NOTE = 'printf "%s\\n" "$(basename "$0") $*" >> "$NOTES"\n'
PROGRAMS = {
    "scontrol": "printf 'node0\\nnode1\\nnode2\\n'\n",
    "megavlm": NOTE + 'echo "WORLD_SIZE=$WORLD_SIZE" >> "$NOTES"; exit ${MEGAVLM_CODE:-0}\n',
    "curl": NOTE,
    # Its own options are up to the first word that is a program.
    "srun": NOTE + 'while [ "$1" != bash ] && [ "$1" != torchrun ]; do shift; done; exec "$@"\n',
    "torchrun": NOTE
    + 'while [ -n "${MODEL:-}" ] && [ ! -s "$NOTES.server" ]; do :; done; env > "$NOTES.env"\n',
}
# Stands for the server: its parent's process id, its keys, and then it serves until it is ended.
SERVER = """#!{python}
import os, sys
if sys.argv[1] == "-c":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with open(os.environ["NOTES"] + ".server", "w") as notes:
    print(int(sys.argv[3]) == os.getppid(), *sys.argv[4:], sys.stdin.readline(), file=notes)
    print(*os.environ, file=notes)
"""


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
    for key in ("MODEL", "WORLD_SIZE", *KEYS):
        monkeypatch.delenv(key, raising=False)
    return tmp_path / "notes"


def launch(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "launch" / script), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_torchrun_checks_once_and_then_starts_the_ranks(notes: Path) -> None:
    done = launch("torchrun.sh", "recipe.yaml", "4", "run.seed=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert notes.read_text().splitlines() == [
        "megavlm train recipe.yaml run.seed=1 --dry-run",
        "WORLD_SIZE=4",
        "torchrun --standalone --nproc-per-node 4 -m megavlm train recipe.yaml run.seed=1",
    ]


def test_a_failed_check_starts_nothing(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAVLM_CODE", "2")
    monkeypatch.setenv("MODEL", "models/m")
    assert launch("torchrun.sh", "recipe.yaml", "4").returncode == 2
    assert launch("slurm.sbatch", RECIPE).returncode == 2
    assert "torchrun " not in notes.read_text() and "srun " not in notes.read_text()


def test_slurm_serves_on_the_last_node_and_trains_on_the_others(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL", "models/m")
    done = launch("slurm.sbatch", RECIPE, "run.seed=1")
    assert (done.returncode, done.stderr) == (0, "")
    text = notes.read_text()
    urls = "rollout.mode=external rollout.urls=['http://node2:30000']"
    assert f"megavlm train {RECIPE} run.seed=1 {urls} --dry-run\nWORLD_SIZE=16" in text
    assert "http://node2:30000/health" in text
    assert "--nnodes 2 --nproc-per-node 8" in text and "--rdzv-endpoint node0:29500" in text
    assert "--nodelist node0,node1" in text and "--nodelist node2" in text

    server = notes.with_name("notes.server").read_text()
    assert server.startswith("True --model-path models/m --host node2 --port 30000 --tp-size 8")
    environment = dict(
        line.split("=", 1)
        for line in notes.with_name("notes.env").read_text().splitlines()
        if "=" in line
    )
    api_key, admin_key = (environment[key] for key in KEYS)
    assert f'{{"api_key": "{api_key}", "admin_api_key": "{admin_key}"}}' in server
    assert len({api_key, admin_key}) == 2 and len(api_key) == 64
    for key in KEYS:
        assert key not in server.split()  # its environment has none
        assert environment[key] not in text  # no argument list has one


def test_slurm_needs_a_model_and_nodes(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "set MODEL to the folder" in launch("slurm.sbatch", RECIPE).stderr
    assert "RECIPE" in launch("slurm.sbatch").stderr
    monkeypatch.setenv("MODEL", "models/m")
    monkeypatch.setenv("ROLLOUT_NODES", "3")
    done = launch("slurm.sbatch", RECIPE)
    assert done.returncode == 2 and "3 nodes cannot hold 3 rollout nodes" in done.stderr
    assert not notes.exists()
