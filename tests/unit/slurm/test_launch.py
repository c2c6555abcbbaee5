"""Batch scripts that `megavlm launch` writes, and what it submits."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megavlm import cli
from megavlm.config.load import load
from megavlm.slurm.job import Job
from megavlm.slurm.launch import batch_script
from megavlm.slurm.server_plan import server_plan, servers_of_nodes

WriteRecipe = Callable[..., Path]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["megavlm", "launch", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in sbatch's place. The file has its arguments."""
    noted = tmp_path / "submitted"
    program = tmp_path / "bin/sbatch"
    program.parent.mkdir()
    program.write_text(f'#!/bin/bash\necho "$@" > {noted}\necho "41;main"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return noted


def script(**options: object) -> str:
    job = Job(**options)  # type: ignore[arg-type]
    return batch_script(job, "run", Path("/runs/code"), [Path("my recipe.yaml"), "run.seed=%a"])


def arrays(text: str) -> list[str]:
    """Return the words that bash has before and after each srun command."""
    setting = text.replace("\nsource ", "\n: ")
    show = 'printf "%s\\n" "${srun_options[@]}" -- "${in_container[@]}"'
    done = subprocess.run(["bash", "-uc", setting + show], capture_output=True, text=True)  # noqa: S607
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_containers_of_pyxis_and_apptainer() -> None:
    mounts = ["/data:/data", "/my models:/m"]
    here = f"{Path.cwd()}:{Path.cwd()}"
    assert arrays(script()) == arrays(script(apptainer=True)) == ["--"]
    assert arrays(script(container="a.sqsh", mount=mounts)) == [
        *("--container-image=a.sqsh", "--container-mount-home"),
        *(f"--container-mounts={here},/data:/data,/my models:/m", "--"),
    ]
    assert arrays(script(container="a.sif", apptainer=True, mount=mounts)) == [
        *("--", "apptainer", "exec", "--nv", "--bind", here, "--bind", "/data:/data"),
        *("--bind", "/my models:/m", "a.sif"),
    ]


def test_options_of_the_job() -> None:
    text = script(
        nodes=5,
        account="vision",
        time="1-0",
        array="0-3",
        shared=True,
        setup="source env.sh",
        env=["NCCL_SOCKET_IFNAME=ib 0"],
        sbatch=["--comment=mine"],
    )
    lines = text.splitlines()
    for option in (
        *("--nodes=5", "--account=vision", "--time=1-0", "--array=0-3", "--output=%x-%A_%a.log"),
        *("--signal=B:USR1@600", "--requeue", "--open-mode=append", "--comment=mine"),
    ):
        assert f"#SBATCH {option}" in lines, option
    assert "partition" not in text and "--exclusive" not in text
    assert "#SBATCH --exclusive" in script()
    assert lines.index("source env.sh") < lines.index("export ROLLOUT_NODES=1")
    assert "export 'NCCL_SOCKET_IFNAME=ib 0'" in lines
    assert lines[-1] == "source /runs/code/megavlm/slurm/job.sh 'my recipe.yaml' run.seed=%a"
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)  # noqa: S607


def test_rollout_nodes_of_another_kind_are_a_component() -> None:
    text = script(
        nodes=5, rollout_nodes=2, rollout_gpus_per_node=4, rollout_sbatch=["--constraint=l40"]
    )
    trainer, rollout = text.split("#SBATCH hetjob\n")
    assert "--nodes=3\n" in trainer and "--gpus-per-node=8\n" in trainer
    assert "--nodes=2\n" in rollout and "--gpus-per-node=4\n" in rollout
    assert "--constraint" in rollout and "--constraint" not in trainer
    assert "--signal" in trainer and "--signal" not in rollout
    assert "export ROLLOUT_GPUS_PER_NODE=4\n" in text
    assert "hetjob" not in script()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 2, "rollout_nodes": 2}, "--nodes 2 cannot hold --rollout-nodes 2 and a trainer"),
        ({"rollout_gpus_per_node": 4, "array": "0-3"}, "Slurm does not support --array for it"),
        ({"rollout_sbatch": ["-x"], "rollout_nodes": 0}, "it needs --rollout-nodes"),
        ({"env": ["NCCL_DEBUG"]}, "--env NCCL_DEBUG is not NAME=VALUE"),
    ],
)
def test_what_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        script(**options)


