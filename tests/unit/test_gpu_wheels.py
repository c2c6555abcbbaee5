"""Wheels in pieces: joined they are the same, and a damaged or missing piece is found."""

from pathlib import Path

import pytest

from launch import gpu_wheels

CONTENTS = {"a.whl": b"a" * 25, "b.whl": b"", "c.whl": bytes(range(50)), "d.whl": b"d" * 10}


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, content in CONTENTS.items():
        (wheels / name).write_bytes(content)
    gpu_wheels.cut(sorted(wheels.iterdir()), tmp_path / "pieces", size=20)
    return tmp_path / "pieces"


def test_joined_pieces_are_the_wheels(pieces: Path, tmp_path: Path) -> None:
    sizes = [path.stat().st_size for path in sorted(pieces.glob("piece-*"))]
    assert sizes == [20, 20, 20, 20, 5]
    gpu_wheels.join(pieces, tmp_path / "joined")
    found = {path.name: path.read_bytes() for path in (tmp_path / "joined").iterdir()}
    assert found == CONTENTS


@pytest.mark.parametrize("fault", ["missing", "damaged", "last missing"])
def test_a_piece_that_is_not_whole_is_found(pieces: Path, tmp_path: Path, fault: str) -> None:
    names = {"missing": "piece-001", "damaged": "piece-002", "last missing": "piece-004"}
    path = pieces / names[fault]
    if fault == "damaged":
        path.write_bytes(path.read_bytes()[::-1])
    else:
        path.unlink()
    with pytest.raises(ValueError, match="whl is damaged or one of its pieces is missing"):
        gpu_wheels.join(pieces, tmp_path / "joined")


def test_pieces_fit_what_carries_them() -> None:
    assert gpu_wheels.PIECE <= 60 * 10**6
