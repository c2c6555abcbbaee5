"""`megavlm doctor` checks whether this machine can run a recipe. It prints one line per check, from
the GPU driver to a weight update of the real server.

Checks that need ranks run under torchrun (ranks.py), with a tiny model that the caller
makes.
"""

import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from megavlm.config.load import load
from megavlm.config.rollout import Rollout
from megavlm.config.schema import Config
from megavlm.config.transports import TRANSPORT_TRAITS
from megavlm.inference.errors import RolloutServerError
from megavlm.inference.server import ClaimedPort, require_free
from megavlm.run.checks import preflight
from megavlm.run.doctor import findings as checks
from megavlm.run.doctor.findings import Finding, attempt
from megavlm.temporary import temporary_folder

PORT = 29500  # port of torchrun's rendezvous (launch/slurm.sbatch)
LEAST_DISK = 10 * 10**9  # bytes needed without a recipe or its model
LOGS = 10**8  # bytes of a run's records and samples
SERVER_FRACTION = 0.3  # memory share of the tiny model's server on a GPU shared with ranks


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `megavlm doctor`. recipe: Recipe to check; None checks the machine only. cpu: If
    true, check a run without GPUs.
    """

    recipe: Path | None
    overrides: Sequence[str]
    cpu: bool


def diagnose(options: DoctorOptions, make_model: Callable[[Path], Any]) -> int:
    """Print the findings. Returns the exit code: 1 if a check failed.

    make_model: Function that writes a tiny model with two key-value heads to a folder. Raises
    ValueError if the recipe cannot be loaded.
    """
    config = None if options.recipe is None else load(options.recipe, options.overrides)
    failed = False
    for finding in _findings(config, options.cpu):
        print(finding.line, flush=True)
        failed |= finding.level == "FAIL"
    return int(_check_ranks(config, options.cpu, make_model) or failed)


def _findings(config: Config | None, cpu: bool) -> Iterator[Finding]:
    if not cpu:
        yield from _gpu_findings()
    yield _versions(cpu)
    shm = os.statvfs("/dev/shm")  # noqa: S108  # a mount, of which only the size is read
    yield checks.check_shared_memory(shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize)
    folder = Path("runs" if config is None else config.run.dir)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    needed = (config and checkpoint_bytes(config)) or LEAST_DISK
    yield checks.check_disk(str(existing), shutil.disk_usage(existing).free, needed)
    yield checks.check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    if not cpu:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        yield checks.check_memlock(float("inf") if limit == resource.RLIM_INFINITY else limit)
    yield attempt("ports", _ports)
    run_directory = attempt("run directory", lambda: _writable(folder))
    yield run_directory
    if run_directory.level == "OK":
        yield checks.check_clock(clock_skew(existing), str(existing))
    if config is not None:
        yield from _recipe_findings(config)


def _gpu_findings() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    from megavlm.models.linear_attention.delta_rule import backward_refusal
    from megavlm.parallel import platform

    rows = gpu_rows()
    yield checks.check_gpus(rows)
    if rows:
        yield checks.check_driver(rows[0][2], torch.version.cuda, platform.num_gpus(), len(rows))
    installed = _installed()
    nccl = next((installed[x] for x in installed if x.startswith("nvidia-nccl")), None)
    yield checks.check_nccl(nccl, dist.is_nccl_available())
    if reason := backward_refusal():
        found, _, fix = reason.partition(": ")
        yield Finding("WARN", "linear attention of Qwen3.5", found, fix)


def gpu_rows() -> list[list[str]]:
    """Return name, memory in MiB and driver of each GPU from nvidia-smi; [] without nvidia-smi."""
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    reply = subprocess.run([program, *query], capture_output=True, text=True)
    return [
        [part.strip() for part in line.split(",")]
        for line in reply.stdout.splitlines()
        if reply.returncode == 0 and line.count(",") == 2
    ]


def _installed() -> dict[str, str]:
    return {found.name: found.version for found in metadata.distributions()}


def _versions(cpu: bool) -> Finding:
    try:
        pins = metadata.requires("megavlm") or []
    except metadata.PackageNotFoundError:
        fix = "pip install --no-deps -e ."
        return Finding("WARN", "versions", "megavlm is not installed as a package", fix)
    return checks.check_versions(pins, _installed(), {"sglang"} | (set() if cpu else {"gpu"}))


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of the checkpoints that a run keeps, the one that it is writing, and its
    records. Each parameter takes two bytes as in the model folder and, without LoRA, twelve bytes
    of optimizer state. Returns 0 if the folder has no weights.
    """
    files = Path(config.model.folder).glob("*.safetensors")
    weights = sum(path.stat().st_size for path in files)
    num_kept = 1 + (config.checkpoint.keep_last or 1)
    return weights and LOGS + weights * (1 + 6 * (not config.lora.rank)) * num_kept


