"""Both sides of each check of `megavlm doctor`, and the command with and without a recipe."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from megavlm.config.load import load
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server import ClaimedPort
from megavlm.run.doctor import diagnosis as doctor
from megavlm.run.doctor.findings import (
    Finding,
    attempt,
    check_attention,
    check_clock,
    check_disk,
    check_driver,
    check_files,
    check_gpus,
    check_memlock,
    check_nccl,
    check_shared_memory,
    check_sum,
    check_sync,
    check_versions,
)

H100 = ["NVIDIA H100 80GB HBM3", "81559", "580.95.05"]
PINS = [
    "torch>=2.11",
    "Jinja2>=3.1",
    'sglang<=0.5.23,>=0.5.21; extra == "sglang"',
    'transformer-engine[pytorch]<2.12,>=2.9; extra == "gpu"',
    'ruff>=0.9; extra == "dev"',
]
INSTALLED = {"torch": "2.11.0+cu130", "jinja2": "3.1.6", "sglang": "0.5.23"}

CASES = {
    "gpus": (check_gpus([H100, H100]), "OK", "2 x NVIDIA H100 80GB HBM3, 80 GiB"),
    "no gpu": (check_gpus([]), "FAIL", "add --cpu"),
    "mixed gpus": (check_gpus([H100, ["NVIDIA A100", "81559", "580.1"]]), "WARN", "one kind"),
    "driver": (check_driver("580.95", "13.0", 2, 2), "OK", "driver 580.95, torch for CUDA 13.0"),
    "old driver": (check_driver("570.1", "13.0", 2, 2), "FAIL", "needs driver 580"),
    "old cuda": (check_driver("570.1", "12.9", 2, 2), "OK", "12.9"),
    "cpu torch": (
        check_driver("580.95", None, 0, 2),
        "FAIL",
        "built for CPUs -> install torch for CUDA",
    ),
    "hidden gpus": (check_driver("580.95", "13.0", 1, 2), "WARN", "CUDA_VISIBLE_DEVICES"),
    "no visible gpu": (check_driver("580.95", "13.0", 0, 2), "FAIL", "sees 0 of 2 GPUs"),
    "nccl": (check_nccl("2.28.9", True), "OK", "2.28.9"),
    "no nccl": (check_nccl(None, False), "FAIL", "built without it -> install a torch"),
    "versions": (check_versions(PINS, INSTALLED, {"sglang"}), "OK", "sglang 0.5.23"),
    "old sglang": (
        check_versions(PINS, INSTALLED | {"sglang": "0.5.4"}, {"sglang"}),
        "FAIL",
        "sglang 0.5.4 (<=0.5.23,>=0.5.21 is needed) -> install these: pip install",
    ),
    "no te": (check_versions(PINS, INSTALLED, {"gpu"}), "FAIL", "transformer-engine missing"),
    "shm": (check_shared_memory(2**36, 2**35), "OK", "32.0 of 64.0 GiB"),
    "docker's shm": (check_shared_memory(2**26, 2**26), "FAIL", "--ipc host"),
    "little shm": (check_shared_memory(2**31, 2**31), "WARN", "--ipc host"),
    "disk": (check_disk("runs", 10**12, 10**11), "OK", "1000.0 GB free"),
    "full disk": (check_disk("runs", 10**9, 10**11), "FAIL", "checkpoint.keep_last"),
    "files": (check_files(2**20), "OK", "1048576"),
    "few files": (check_files(20000), "WARN", "nofile=65536"),
    "no files": (check_files(1024), "FAIL", "nofile=65536"),
    "memlock": (check_memlock(float("inf")), "OK", "enough"),
    "little memlock": (check_memlock(65536.0), "WARN", "memlock=-1"),
    "clock": (check_clock(-0.3, "/runs"), "OK", "0.3 s"),
    "late clock": (check_clock(-10, "/runs"), "WARN", "chrony"),
    "wrong clock": (check_clock(3600, "/runs"), "FAIL", "chrony"),
    "sum": (check_sum(3.0, 2, "nccl", 0.001, 10**8), "OK", "2 ranks, 100.0 GB/s"),
    "one rank": (check_sum(1.0, 1, "nccl", 0.001, 10**8), "OK", "no second GPU"),
    "wrong sum": (check_sum(2.0, 2, "nccl", 0.001, 10**8), "FAIL", "NCCL_P2P_DISABLE"),
    "attention": (check_attention("flash", 0.01, 1.01, 0.05, is_used=True), "OK", "1.0e-02"),
    "wrong log-probs": (
        check_attention("flash", 0.2, 1.0, 0.05, is_used=True),
        "FAIL",
        "model.attention",
    ),
    "wrong gradients": (check_attention("flex", 0.0, 2.0, 0.05, is_used=False), "WARN", "2.000"),
    "no gradients": (check_attention("flash", 0.0, float("nan"), 0.05, is_used=True), "FAIL", ""),
    "sync": (check_sync(1.5, 3 * 10**6, 81, 60), "OK", "81 tensors, 3.0 MB in 1.50 s"),
    "unverified": (check_sync(1.5, 3 * 10**6, 81, 0), "WARN", "need SGLang"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_check_finds(name: str) -> None:
    finding, level, text = CASES[name]
    assert finding.level == level and text in finding.line
    assert (finding.fix == "") == (level == "OK")


def test_an_error_of_a_user_is_a_finding() -> None:
    def fails() -> str:
        raise RolloutServerError("port 1 is in use; stop it")

    assert attempt("ports", fails) == Finding("FAIL", "ports", "port 1 is in use; stop it")
    assert attempt("ports", lambda: "free") == Finding("OK", "ports", "free")


def test_gpus_are_those_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.gpu_rows() == []
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{', '.join(H100)}'\n")
    program.chmod(0o755)
    assert doctor.gpu_rows() == [H100]
    program.write_text("#!/bin/sh\necho 'a, b, c: the driver does not answer'\nexit 9\n")
    assert doctor.gpu_rows() == []


def test_the_clock_is_compared_with_the_file_system_s(tmp_path: Path) -> None:
    assert abs(doctor.clock_skew(tmp_path)) < 60


@pytest.mark.parametrize(
    ("gpus", "ranks", "colocate"), [(0, 2, False), (1, 1, True), (8, 2, False)]
)
def test_ranks_run_a_valid_recipe(
    gpus: int, ranks: int, colocate: bool, tmp_path: Path, write_recipe: Callable[..., Path]
) -> None:
    recipe = write_recipe()
    recipe.write_text(str(doctor.rank_recipe(None, tmp_path, gpus)).replace("True", "true"))
    recipe.write_text(recipe.read_text().replace("False", "false"))
    config = load(recipe)
    assert config.parallel.num_ranks == ranks and config.rollout.colocate == colocate
    given = load(write_recipe(rollout={"sync": "disk"}))
    assert doctor.rank_recipe(given, tmp_path, 0)["rollout"]["sync"] == "disk"


def outcome(output: str) -> dict[str, str]:
    """Levels by check of a command's output."""
    lines = [line for line in output.splitlines() if line[:4] in ("OK  ", "WARN", "FAIL")]
    return {line[5:].split(":")[0]: line[:4].strip() for line in lines}


