"""The lock file in launch/ is complete and agrees with itself: pip does not look."""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "launch" / "requirements-cpu.txt"
GPU_LOCK = ROOT / "launch" / "requirements-gpu-path.txt"
TRL_LOCK = ROOT / "launch" / "requirements-trl.txt"

# What sglang 0.5.23 requires and a CPU does without. Each is imported only by GPU code or by a
# feature that megavlm does not use; the rollout tests run the server without them.
ABSENT = {
    "CUDA kernels and compilers": """cuda-python flash-attn-4 flashinfer-python humming-kernels
        kernels ninja numba nvidia-cutlass-dsl nvidia-mathdx nvidia-ml-py nvshmem4py-cu13
        quack-kernels sgl-deep-ep sgl-deep-gemm sgl-flash-mla sglang-kernel tilelang
        torch-memory-saver""",
    "audio and video input": "torchaudio torchcodec",
    "grammars, gRPC, profiling, other hubs, renderers and clients of other models": """anthropic
        blobfile build deepseek-recipe easydict interegular llguidance modelscope outlines py-spy
        smg-grpc-servicer tml-renderers""",
}
# Of the lock, what nothing else there requires: the router of servers, packages that tests compare
# with, the documentation, what setup.py is built by, and what mcp requires as PyJWT[crypto].
TOOLS = {
    "cryptography",
    "mkdocs-material",
    "peft",
    "setuptools",
    "sglang",
    "sglang-router",
    "trl",
}
# Pinned away from what a package asks: (package, requirement) -> why.
DIFFERENT = {
    ("sglang", "torch"): "2.14.1 is what its CUDA kernels are built for; none of them is here",
}


def locked(lock: Path) -> dict[str, str]:
    """Return name -> version, as the file pins them."""
    pins = {}
    for line in lock.read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s+]+)", line)
            assert match, f"{line!r} is not NAME==VERSION without a local tag"
            pins[canonicalize_name(match[1])] = match[2]
    return pins


PINS, GPU_PINS, TRL_PINS = locked(LOCK), locked(GPU_LOCK), locked(TRL_LOCK)
ABSENT_NAMES = {name for names in ABSENT.values() for name in names.split()}


def requirements(name: str) -> list[Requirement]:
    """What an installed package requires here, without its extras."""
    lines = distribution(name).requires or []
    given = [Requirement(line) for line in lines]
    return [item for item in given if not item.marker or item.marker.evaluate({"extra": ""})]


def test_every_pin_is_installed_and_what_it_requires_is_pinned() -> None:
    for name in PINS:
        try:
            installed = distribution(name).version.split("+")[0]
        except PackageNotFoundError:
            pytest.fail(f"{name} is pinned but not installed: run make setup")
        assert installed == PINS[name], name
        for requirement in requirements(name):
            other, asked = canonicalize_name(requirement.name), f"{name} requires {requirement}"
            if name == "sglang" and other in ABSENT_NAMES:
                assert other not in PINS
            elif (name, other) not in DIFFERENT:
                assert other in PINS, asked
                assert requirement.specifier.contains(PINS[other], prereleases=True), asked


def test_the_exceptions_are_needed() -> None:
    required = {canonicalize_name(item.name) for item in requirements("sglang")}
    assert required >= ABSENT_NAMES
    for name, other in DIFFERENT:
        asked = {canonicalize_name(item.name): item.specifier for item in requirements(name)}
        assert not asked[other].contains(PINS[other])


def asked_by_setup_py() -> list[Requirement]:
    source = (ROOT / "setup.py").read_text()
    return [Requirement(text) for text in re.findall(r'^\s+"([a-z-]+[<>=]=[^"]+)",$', source, re.M)]


def test_setup_py_asks_for_nothing_that_the_lock_lacks() -> None:
    asked = asked_by_setup_py()
    assert len(asked) > 15
    for requirement in asked:
        assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)])


def test_no_pin_is_left_over() -> None:
    used = TOOLS | {canonicalize_name(item.name) for item in asked_by_setup_py()}
    for name in PINS:
        used |= {canonicalize_name(item.name) for item in requirements(name)}
    assert not PINS.keys() - used


def test_the_gpu_path_has_what_the_gpu_image_has() -> None:
    asked = {canonicalize_name(item.name): item.specifier for item in requirements("sglang")}
    for name in ("torch", "torchvision"):
        assert asked[name].contains(GPU_PINS[name])
    (asked_te,) = re.findall(
        r'"transformer-engine\[pytorch\](.+)"', (ROOT / "setup.py").read_text()
    )
    assert SpecifierSet(asked_te).contains(GPU_PINS["transformer-engine"])
    argument = f"ARG TRANSFORMER_ENGINE={GPU_PINS['transformer-engine']}\n"
    assert argument in (ROOT / "Dockerfile").read_text()


def test_the_environment_of_trl_is_complete_and_of_the_same_versions() -> None:
    assert TRL_PINS.items() <= PINS.items()
    used = {"trl", "torchvision", "pillow"}
    for name in TRL_PINS:
        used |= {canonicalize_name(item.name) for item in requirements(name)}
    assert used == TRL_PINS.keys()


def test_no_file_names_a_package_index() -> None:
    for path in (
        LOCK,
        GPU_LOCK,
        TRL_LOCK,
        ROOT / "Makefile",
        ROOT / "setup.py",
        ROOT / "pyproject.toml",
    ):
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links", path.read_text())
