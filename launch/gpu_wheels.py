"""Carry packages to a GPU machine without a network: wheels, in pieces that are joined there.

    python launch/gpu_wheels.py collect FOLDER      # here: download, and cut into pieces
    python launch/gpu_wheels.py join FOLDER WHEELS  # there: join the pieces, each checked
    python launch/gpu_wheels.py install WHEELS SITE # there: install; then PYTHONPATH=SITE

The list is tests/gpu/requirements.txt: what `make gpu` needs beside torch 2.11.0 for CUDA 13 and
Python 3.12. Transformer Engine's torch extension is a source package, which `install --engine`
compiles in minutes (it needs nvcc); without it the tests run on megatron-core's own layers.
Needs the standard library alone; `collect --engine` also torch and setuptools.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "tests" / "gpu" / "requirements.txt"
ENGINE = ("transformer-engine==2.11.0", "transformer-engine-cu13==2.11.0")
ENGINE_SOURCE = "transformer-engine-torch==2.11.0"
STAND_IN = 'import torch.version\ntorch.version.cuda = torch.version.cuda or "13.0"\n'
PIECE = 60 * 10**6  # bytes
MANIFEST = "manifest.json"
# pip compares these names exactly.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def download(folder: Path, *, engine: bool) -> None:
    """Download the wheels of the list, none of their dependencies, for the GPU machine."""
    target = ["--python-version", "3.12", "--implementation", "cp"]
    target += [word for name in PLATFORMS for word in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    wheels = [*pip, "--only-binary=:all:", *target]
    subprocess.run([*wheels, "-r", str(REQUIREMENTS)], check=True)
    if engine:
        subprocess.run([*wheels, *ENGINE], check=True)
        source = [*pip, "--no-binary=:all:", "--no-build-isolation", ENGINE_SOURCE]
        with tempfile.TemporaryDirectory() as name:
            # pip runs its setup.py for the metadata, which takes torch for built with CUDA.
            (Path(name) / "sitecustomize.py").write_text(STAND_IN)
            subprocess.run(source, check=True, env=os.environ | {"PYTHONPATH": name})


def cut(wheels: Sequence[Path], folder: Path, size: int = PIECE) -> None:
    """Write the bytes of all wheels, one after the other, as pieces of at most `size` bytes, and a
    manifest with each wheel's name, bytes and SHA-256.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("piece-*"):
        old.unlink()
    files = [
        {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)} for path in wheels
    ]
    for index, content in enumerate(_portions(wheels, size)):
        (folder / f"piece-{index:03}").write_bytes(content)
    (folder / MANIFEST).write_text(json.dumps(files, indent=1))


def _portions(wheels: Sequence[Path], size: int) -> Iterator[bytes]:
    held = bytearray()
    for path in wheels:
        with path.open("rb") as file:
            while part := file.read(size - len(held)):
                held += part
                if len(held) == size:
                    yield bytes(held)
                    held.clear()
    if held:
        yield bytes(held)


def join(folder: Path, wheels: Path) -> None:
    """Write the wheels of `cut`. Raises ValueError if a piece is missing or damaged."""
    wheels.mkdir(parents=True, exist_ok=True)
    stream = _Stream(sorted(folder.glob("piece-*")))
    for file in json.loads((folder / MANIFEST).read_text()):
        path = wheels / file["name"]
        with path.open("wb") as output:
            stream.copy(file["bytes"], output)
        if sha256(path) != file["sha256"]:
            raise ValueError(
                f"{path.name} is damaged or one of its pieces is missing: copy {folder} again"
            )


class _Stream:
    """The bytes of several files, one after the other."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths, self._held = iter(paths), b""

    def copy(self, count: int, output: object) -> None:
        while count:
            if not self._held:
                path = next(self._paths, None)
                if path is None:
                    return  # too few bytes: the checksum shows it
                self._held = path.read_bytes()
            part, self._held = self._held[:count], self._held[count:]
            output.write(part)  # type: ignore[attr-defined]
            count -= len(part)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def install(wheels: Path, site: Path, *, engine: bool) -> None:
    """Install the wheels into `site`, nothing else, and compile Transformer Engine's extension."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site)]
    subprocess.run([*pip, *map(str, sorted(wheels.glob("*.whl")))], check=True)
    if engine:
        (source,) = wheels.glob("transformer_engine_torch-*.tar.gz")
        compiled = os.environ | {"NVTE_PYTORCH_FORCE_BUILD": "TRUE"}  # it would download a wheel
        subprocess.run([*pip, "--no-build-isolation", str(source)], check=True, env=compiled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("command", choices=("collect", "join", "install"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, nargs="?")
    parser.add_argument("--engine", action="store_true", help="with Transformer Engine")
    given = parser.parse_args()
    if given.command == "collect":
        wheels = given.source / "wheels"
        download(wheels, engine=given.engine)
        cut(sorted(wheels.iterdir()), given.source / "pieces")
        return
    if given.target is None:
        parser.error(f"{given.command} needs two folders")
    if given.command == "join":
        join(given.source, given.target)
    else:
        install(given.source, given.target, engine=given.engine)


if __name__ == "__main__":
    main()
