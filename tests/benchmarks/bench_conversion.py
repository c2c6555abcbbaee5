"""`make bench`: import and export of Qwen2.5-VL-3B's shapes in bf16 against a plain copy of the
same files, and the memory that they take. LAYERS=2 makes the model smaller.

Prints, and asserts nothing about time: machines differ, and their disks more. A copy is measured
before each conversion, with the same rule: every file is on the disk (fsync) before it counts.

mbridge 0.15.1 is not beside it: it cannot run without a GPU, as it builds the model of Transformer
Engine's layers by `.cuda()`, and it reads transformers 4's form of the configuration.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch

from checkpoint_tools.safetensors_io import SafetensorsWriter, Spec
from checkpoint_tools.streaming import format_bytes
from megavlm.families import family
from tests.support.releases import released_config

RELEASE, LAYERS = "Qwen2.5-VL-3B", 36
SHARD_BYTES = 2 * 10**9
IMPORTS = "import checkpoint_tools.import_hf, checkpoint_tools.export_hf"


def bench_conversion(tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    total = write_model(hf, num_layers(tmp_path))
    python = peak_bytes([sys.executable, "-c", f"{install()}; {IMPORTS}"])[1]
    places = {"import": (hf, tmp_path / "checkpoint")}
    places["export"] = (tmp_path / "checkpoint", tmp_path / "out")
    files = len(list(hf.glob("*.safetensors")))
    print(
        f"\n{RELEASE}'s shapes, {format_bytes(total)} in bf16, {files} files, "
        f"{os.cpu_count()} cores"
    )
    for name, (source, target) in places.items():
        copied = seconds_of_copy(hf, tmp_path / "copy")
        command = [sys.executable, "-m", "checkpoint_tools", name, str(source), str(target)]
        output, peak = peak_bytes([*command, "--json"])
        seconds = json.loads(output)["seconds"]
        print(
            f"  {name}  {seconds:7.2f} s, {total / seconds / 1e9:5.2f} GB/s, "
            f"{seconds / copied:5.2f} x a copy ({copied:.2f} s); "
            f"{format_bytes(peak - python)} above the interpreter and its imports "
            f"({format_bytes(python)})"
        )


def num_layers(folder: Path) -> int:
    """As asked for, or as many as leave the disk half empty: four times the model are written."""
    if asked := os.environ.get("LAYERS"):
        return int(asked)
    free = shutil.disk_usage(folder).free
    layer = 154 * 10**6
    return max(1, min(LAYERS, (free // 8 - 2 * 10**9) // layer))


def write_model(folder: Path, layers: int) -> int:
    """An HF folder with random weights; returns their bytes."""
    folder.mkdir()
    config = released_config(RELEASE, folder, num_hidden_layers=layers)
    shards: list[dict[str, Spec]] = [{}]
    for entry in family(config.model_type).mapping(config):
        for name, shape in zip(entry.hf, entry.hf_shapes, strict=True):
            if sum(spec.nbytes for spec in shards[-1].values()) > SHARD_BYTES:
                shards.append({})
            shards[-1][name] = Spec(torch.bfloat16, shape)
    places = {}
    for number, specs in enumerate(shards):
        name = f"model-{number}.safetensors"
        places |= dict.fromkeys(specs, name)
        with SafetensorsWriter(folder / name, specs) as file:
            for spec in specs.values():
                for part in random_parts(prod(spec.shape)):
                    file.write(part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return sum(spec.nbytes for specs in shards for spec in specs.values())


def random_parts(count: int) -> Iterator[torch.Tensor]:
    """Finite bf16 numbers, some millions at a time."""
    while count:
        part = min(count, 1 << 23)
        yield torch.randint(0x3F80, (part,), dtype=torch.int16).view(torch.bfloat16)
        count -= part


def seconds_of_copy(source: Path, target: Path) -> float:
    """Of the weight files, in blocks, each on the disk before the next."""
    os.sync()  # what others have written is not this copy's
    target.mkdir()
    buffer = memoryview(bytearray(1 << 24))
    start = time.perf_counter()
    for path in source.glob("*.safetensors"):
        with (
            path.open("rb", buffering=0) as old,
            (target / path.name).open("wb", buffering=0) as new,
        ):
            while count := old.readinto(buffer):
                new.write(buffer[:count])
            os.fsync(new.fileno())
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    os.sync()
    return seconds


def peak_bytes(command: list[str]) -> tuple[str, int]:
    """What a process prints, and the most memory that it held."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return output, usage.ru_maxrss * 1024


def install() -> str:
    return "from megavlm.parallel import platform; platform.install()"
