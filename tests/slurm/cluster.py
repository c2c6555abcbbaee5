"""A real Slurm whose nodes are all this machine, on loopback addresses."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from megavlm.inference.server import ClaimedPort
from tests.support.timeouts import scaled

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
FINISHED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
START = scaled(180)  # seconds for the nodes to be idle
# A job has 20 ports by its number (megavlm/slurm/job.sh), and a cluster has up to 24 jobs: no other
# cluster of this machine has their ports.
FIRST_PORTS = range(10000, 19600, 20 * 24)

CONFIGURATION = """\
ClusterName=virtual
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
FirstJobId={job}
CommunicationParameters=NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MinJobAge=3600
"""
NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr={address} Port={port} "
    "CPUs=8 RealMemory=1000 Gres=gpu:2\n"
)


def missing() -> list[str]:
    """Return what this machine lacks for a cluster."""
    without = [program for program in PROGRAMS if shutil.which(program) is None]
    return without + ([] if os.geteuid() == 0 else ["root"])


class Cluster:
    """`count` virtual nodes, node0 and so on, of 2 GPUs and 8 cores. Their names are known to the
    cluster's own processes only.
    """

    def __init__(self, root: Path, count: int) -> None:
        self.root, self.names = root, [f"node{index}" for index in range(count)]
        self.environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        for folder in ("state", *(f"spool/{name}" for name in self.names)):
            (root / folder).mkdir(parents=True)
        self._ports = [ClaimedPort() for _ in range(count + 1)]
        self._jobs_ports = ClaimedPort(FIRST_PORTS)
        job = 480 + (self._jobs_ports.number - FIRST_PORTS.start) // 20  # whose ports begin there
        text = CONFIGURATION.format(root=root, port=self._ports[-1].number, job=job)
        hosts = f"{Path('/etc/hosts').read_text()}\n127.0.0.1 {socket.gethostname()}\n"
        for index, name in enumerate(self.names):
            address = f"127.0.0.{11 + index}"
            text += NODE.format(name=name, address=address, port=self._ports[index].number)
            hosts += f"{address} {name}\n"
        (root / "slurm.conf").write_text(f"{text}PartitionName=main Nodes=ALL Default=YES\n")
        (root / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/dev/null,/dev/zero\n")
        (root / "hosts").write_text(hosts)
        (root / "munge.key").write_bytes(os.urandom(1024))
        (root / "munge.key").chmod(0o600)

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def _start(self) -> None:
        root = self.root
        nodes = "\n".join(
            f"unshare --uts bash -c 'hostname {name}; exec slurmd -N {name} -f {root}/slurm.conf'"
            for name in self.names
        )
        script = f"""set -e
            mount --bind {root}/hosts /etc/hosts
            munged --force --key-file={root}/munge.key --socket={root}/munge.socket \
                --pid-file={root}/munged.pid --log-file={root}/munged.log --seed-file={root}/seed
            slurmctld -c -f {root}/slurm.conf
            {nodes}"""
        self._run("unshare", "--mount", "bash", "-c", script)
        deadline = time.monotonic() + START
        while self._run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() != str(len(self.names)):
            assert time.monotonic() < deadline, self._run("sinfo", "-N", "-l")
            time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._run("scancel", "--user=root")
        self._stop()

    def _stop(self) -> None:
        for file in (*self.root.glob("slurmd.*.pid"), *self.root.glob("[sm]*d.pid")):
            try:
                os.kill(int(file.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _run(self, *command: str, **environment: str) -> str:
        done = subprocess.run(
            command,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=scaled(180),
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def submit(self, script: Path, *arguments: str, environment: Mapping[str, str]) -> str:
        """Submit a script and return the job's number."""
        return self._run("sbatch", "--parsable", *arguments, str(script), **environment).strip()

    def signal(self, job: str, number: signal.Signals) -> None:
        """Send a signal to the batch shell, as `#SBATCH --signal=B:` does."""
        self._run("scancel", "--batch", f"--signal={number.value}", job)

    def show(self, job: str) -> dict[str, str]:
        words = self._run("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, seconds: float) -> dict[str, str]:
        """Wait for the job to finish and return what Slurm shows of it."""
        deadline = time.monotonic() + seconds
        while (shown := self.show(job))["JobState"] not in FINISHED:
            if time.monotonic() > deadline:
                pytest.fail(f"job {job} is {shown['JobState']}: {shown.get('Reason')}")
            if shown["JobState"] == "PENDING":  # jobs of several components start after a change
                self._run("scontrol", "update", f"JobId={job}", "Comment=waited for")
            time.sleep(0.3)
        return shown
