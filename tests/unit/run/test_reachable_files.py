"""Machines that cannot read the files of a run are named before it starts."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from megavlm.config.load import load
from megavlm.run.checks.reachable_files import check_reachable_files, reachable_files, unreadable
from tests.conftest import write_model_folder, write_rows
from tests.support.fork import launch

ROW = {"problem": "?", "answer": "1", "images": []}


def on_machines(recipe: Path, disks: tuple[Path, ...]) -> str:
    """Check on ranks that are each alone on a machine, which sees its own disk at ./disk."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = "0"
    socket.gethostname = lambda: f"node{rank}"
    os.chdir(disks[rank].parent)
    try:
        check_reachable_files(load(recipe))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_a_machine_that_lacks_a_file_is_named_on_every_rank(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    disks = tuple(tmp_path / f"node{rank}/disk" for rank in range(3))
    disks[0].mkdir(parents=True)
    write_model_folder(disks[0] / "model")
    for name in ("a", "b"):
        write_rows(disks[0] / f"{name}.parquet", [ROW])
    for disk in disks[1:]:
        shutil.copytree(disks[0], disk)
    recipe = write_recipe(
        model={"folder": "disk/model"}, data={"train_files": ["disk/a.parquet", "disk/b.parquet"]}
    )
    assert launch(3, on_machines, recipe, disks) == [""] * 3
    (disks[1] / "b.parquet").unlink()
    (disks[2] / "b.parquet").unlink()
    (sentence,) = set(launch(3, on_machines, recipe, disks))
    assert sentence.startswith("data.train_files: disk/b.parquet cannot be read on node1, node2, ")
    shutil.rmtree(disks[2] / "model")
    (sentence,) = set(launch(3, on_machines, recipe, disks))
    assert "disk/b.parquet (and 1 more files) cannot be read on node1, node2, but" in sentence


def test_of_a_data_set_behind_a_url_one_file_is_looked_at(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    write_model_folder(tmp_path / "model")
    paths = [write_rows(tmp_path / f"{name}.parquet", [ROW]) for name in ("a", "b")]
    urls = f"file://{tmp_path}/*.parquet"
    config = load(
        write_recipe(
            model={"folder": str(tmp_path / "model")}, data={"train_files": [*paths, urls]}
        )
    )
    model, *files = reachable_files(config)
    assert [name for _, name in files] == [*paths, f"file://{tmp_path}/a.parquet"]
    assert unreadable([model, *files]) == []
    Path(paths[0]).unlink()
    assert unreadable([model, *files]) == [files[0], files[2]]