def diagnose(
    recipe: Path | None, monkeypatch: pytest.MonkeyPatch, *, ranks: int = 0, port: int = 0
) -> tuple[int, list[object]]:
    """Exit code of a diagnosis on a machine without GPUs whose ranks end with code `ranks`."""
    started: list[object] = []

    def run_workers(arguments: list[str], num_ranks: int) -> int:
        started.append((arguments[0], num_ranks, os.path.exists(arguments[1])))
        return ranks

    monkeypatch.setattr("megavlm.run.launcher.run_workers", run_workers)
    monkeypatch.setattr("megavlm.run.doctor.diagnosis.PORT", port or ClaimedPort().number)
    options = doctor.DoctorOptions(recipe, (), cpu=True)
    return doctor.diagnose(options, lambda folder: folder.mkdir()), started


def test_a_machine_is_checked_without_a_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, started = diagnose(None, monkeypatch)
    found = outcome(capsys.readouterr().out)
    assert started == [("doctor", 2, True)]
    assert {"versions", "shared memory", "disk", "ulimit -Hn", "ports", "clock"} <= found.keys()
    assert code == int("FAIL" in found.values())


def test_ranks_that_fail_or_die_fail_the_diagnosis(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diagnose(None, monkeypatch, ranks=1)[0] == 1
    assert "ranks" not in outcome(capsys.readouterr().out), "the ranks have said why"
    assert diagnose(None, monkeypatch, ranks=137)[0] == 1
    assert outcome(capsys.readouterr().out)["ranks"] == "FAIL"


def test_a_port_in_use_fails_the_diagnosis(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        diagnose(None, monkeypatch, port=taken.getsockname()[1])
    output = capsys.readouterr().out
    assert outcome(output)["ports"] == "FAIL" and "RDZV_PORT" in output


def test_a_recipe_s_paths_are_checked(
    write_recipe: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = write_recipe(data={"train_files": [str(tmp_path / "missing.parquet")]})
    assert diagnose(recipe, monkeypatch)[0] == 1
    output = capsys.readouterr().out
    assert outcome(output)["recipe"] == "FAIL" and "missing.parquet" in output
    assert "memory" not in outcome(output)


def test_checkpoints_need_the_optimizer_s_state(write_recipe: Callable[..., Path]) -> None:
    config = load(write_recipe(checkpoint={"keep_last": 2}))
    (weights,) = Path(config.model.folder).glob("*.safetensors")
    assert doctor.checkpoint_bytes(config) == doctor.LOGS + weights.stat().st_size * 7 * 3
    weights.unlink()
    assert doctor.checkpoint_bytes(config) == 0, "the machine is checked as without a recipe"


def test_a_run_directory_that_is_a_file_is_a_finding(
    write_recipe: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    recipe = write_recipe(run={"dir": str(tmp_path / "file/run")})
    assert diagnose(recipe, monkeypatch)[0] == 1
    found = outcome(capsys.readouterr().out)
    assert found["run directory"] == "FAIL" and "clock" not in found
