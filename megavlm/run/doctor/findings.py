"""Checks of `megavlm doctor`. Each is a function of measured values that returns one finding.

diagnosis.py reads the values from the machine, so that tests can cover success and failure of each
check on any machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megavlm.inference.errors import RolloutServerError, WeightSyncError

GIB = 2**30
# Oldest driver for each major version of CUDA (CUDA Toolkit Release Notes, table 2).
DRIVERS = {"12": 525, "13": 580}
# Bytes of /dev/shm: NCCL, the loader's processes and SGLang use it. Docker's default is 64 MB.
LEAST_SHM, GOOD_SHM = GIB // 2, 8 * GIB
LEAST_FILES, GOOD_FILES = 4096, 65536  # open files: connections, shards and workers of a rank
GOOD_MEMLOCK = 64 * 2**20  # bytes; InfiniBand pins far more
LARGEST_SKEW, GOOD_SKEW = 60.0, 2.0  # seconds


@dataclass(frozen=True)
class Finding:
    """Result of a check: the finding and, unless it is OK, how to fix it."""

    level: Literal["OK", "WARN", "FAIL"]
    check: str
    found: str
    fix: str = ""

    @property
    def line(self) -> str:
        fix = f" -> {self.fix}" if self.fix else ""
        return f"{self.level:5}{self.check}: {self.found}{fix}"


def attempt(check: str, work: Callable[[], str]) -> Finding:
    """Run `work` as a check. Its return value is the finding; an error's message has the fix."""
    try:
        return Finding("OK", check, work())
    except (ValueError, RolloutServerError, WeightSyncError) as error:
        return Finding("FAIL", check, str(error))


def check_gpus(rows: Sequence[Sequence[str]]) -> Finding:
    """Check the GPUs that nvidia-smi lists. rows: Name, memory in MiB and driver of each GPU."""
    if not rows:
        return Finding(
            "FAIL",
            "gpu",
            "nvidia-smi finds none",
            "start on a GPU node, in a container with --gpus all, or add --cpu",
        )
    names = {name for name, *_ in rows}
    found = f"{len(rows)} x {', '.join(sorted(names))}, {int(rows[0][1]) / 1024:.0f} GiB"
    if len(names) > 1:
        return Finding("WARN", "gpu", found, "ranks wait for the slowest kind: use one kind")
    return Finding("OK", "gpu", found)


def check_driver(driver: str, cuda: str | None, num_visible: int, num_gpus: int) -> Finding:
    """Check the driver against torch's CUDA version, and that torch sees the GPUs."""
    if cuda is None:
        return Finding(
            "FAIL",
            "cuda",
            "torch is built for CPUs",
            "install torch for CUDA, or use the image of the Dockerfile",
        )
    found = f"driver {driver}, torch for CUDA {cuda}"
    least = DRIVERS.get(cuda.split(".")[0])
    if least is not None and int(driver.split(".")[0]) < least:
        return Finding("FAIL", "cuda", found, f"CUDA {cuda} needs driver {least} or newer")
    if num_visible < num_gpus:
        hidden = f"{found}, which sees {num_visible} of {num_gpus} GPUs"
        level: Literal["WARN", "FAIL"] = "WARN" if num_visible else "FAIL"
        return Finding(level, "cuda", hidden, "look at CUDA_VISIBLE_DEVICES")
    return Finding("OK", "cuda", found)


def check_nccl(version: str | None, is_available: bool) -> Finding:
    """Check that torch has NCCL. version: Version of NVIDIA's NCCL package; None if NCCL is not
    installed as a package.
    """
    if not is_available:
        fix = "install a torch that is built for CUDA"
        return Finding("FAIL", "nccl", "torch is built without it", fix)
    return Finding("OK", "nccl", version or "part of torch")


def check_versions(pins: Sequence[str], installed: Mapping[str, str], extras: set[str]) -> Finding:
    """Check installed packages against a package's own requirements.

    pins: Requirements as in the package's metadata. installed: Installed versions, by name. extras:
    Names of the extras that a run on this machine needs.
    """
    wrong, kept = [], []
    versions = {canonicalize_name(name): version for name, version in installed.items()}
    for text in pins:
        pin = Requirement(text)
        wanted = any(
            pin.marker is None or pin.marker.evaluate({"extra": extra}) for extra in {"", *extras}
        )
        if not wanted:
            continue
        version = versions.get(canonicalize_name(pin.name))
        if version is None or not pin.specifier.contains(version, prereleases=True):
            wrong.append(f"{pin.name} {version or 'missing'} ({pin.specifier} is needed)")
        elif str(pin.specifier).startswith("==") or pin.name in ("torch", "transformers", "sglang"):
            kept.append(f"{pin.name} {version}")
    if wrong:
        return Finding("FAIL", "versions", ", ".join(wrong), "install these: pip install -e .")
    return Finding("OK", "versions", ", ".join(kept))


