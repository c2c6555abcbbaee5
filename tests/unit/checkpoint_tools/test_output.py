"""Folders appear whole or not at all: kills, full disks, forbidden places, two at a time."""

import multiprocessing
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint_tools import output_folder
from checkpoint_tools.export_hf import WriteOptions, export_hf
from checkpoint_tools.import_hf import import_hf
from checkpoint_tools.safetensors_io import SafetensorsWriter
from checkpoint_tools.weights import open_weights
from megavlm.checkpointing import atomic
from megavlm.checkpointing.writer import RecordFile
from tests.unit.checkpoint_tools.command import run, sentence
from tests.unit.checkpoint_tools.conftest import Folder
from tests.unit.checkpoint_tools.lora_models import make_adapters

FAMILY = "qwen2_vl"
PLAIN: dict[str, Any] = {"sources": (), "force": False, "mark": "*", "nbytes": 0}
# What is killed on its way in, and how many calls are let through.
POINTS = [
    (RecordFile, "add", 0),
    (RecordFile, "add", 20),
    (atomic, "replace_folder", 0),  # the step in the folder, all of it written
    (atomic, "replace_folder", 1),  # the folder itself
    (SafetensorsWriter, "write", 0),
    (SafetensorsWriter, "write", 20),
]


def die_at(owner: Any, name: str, count: int, convert: Callable[..., Any], *args: Any) -> None:
    """In a child: the call after `count` calls kills the process."""
    calls = iter(range(count))
    original = getattr(owner, name)

    def step(*values: Any) -> Any:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*values)

    setattr(owner, name, step)
    convert(*args)


