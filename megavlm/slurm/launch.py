"""Submission of Slurm jobs, with frozen copies of the code and the recipe that they run."""

import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import checkpoint_tools
import megavlm
from megavlm.config.dump import to_yaml
from megavlm.config.load import load
from megavlm.config.schema import Config
from megavlm.slurm.job import Job
from megavlm.slurm.server_plan import servers_of_nodes

_environment = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=False,  # noqa: S701  a shell script
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_environment.filters["quote"] = lambda word: shlex.quote(str(word))


def launch(recipe: Path, overrides: Sequence[str], job: Job, *, dry_run: bool) -> str:
    """Submit a job and return a line about it, or with `dry_run` return its script only.

    Overrides with `%a` are left to the job, since they differ between the tasks of an array.
    """
    later = [override for override in overrides if "%a" in override]
    config = _resolve(recipe, [override for override in overrides if "%a" not in override], job)
    name = Path(config.run.dir).name
    folder = Path(config.run.dir, "launch", time.strftime("%Y%m%d-%H%M%S")).absolute()
    if dry_run:
        return batch_script(job, name, folder / "code", [recipe, *overrides])
    folder.mkdir(parents=True)
    code, frozen, script = folder / "code", folder / "recipe.yaml", folder / "job.sbatch"
    for package in (megavlm, checkpoint_tools):
        source = Path(package.__path__[0])
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, code / source.name, ignore=ignored)
    frozen.write_text(to_yaml(config), encoding="utf-8")
    script.write_text(batch_script(job, name, code, [frozen, *later]), encoding="utf-8")
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise ValueError(
            f"sbatch is not on this machine: submit {script} where Slurm is, or use --dry-run"
        )
    done = subprocess.run([sbatch, "--parsable", str(script)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"sbatch refused {script}: {done.stderr.strip()}")
    number = done.stdout.strip().partition(";")[0]
    return f"job {number}: {script}\n"


def batch_script(job: Job, name: str, code: Path, arguments: Sequence[str | Path]) -> str:
    """Return the script of the job `name`. `arguments` are a recipe and overrides, which run with
    the packages in the folder `code`.
    """
    cwd = Path.cwd()
    mounts = [f"{cwd}:{cwd}", *(job.mount or ())]
    template = _environment.get_template("job.sbatch.j2")
    return template.render(job=job, name=name, code=code, arguments=arguments, mounts=mounts)


def _resolve(recipe: Path, overrides: list[str], job: Job) -> Config:
    """Return the configuration. Its servers have placeholder addresses: Slurm picks nodes later."""
    if job.rollout_nodes:
        any_number = load(recipe, [*overrides, *_addresses(1), "rollout.min_servers=1"])
        ranks = any_number.rollout.tensor_parallel
        count, span = servers_of_nodes(ranks, job.rollout_nodes, job.server_gpus)
        overrides += _addresses(job.rollout_nodes // span * count)
    config = load(recipe, overrides)
    if config.rollout.mode == "managed":
        config.rollout.check_node(job.gpus_per_node, "a node (--gpus-per-node)")
    return config


def _addresses(count: int) -> list[str]:
    urls = ",".join(f"'http://later{index}:1'" for index in range(count))
    return ["rollout.mode=external", f"rollout.urls=[{urls}]"]