def _ports() -> str:
    try:
        require_free(PORT)
    except RolloutServerError as error:
        raise ValueError(
            f"port {PORT}, of torchrun's rendezvous, is in use: set RDZV_PORT to another"
        ) from error
    return f"{PORT} is free, and {ClaimedPort().number} for a server"


def _writable(folder: Path) -> str:
    preflight.check_run_dir(folder)
    return f"{folder} can be written"


def clock_skew(folder: Path) -> float:
    """Return the seconds by which a new file's modification time is ahead of this machine's
    clock.
    """
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        return os.stat(file.name).st_mtime - time.time()


def _recipe_findings(config: Config) -> Iterator[Finding]:
    from megavlm.planner.overview import fits
    from megavlm.run.checks.dry_run import dry_run

    ranks = config.parallel.num_ranks

    def checked() -> str:
        lines = dry_run(config, world_size=ranks, phase="train").splitlines()
        return "; ".join(x.removeprefix("# Checked: ") for x in lines if x.startswith("# Checked"))

    recipe = attempt("recipe", checked)
    yield recipe
    if recipe.level == "OK":
        yield attempt("memory", lambda: fits(config, ranks))


def _check_ranks(config: Config | None, cpu: bool, make_model: Callable[[Path], Any]) -> bool:
    """Run the checks of ranks.py. Returns True if one failed."""
    from transformers.utils.logging import disable_progress_bar

    from megavlm.parallel import platform
    from megavlm.run.launcher import run_workers

    gpus = 0 if cpu else platform.num_gpus()
    if not cpu and not gpus:
        return True  # already reported by _gpu_findings
    disable_progress_bar()
    with temporary_folder("megavlm-doctor-") as folder:
        make_model(folder / "model")
        recipe = folder / "recipe.yaml"
        recipe.write_text(json.dumps(rank_recipe(config, folder, gpus)))  # JSON is YAML
        code = run_workers(["doctor", str(recipe)], 1 if gpus == 1 else 2)
    if code > 1:
        print(Finding("FAIL", "ranks", f"ended with exit code {code}", "see the error above").line)
    return code != 0


def rank_recipe(config: Config | None, folder: Path, gpus: int) -> dict[str, Any]:
    """Return the recipe of the tiny model in `folder`, with the transport of `config`. Ranks and
    server share GPUs if there are at most two, or if `config` shares them.
    """
    colocate = 0 < gpus < 3 or (config is not None and config.rollout.colocate)
    sync = Rollout().sync if config is None else config.rollout.sync
    if colocate and not TRANSPORT_TRAITS[sync].colocates:
        sync = Rollout().sync
    return {
        "run": {"dir": str(folder / "run")},
        "model": {"folder": str(folder / "model"), "dtype": "bfloat16" if gpus else "float32"},
        "parallel": {"tensor": 1 if gpus == 1 else 2, "sequence": gpus != 1},
        "rollout": {
            "sync": sync,
            "colocate": bool(gpus) and colocate,
            "start_timeout": 600,
            "server_args": {"mem_fraction_static": SERVER_FRACTION} if gpus else {},
        },
    }