@pytest.mark.parametrize(("owner", "name", "count"), POINTS)
def test_a_killed_conversion_leaves_nothing_that_looks_whole_and_can_be_repeated(
    owner: Any, name: str, count: int, hf_folder: Folder, imported: Folder, tmp_path: Path
) -> None:
    exports = owner is SafetensorsWriter
    convert: Callable[..., Any] = export_hf if exports else import_hf
    source = (imported if exports else hf_folder)(FAMILY)
    target = tmp_path / "out"
    context = multiprocessing.get_context("fork")
    child = context.Process(target=die_at, args=(owner, name, count, convert, source, target))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    assert not target.exists() and list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="is not a folder"):
        open_weights(target)

    convert(source, target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    open_weights(target)


@pytest.fixture(params=["import", "export"])
def command(request: pytest.FixtureRequest, hf_folder: Folder, imported: Folder) -> list[object]:
    source = hf_folder(FAMILY) if request.param == "import" else imported(FAMILY)
    return [request.param, source]


def test_a_disk_without_room_is_known_before_anything_is_written(
    command: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    free = SimpleNamespace(f_bavail=3, f_frsize=10**6)
    monkeypatch.setattr(output_folder.os, "statvfs", lambda _: free)
    assert run(*command, tmp_path / "out") == 2
    assert sentence(capsys) == f"{tmp_path}/out needs 54.97 MB, but 3 MB are free on its disk."
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process gets longer than 1 MB: writes fail as they do on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_in_the_middle(
    command: list[object], tmp_path: Path, small_files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command, tmp_path / "out") == 2
    assert sentence(capsys).startswith(f"File too large: {tmp_path}/.out.partial/")
    assert not list(tmp_path.iterdir())


def test_a_place_that_is_forbidden(
    command: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def forbidden(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", forbidden)
    assert run(*command, tmp_path / "place" / "out") == 2
    assert sentence(capsys) == f"Permission denied: {tmp_path}/place."
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_way(
    command: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").touch()
    assert run(*command, tmp_path / "out" / "deeper") == 2
    assert sentence(capsys) == f"{tmp_path}/out is a file: name a folder."


def test_a_disk_s_own_folder_is_refused_before_anything_is_read(
    command: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No folder can take its place in the end, and the room counted is that of the disk around."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(output_folder.os.path, "ismount", lambda path: path == tmp_path / "out")
    assert run(*command, tmp_path / "out") == 2
    message = f"{tmp_path}/out is a mount point and cannot be replaced: name a folder in it."
    assert sentence(capsys) == message
    assert run(*command, tmp_path / "out" / "deeper") == 0


def test_a_link_to_itself(
    command: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").symlink_to("out")
    assert run(*command, tmp_path / "out") == 2
    assert sentence(capsys).endswith("/out is a link to itself: name a folder.")


def test_a_folder_stopped_by_sigterm_leaves_nothing(
    command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = output_folder._check_room

    def stopped(target: Path, nbytes: int) -> None:
        original(target, nbytes)
        assert list(tmp_path.iterdir())
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(output_folder, "_check_room", stopped)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert run(*command, tmp_path / "out") == 128 + signal.SIGTERM
    finally:
        found = signal.signal(signal.SIGTERM, before)
    assert found is not signal.SIG_IGN
    assert not list(tmp_path.iterdir())


def test_one_process_writes_a_folder(
    command: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with output_folder.output_folder(tmp_path / "out", **PLAIN) as partial:
        (partial / "kept").touch()
        assert run(*command, tmp_path / "out") == 2
        assert sentence(capsys) == f"{tmp_path}/out is being written by another process."
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_older_folder_stays_until_the_new_one_is_whole(
    hf_folder: Folder, imported: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = Path(shutil.copytree(hf_folder(FAMILY), tmp_path / "hf"))
    (hf / "stale.txt").touch()
    names = {path.name for path in hf.iterdir()}

    def interrupted(*_: Any) -> None:
        assert {path.name for path in hf.iterdir()} == names
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsWriter, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export_hf(imported(FAMILY), hf, options=WriteOptions(force=True))
    assert {path.name for path in hf.iterdir()} == names
    export_hf(imported(FAMILY), hf, options=WriteOptions(force=True))
    assert not (hf / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_link_to_the_output_stays(command: list[object], tmp_path: Path) -> None:
    link, disk = tmp_path / "link", tmp_path / "disk" / "folder"
    link.symlink_to(disk)
    for options in ([], ["--force"], ["--force"]):
        assert run(*command, link, *options) == 0
        assert link.readlink() == disk
        open_weights(disk)
    assert [path.name for path in disk.parent.iterdir()] == ["folder"]
    assert {path.name for path in tmp_path.iterdir()} == {"link", "disk"}


def test_no_output_replaces_what_it_is_made_of(
    hf_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither itself, nor a folder around it, nor one that it links to."""
    hf = Path(shutil.copytree(hf_folder(FAMILY), tmp_path / "hf"))
    checkpoint = hf / "checkpoint"
    links = tmp_path / "links"
    links.mkdir()
    for path in hf.iterdir():
        (links / path.name).symlink_to(path)
    (tmp_path / "other").symlink_to(tmp_path)
    assert run("import", hf, checkpoint) == 0
    assert run("import", hf, checkpoint, "--force") == 0  # below a source is not around it
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    step = checkpoint / "step_00000000"
    for command, source, target in (
        ("export", checkpoint, hf),
        ("export", tmp_path / "other" / "hf" / "checkpoint", hf),
        ("export", checkpoint, checkpoint / "hf"),
        ("export", step, checkpoint),
        ("import", hf, hf),
        ("import", links, hf),
    ):
        assert run(command, source, target, "--force") == 2
        assert "and would be deleted with it" in sentence(capsys)
    assert run("export", checkpoint, step / "out") == 2
    assert "lies in a step of a checkpoint" in sentence(capsys)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_merge_does_not_replace_its_adapters(
    hf_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, adapter = hf_folder(FAMILY), tmp_path / "out" / "peft"
    make_adapters(hf, adapter, target_modules=["self_attn.k_proj"])
    shutil.copyfile(hf / "config.json", adapter.parent / "config.json")
    (adapter.parent / "step_0").mkdir()
    for command in (
        ("lora-merge", hf, adapter.parent, "--adapter", adapter),
        ("lora-import", adapter, adapter.parent, "--base", hf),
    ):
        capsys.readouterr()
        assert run(*command, "--force") == 2
        assert "the input " in sentence(capsys)
    assert (adapter / "adapter_config.json").is_file()
