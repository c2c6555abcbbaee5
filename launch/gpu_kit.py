"""Pack what a stage of tests/gpu needs on a GPU machine without a network, as one small archive.

    python launch/gpu_kit.py a FOLDER                  # here: FOLDER/site.tar.xz
    python3 -m tarfile -e FOLDER/site.tar.xz site      # there; then PYTHONPATH=site

The packages are tests/gpu/requirements/STAGE.txt, for Python 3.12 and torch 2.11.0 for CUDA 13.
Needs the standard library and xz.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # or only this folder would be found
from launch.device_code import trim  # noqa: E402

LISTS = ROOT / "tests" / "gpu" / "requirements"
STUBS = ROOT / "tests" / "gpu" / "stubs"
HOPPER = 90
LIMIT = 60 * 2**20  # bytes that travel with one command
# pip compares these names exactly.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
SAME_PACKAGES = {"c": "b", "e": "b"}
# Paths in the site folder, as fnmatch: `*` matches slashes too.
LEFT_OUT: dict[str, Sequence[str]] = {
    "a": ("pycountry/locales/*",),  # translations of countries' names
    "b": (
        "pycountry/locales/*",
        # Kernels that these stages do not call: FlashAttention 3, of MLA and of other GPUs.
        "sgl_kernel/flash_ops*",
        "sgl_kernel/flashmla_ops*",
        "sgl_kernel/infllm_ops*",
        "sgl_kernel/spatial_ops*",
        "sgl_kernel/sm100/*",
        "triton_kernels/*",
        "sglang/multimodal_gen/*",
        "sglang/test/*",
        "sglang/srt/*/_core.cpython-*.so",  # Rust servers
        "torch_memory_saver_*_cu12.abi3.so",
        "torchvision/image.so",
        "torchvision.libs/*",  # of JPEGs on a GPU
        "matplotlib/mpl-data/images/*",
        "matplotlib/mpl-data/sample_data/*",
        "tensorboard/webfiles.zip",
    ),
    "d": ("pycountry/locales/*", "transformer_engine/jax/*"),
}


def download(stage: str, compiled: Path, folder: Path) -> list[Path]:
    """Download the wheels of a stage's list, none of their dependencies, for the GPU machine.

    Wheels in the folder `compiled` are taken from there.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command += [str(folder), "--only-binary=:all:", "--python-version", "3.12"]
    command += ["--implementation", "cp", "-r", str(LISTS / f"{stage}.txt")]
    command += ["--find-links", str(compiled)]
    command += [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run(command, check=True)
    return sorted(folder.glob("*.whl"))


def unpack(wheels: Iterable[Path], left_out: Sequence[str], site: Path) -> None:
    """Unpack wheels into `site`, but files that match a pattern of `left_out`, and trim device
    code.
    """
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not is_left_out(name, left_out)]
            archive.extractall(site, names)  # noqa: S202 (pip's own wheels)
    for library in sorted(site.rglob("*.so*")):
        content = bytearray(library.read_bytes())
        trim(content, HOPPER)
        library.write_bytes(content)


def add_stand_ins(stage: str, site: Path) -> None:
    """Copy a stage's stand-ins for what is left out, if it has any, over its packages."""
    if (STUBS / stage).is_dir():
        shutil.copytree(STUBS / stage, site, dirs_exist_ok=True)


def is_left_out(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def pack(site: Path, archive: Path) -> None:
    """Write the files of `site`, like beside like, as a tar file compressed by xz on all cores."""
    files = (path for path in site.rglob("*") if path.is_file())
    with archive.open("wb") as output:
        command = ["xz", "-T0", "-9e"]
        xz = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output)
        with tarfile.open(fileobj=xz.stdin, mode="w|") as tar:
            for path in sorted(files, key=lambda path: (path.suffix, path)):
                tar.add(path, path.relative_to(site))
        xz.communicate()
    if xz.returncode:
        raise OSError(f"xz ended with exit code {xz.returncode}; is the disk full?")


def check_size(archive: Path, tree: Iterable[Path], limit: int = LIMIT) -> int:
    """Return the bytes of an archive and the files of the project, which travel together.

    Raises ValueError if they are more than `limit`.
    """
    size = sum(path.stat().st_size for path in {archive, *tree})
    if size > limit:
        raise ValueError(
            f"{archive} and the project are {size / 2**20:.1f} MiB, but {limit / 2**20:.0f} MiB "
            "travel at most: leave more out (LEFT_OUT in launch/gpu_kit.py)"
        )
    return size


def tracked() -> list[Path]:
    """Return the project's files that git knows or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = (ROOT / name for name in names.split("\0") if name)
    return [path for path in paths if path.is_file()]  # one may be deleted, not committed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("stage", choices=("a", "b", "c", "d", "e"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheels", type=Path, default=ROOT, help="folder of compiled wheels")
    given = parser.parse_args()
    stage = SAME_PACKAGES.get(given.stage, given.stage)
    given.folder.mkdir(parents=True, exist_ok=True)
    archive = given.folder.resolve() / "site.tar.xz"
    with tempfile.TemporaryDirectory() as name:
        site = Path(name) / "site"
        wheels = download(stage, given.wheels, Path(name))
        unpack(wheels, LEFT_OUT[stage], site)
        add_stand_ins(stage, site)
        pack(site, archive)
    try:
        size = check_size(archive, tracked())
    except ValueError as error:
        sys.exit(str(error))
    packed = archive.stat().st_size
    print(f"{archive}: {packed / 2**20:.1f} MiB, with the project {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
