"""Options of a Slurm job. Their help texts are the reference of `megavlm launch`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option


@dataclass(frozen=True, kw_only=True)
class Job:
    """Options of a Slurm job. The defaults of sbatch apply to options that are None."""

    nodes: Annotated[int, Option(min=1, help="Nodes of the job.")] = 2
    rollout_nodes: Annotated[
        int,
        Option(
            min=0,
            help="Number of nodes, the last ones, that run SGLang servers. With 0 the recipe needs "
            "no servers, or the trainer starts them on its own nodes (rollout.colocate).",
        ),
    ] = 1
    gpus_per_node: Annotated[
        int, Option(min=1, help="GPUs of a node; the trainer has a rank on each.")
    ] = 8
    cpus_per_task: Annotated[int, Option(min=1, help="Cores of a node.")] = 32
    time: Annotated[str, Option(help="Time limit, as for sbatch.")] = "24:00:00"
    warning: Annotated[
        int, Option(min=0, help="Seconds before the time limit at which the run saves and stops.")
    ] = 600
    account: Annotated[str | None, Option(help="As for sbatch.")] = None
    partition: Annotated[str | None, Option(help="As for sbatch.")] = None
    qos: Annotated[str | None, Option(help="As for sbatch.")] = None
    array: Annotated[
        str | None,
        Option(
            help="A sweep, as for sbatch: with 0-3, run.seed=%a run.dir=runs/sweep-%a makes four "
            "runs."
        ),
    ] = None
    shared: Annotated[
        bool,
        Option(
            "--shared", help="Share nodes with other jobs; the ports are derived from the job id."
        ),
    ] = False
    max_requeues: Annotated[
        int, Option(min=0, help="How often a stopped or failed run is queued again.")
    ] = 10
    container: Annotated[
        str | None,
        Option(
            metavar="IMAGE",
            help="Run all programs in this container, by pyxis. The current folder is mounted.",
        ),
    ] = None
    apptainer: Annotated[
        bool, Option("--apptainer", help="Run the container by Apptainer, not by pyxis.")
    ] = False
    mount: Annotated[
        list[str] | None,
        Option(metavar="SOURCE:TARGET", help="Folder to mount in the container, too."),
    ] = None
    setup: Annotated[
        str | None,
        Option(
            metavar="COMMAND",
            help="Prepare the environment by modules or 'source .venv/bin/activate', say.",
        ),
    ] = None
    env: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE", help="Environment variable, NCCL's interface for example."),
    ] = None
    sbatch: Annotated[
        list[str] | None, Option(metavar="OPTION", help="Any other option of sbatch.")
    ] = None
    rollout_sbatch: Annotated[
        list[str] | None,
        Option(
            metavar="OPTION",
            help="Option of sbatch for the rollout nodes only, --constraint=l40 for example. It "
            "makes the job heterogeneous, with the rollout nodes as its second component. Slurm "
            "supports no arrays of such jobs.",
        ),
    ] = None
    rollout_gpus_per_node: Annotated[
        int | None,
        Option(min=1, help="GPUs of a rollout node. It makes the job heterogeneous, too."),
    ] = None

    def __post_init__(self) -> None:
        if self.rollout_nodes >= self.nodes:
            raise ValueError(
                f"--nodes {self.nodes} cannot hold --rollout-nodes {self.rollout_nodes} and a "
                "trainer: raise the first, or lower the second (0 for colocated or local servers)"
            )
        for variable in self.env or ():
            if not variable.partition("=")[0].isidentifier() or "=" not in variable:
                raise ValueError(f"--env {variable} is not NAME=VALUE: write NCCL_DEBUG=INFO, say")
        if self.is_heterogeneous and (self.array or not self.rollout_nodes):
            raise ValueError(
                "--rollout-sbatch and --rollout-gpus-per-node request a heterogeneous job: it "
                "needs --rollout-nodes, and Slurm does not support --array for it"
            )

    @property
    def is_heterogeneous(self) -> bool:
        return bool(self.rollout_sbatch or self.rollout_gpus_per_node)

    @property
    def server_gpus(self) -> int:
        """GPUs of a rollout node."""
        return self.rollout_gpus_per_node or self.gpus_per_node