@pytest.mark.parametrize(
    ("ranks", "nodes", "gpus", "servers"),
    [(8, 3, 8, (1, 1)), (3, 2, 8, (2, 1)), (16, 4, 8, (1, 2)), (8, 4, 2, (1, 4))],
)
def test_servers_share_a_node_or_take_several(
    ranks: int, nodes: int, gpus: int, servers: tuple[int, int]
) -> None:
    assert servers_of_nodes(ranks, nodes, gpus) == servers


def test_commands_of_rollout_nodes(write_recipe: WriteRecipe) -> None:
    """Two servers of four GPUs on each of two nodes of eight, or one on two nodes of two."""
    urls = ["http://Node1:100", "http://node2:100"]
    config = load(write_recipe(rollout={"mode": "external", "urls": urls, "tensor_parallel": 4}))

    def planned(gpus: int) -> dict[str, list[str]]:
        lines = (line.split("=", 1) for line in server_plan(config, gpus).splitlines())
        return {name: shlex.split(words.strip("()")) for name, words in lines}

    one, both = planned(8), planned(2)
    urls = "'http://Node1:100','http://Node1:101','http://node2:100','http://node2:101'"
    assert one["addresses"] == ["rollout.mode=external", f"rollout.urls=[{urls}]"]
    program = ["python", "-P", "-m", "megavlm.slurm.servers", config.run.dir]
    assert one["server_1"] == [
        *("env", *one["server_environment"], *program),
        *("node2", "100", "2", "4", *one["server_arguments"]),
    ]
    assert both["addresses"][1] == "rollout.urls=['http://Node1:100']"
    among = ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "Node1:101"]
    assert both["server_1"][-6:] == among and program[-1] in both["server_0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((12, "--rollout-nodes", 2), "=12 on 2 rollout nodes of 8 GPUs: a server of more GPUs"),
        ((16, "--rollout-nodes", 3), "=16 on 3 rollout nodes of 8 GPUs: a server of more GPUs"),
        (
            (16, "--rollout-nodes", 2, "--rollout-gpus-per-node", 4),
            "=16 on 2 rollout nodes of 4 GPUs: a server of more GPUs",
        ),
        ((16, "--rollout-nodes", 0), "--gpus-per-node), on which a server of rollout.mode=managed"),
    ],
)
def test_servers_take_whole_nodes(
    launch: Callable[..., tuple[int, str, str]],
    write_recipe: WriteRecipe,
    options: tuple[int, ...],
    message: str,
) -> None:
    ranks, *rest = options
    given = (write_recipe(), f"rollout.tensor_parallel={ranks}", "--nodes", 4, "--dry-run")
    code, out, err = launch(*given, *rest)
    assert (code, out) == (2, "") and message in err


def test_the_recipe_and_the_code_are_frozen(
    launch: Callable[..., tuple[int, str, str]],
    sbatch: Path,
    write_recipe: WriteRecipe,
    tmp_path: Path,
) -> None:
    """A change of the recipe after the submission does not reach the job; `%a` is Slurm's."""
    recipe = write_recipe(rollout={"min_servers": 2, "server_args": {"page_size": 2}})
    options = ("--nodes", 2, "--gpus-per-node", 2, "run.seed=%a", "optimizer.lr=0.5")
    code, out, err = launch(recipe, *options)
    assert (code, err) == (0, "")
    (folder,) = (tmp_path / "run/launch").iterdir()
    assert out == f"job 41: {folder}/job.sbatch\n"
    assert sbatch.read_text() == f"--parsable {folder}/job.sbatch\n"
    frozen = load(folder / "recipe.yaml", [])
    assert frozen.optimizer.lr == 0.5 and len(frozen.rollout.urls) == 2
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["rollout"]["min_servers"] == 2
    text = (folder / "job.sbatch").read_text()
    assert text.splitlines()[-1] == (
        f"source {folder}/code/megavlm/slurm/job.sh {folder}/recipe.yaml run.seed=%a"
    )
    for name in ("megavlm/slurm/servers.py", "megavlm/cli.py", "checkpoint_tools/cli.py"):
        assert (folder / "code" / name).exists(), name


def test_without_slurm_the_script_is_left(
    launch: Callable[..., tuple[int, str, str]],
    write_recipe: WriteRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = launch(write_recipe(), "--rollout-nodes", 0)
    assert code == 2 and err.startswith("megavlm: sbatch is not on this machine: submit ")
    assert len(list(tmp_path.glob("run/launch/*/job.sbatch"))) == 1
    code, out, _ = launch(write_recipe(), "--rollout-nodes", 0, "--dry-run")
    assert code == 0 and out.startswith("#!/usr/bin/env bash\n#SBATCH --job-name=run\n")
    assert len(list(tmp_path.glob("run/launch/*"))) == 1
