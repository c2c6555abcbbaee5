import zipfile
from pathlib import Path

from launch import gpu_kit
from launch.device_code import SASS
from tests.unit.launch.libraries import fat_binary, library


def make_wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_what_is_left_out_is_not_unpacked_and_device_code_is_trimmed(tmp_path: Path) -> None:
    both = [(SASS, 80, b"ampere"), (SASS, 90, b"hopper")]
    kept = [(SASS, 80, bytes(6)), (SASS, 90, b"hopper")]
    wheel = make_wheel(
        tmp_path / "kernels.whl",
        {
            "kernels/__init__.py": b"",
            "kernels/sm90/ops.abi3.so": library(b".nv_fatbin", fat_binary(both)),
            "kernels/sm100/ops.abi3.so": b"not unpacked, so not read",
            "kernels/flash_ops.abi3.so": b"nor this",
        },
    )
    gpu_kit.unpack([wheel], ("kernels/sm100/*", "kernels/flash*"), tmp_path / "site")
    assert files_of(tmp_path / "site") == {
        "kernels/__init__.py": b"",
        "kernels/sm90/ops.abi3.so": library(b".nv_fatbin", fat_binary(kept)),
    }


def test_the_lists_of_all_stages_pin_what_stage_a_needs() -> None:
    lists = {path.stem: path.read_text().splitlines() for path in gpu_kit.LISTS.glob("*.txt")}
    assert set(lists) == set(gpu_kit.LEFT_OUT) and set(lists) >= set(gpu_kit.SAME_PACKAGES.values())
    for lines in lists.values():
        pins = [line for line in lines if not line.startswith("#")]
        assert all(pin.count("==") == 1 for pin in pins)
        assert set(pins) >= {pin for pin in lists["a"] if not pin.startswith("#")}
