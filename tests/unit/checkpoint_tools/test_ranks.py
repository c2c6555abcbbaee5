"""An import by several processes: each reads and writes its share, and all fail together."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from checkpoint_tools.compare_weights import compare_weights
from checkpoint_tools.export_hf import export_hf
from checkpoint_tools.import_hf import Ranks, import_hf, share
from checkpoint_tools.safetensors_io import UnmappedHFFolder
from checkpoint_tools.weights import hub_weights, open_weights
from megavlm.checkpointing.writer import RecordFile
from megavlm.process import CheckpointError
from tests.support.fork import launch
from tests.unit.checkpoint_tools.conftest import Folder


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_are_the_whole_in_order_and_about_equal(size: int, hf_folder: Folder) -> None:
    weights = hub_weights(hf_folder("qwen3_vl_moe"))
    shares = [share(weights, Ranks(rank, size)) for rank in range(size)]
    assert [entry for part in shares for entry in part] == list(weights.entries())
    largest = max(map(weights.entry_bytes, weights.entries()))
    for part in shares:
        assert abs(sum(map(weights.entry_bytes, part)) - weights.total_bytes / size) <= largest


def read_and_write(source: Path, target: Path) -> set[str]:
    """Names that this rank reads."""
    import torch.distributed as dist

    names: set[str] = set()
    read = UnmappedHFFolder._read

    def noting(self: UnmappedHFFolder, name: str, *rest: object) -> object:
        names.add(name)
        return read(self, name, *rest)  # type: ignore[arg-type]

    with patch.object(UnmappedHFFolder, "_read", noting):
        import_hf(source, target, ranks=Ranks(dist.get_rank(), dist.get_world_size()))
    return names


@pytest.mark.distributed
def test_ranks_share_the_work(hf_folder: Folder, imported: Folder, tmp_path: Path) -> None:
    family = "qwen3_vl_moe"
    names = launch(3, read_and_write, hf_folder(family), tmp_path / "checkpoint")
    assert set.union(*names) == set(UnmappedHFFolder(hf_folder(family)))
    # At the border of two shares a stack of experts may be cut.
    assert all(len(a & b) <= 1 for a, b in ((names[0], names[1]), (names[1], names[2])))

    step = tmp_path / "checkpoint" / "step_00000000"
    assert len(list(step.glob("*.distcp"))) == 3
    result = compare_weights(open_weights(tmp_path / "checkpoint"), open_weights(imported(family)))
    assert result.equal and not result.different
    export_hf(tmp_path / "checkpoint", tmp_path / "out")
    assert not compare_weights(
        open_weights(tmp_path / "out"), open_weights(hf_folder(family))
    ).different


def fail_on_rank_1(source: Path, target: Path) -> str:
    import torch.distributed as dist

    rank = dist.get_rank()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "__1_0.distcp")

    with patch.object(RecordFile, "add", full) if rank == 1 else nullcontext():
        try:
            import_hf(source, target, ranks=Ranks(rank, dist.get_world_size()))
        except (CheckpointError, ValueError) as error:
            return str(error)
    return "no error"


@pytest.mark.distributed
def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(
    hf_folder: Folder, tmp_path: Path
) -> None:
    messages = launch(2, fail_on_rank_1, hf_folder("qwen2_vl"), tmp_path / "checkpoint")
    assert messages[0] == messages[1]
    assert "rank 1: [Errno 28] No space left on device: '__1_0.distcp'" in messages[0]
    assert not list(tmp_path.iterdir())

    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").touch()
    messages = launch(2, fail_on_rank_1, hf_folder("qwen2_vl"), tmp_path / "used")
    assert messages[0] == messages[1] and "is not empty" in messages[0]


@pytest.mark.distributed
@pytest.mark.slow
def test_the_command_under_torchrun(hf_folder: Folder, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    source, target = str(hf_folder("qwen2_vl")), str(tmp_path / "checkpoint")
    command = [*torchrun, "-m", "checkpoint_tools"]
    done = subprocess.run(
        [*command, "import", source, target], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tensors,") == 1
    assert len(list(tmp_path.glob("checkpoint/*/*.distcp"))) == 2
    assert not compare_weights(
        open_weights(tmp_path / "checkpoint"), open_weights(Path(source))
    ).different

    done = subprocess.run(
        [*command, "import", source, target], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1 and "is not empty" in done.stderr