def check_shared_memory(total: int, free: int) -> Finding:
    """Check the size of /dev/shm. total, free: Bytes."""
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    if free < LEAST_SHM:
        return Finding("FAIL", "shared memory", found, "start the container with --ipc host")
    if free < GOOD_SHM:
        return Finding("WARN", "shared memory", found, "8 GiB are safe: docker run --ipc host")
    return Finding("OK", "shared memory", found)


def check_disk(folder: str, free: int, needed: int) -> Finding:
    """Check the disk of the run directory. needed: Bytes of the checkpoints that a run keeps."""
    found = f"{folder} has {free / 1e9:.1f} GB free, checkpoints need {needed / 1e9:.1f} GB"
    if free < needed:
        fix = "free some, set run.dir to another disk, or lower checkpoint.keep_last"
        return Finding("FAIL", "disk", found, fix)
    return Finding("OK", "disk", found)


def check_files(limit: int) -> Finding:
    """Check the hard limit of open files, to which a run raises its own limit."""
    found = f"{limit} open files at most"
    fix = (
        f"nofile {GOOD_FILES} in /etc/security/limits.conf, docker run --ulimit nofile={GOOD_FILES}"
    )
    if limit < LEAST_FILES:
        return Finding("FAIL", "ulimit -Hn", found, fix)
    if limit < GOOD_FILES:
        return Finding("WARN", "ulimit -Hn", found, f"many servers need more: {fix}")
    return Finding("OK", "ulimit -Hn", found)


def check_memlock(limit: float) -> Finding:
    """Check the memory that a process may lock. limit: Bytes."""
    if limit < GOOD_MEMLOCK:
        found = f"{limit / 2**20:.0f} MiB may be pinned"
        fix = "between nodes NCCL pins more: ulimit -l unlimited, docker run --ulimit memlock=-1"
        return Finding("WARN", "ulimit -l", found, fix)
    return Finding("OK", "ulimit -l", "enough memory may be pinned")


def check_clock(skew: float, where: str) -> Finding:
    """Check this machine's clock. skew: Seconds by which a new file's time is ahead of the
    clock.
    """
    found = f"{abs(skew):.1f} s from that of {where}"
    fix = "checkpoints and caches are ordered by time: synchronise the clocks (chrony, ntpd)"
    if abs(skew) > LARGEST_SKEW:
        return Finding("FAIL", "clock", found, fix)
    if abs(skew) > GOOD_SKEW:
        return Finding("WARN", "clock", found, fix)
    return Finding("OK", "clock", found)


def check_sum(found: float, ranks: int, backend: str, seconds: float, num_bytes: int) -> Finding:
    """Check the result of an all-reduce that must sum 1 to `ranks`."""
    name, rate = f"{backend} collective", num_bytes / max(seconds, 1e-9) / 1e9
    if found != ranks * (ranks + 1) / 2:
        fix = "NCCL_DEBUG=INFO names the transport: try NCCL_P2P_DISABLE=1"
        return Finding("FAIL", name, f"{ranks} ranks summed to {found:g}", fix)
    alone = ", as there is no second GPU" if ranks == 1 else f", {rate:.1f} GB/s"
    return Finding("OK", name, f"{ranks} rank{'s' * (ranks > 1)}{alone}")


def check_attention(
    name: str, difference: float, gradient: float, bound: float, *, is_used: bool
) -> Finding:
    """Check an attention backend by a small model's forward and backward.

    difference: Largest difference of its log-probs from sdpa's. gradient: Norm of its gradients,
    relative to sdpa's. bound: Largest difference that passes. is_used: True if the run uses this
    backend.
    """
    found = f"log-probs within {difference:.1e} of sdpa's, gradients {gradient:.3f} times"
    if difference <= bound and abs(gradient - 1) <= 5 * bound:
        return Finding("OK", f"attention {name}", found)
    fix = "set model.attention to a backend that is OK"
    return Finding("FAIL" if is_used else "WARN", f"attention {name}", found, fix)


def check_sync(seconds: float, num_bytes: int, tensors: int, checked: int) -> Finding:
    """Check a successful weight update. checked: Number of tensors whose checksums were
    compared.
    """
    found = f"{tensors} tensors, {num_bytes / 1e6:.1f} MB in {seconds:.2f} s, {checked} checksums"
    if not checked:
        fix = "checksums of a GPU server need SGLang and a GPU on rank 0's machine"
        return Finding("WARN", "sync", found, fix)
    return Finding("OK", "sync", found)
