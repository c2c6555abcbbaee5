"""Pieces of tensors in record files: put together again whatever they are, or refused."""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megavlm.checkpointing.adapter_settings import saved_adapter_keys
from megavlm.checkpointing.checksums import file_checksums
from megavlm.checkpointing.folder import Manifest
from megavlm.checkpointing.reader import StepReader
from megavlm.checkpointing.writer import RecordFile, write_contents

WHOLE = torch.arange(4 * 6 * 5.0).reshape(4, 6, 5)


def write(folder: Path, pieces: list[tuple[tuple[int, ...], Tensor]], files: int = 1) -> StepReader:
    records = []
    for rank in range(files):
        with RecordFile(folder, rank) as file:
            for offsets, piece in pieces[rank::files]:
                file.add("x", piece, offsets)
        records += file.pieces
        assert file_checksums(folder, [file.name]) == {file.name: file.sums}
    write_contents(folder, {"x": torch.empty(WHOLE.shape, device="meta")}, records)
    return StepReader(folder)


def cut(*sizes: int) -> list[tuple[tuple[int, ...], Tensor]]:
    """Pieces of at most these sizes."""
    starts = product(*(range(0, n, size) for n, size in zip(WHOLE.shape, sizes, strict=True)))
    return [
        (start, WHOLE[tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))])
        for start in starts
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("sizes", ["465", "165", "135", "462", "342", "111"])
def test_whole_and_rows_from_any_pieces(tmp_path: Path, sizes: str) -> None:
    reader = write(tmp_path, cut(*map(int, sizes)), files=2)
    assert torch.equal(reader.read("x"), WHOLE)
    for row in range(4):
        assert torch.equal(reader.read("x", row), WHOLE[row])
    assert reader.nbytes("x") == WHOLE.nbytes

    # torch's own reader agrees, as megatron-core's does, which is made of it.
    found = torch.empty_like(WHOLE)
    dcp.load({"x": found}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(found, WHOLE)


def test_pieces_are_written_as_they_lie_without_what_is_around_them(tmp_path: Path) -> None:
    square = torch.randn(300, 300)
    with RecordFile(tmp_path) as file:
        file.add("x", square[10:20].t())
    write_contents(tmp_path, {"x": torch.empty(300, 10, device="meta")}, file.pieces)
    assert torch.equal(StepReader(tmp_path).read("x"), square[10:20].t())
    assert file.sums["bytes"] < 2 * 10 * 300 * 4


def test_a_missing_piece_is_not_made_up(tmp_path: Path) -> None:
    reader = write(tmp_path, [piece for piece in cut(1, 3, 5) if piece[0] != (2, 3, 0)])
    with pytest.raises(ValueError, match="holds only a part of x"):
        reader.read("x")
    with pytest.raises(ValueError, match="holds only a part of x"):
        reader.read("x", 2)
    assert torch.equal(reader.read("x", 1), WHOLE[1])


def test_no_flipped_byte_is_read(tmp_path: Path) -> None:
    """Any of a record: numbers, names, pickle, table of contents. Padding may be what it likes."""
    reader = write(tmp_path, cut(4, 6, 5))
    path = tmp_path / "__0_0.distcp"
    whole = path.read_bytes()
    refused = 0
    for index in range(len(whole)):
        damaged = bytearray(whole)
        damaged[index] ^= 1 << index % 8
        path.write_bytes(damaged)
        try:
            assert torch.equal(reader.read("x"), WHOLE), index
        except ValueError as error:
            refused += 1
            assert "__0_0.distcp is damaged" in str(error) or "holds torch." in str(error)
    assert refused >= WHOLE.nbytes


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"N.",  # None
        b"\x80\x04\x95" + b"\xff" * 8 + b"N.",  # a frame of more bytes than can be
        b"\x80\x04ctorch.serialization\n_get_layout\n\x8c\x01x\x85R.",  # no such layout
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81.",  # without its parts
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nNNN\x87R.",
    ],
)
def test_contents_that_are_none_are_one_sentence(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(ValueError, match=r"\.metadata cannot be read as the contents of .*\.$"):
        StepReader(tmp_path)


@pytest.mark.slow
def test_contents_with_any_bit_flipped_are_refused_before_they_are_read(tmp_path: Path) -> None:
    """Some would ask for more memory than there is."""
    with RecordFile(tmp_path) as file:
        file.add("x.lora_A", WHOLE)
    write_contents(tmp_path, {"x.lora_A": WHOLE.to("meta")}, file.pieces)
    names = [path.name for path in tmp_path.iterdir()]
    Manifest(0, False, {}, file_checksums(tmp_path, names)).write(tmp_path)
    assert saved_adapter_keys(tmp_path) == {"x.lora_A"}
    path = tmp_path / ".metadata"
    whole = path.read_bytes()
    for place, bit in product(range(len(whole)), range(8)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"\.metadata is damaged: its checksum differs"):
            saved_adapter_keys(tmp_path)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    reader = write(tmp_path, cut(4, 6, 5))
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"__0_0\.distcp is missing"):
        reader.read("x")
