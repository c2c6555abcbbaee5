"""Every form in which a data set names an image."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megavlm.data.media import image_sources
from megavlm.data.media.image_sources import DataFolder, is_url, media_bytes
from tests.conftest import read_rows


def encoded(format_: str) -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, format_)
    return file.getvalue()


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_base64_and_data_urls(tmp_path: Path, format_: str) -> None:
    data, place = encoded(format_), DataFolder(str(tmp_path))
    text = base64.b64encode(data).decode()
    assert media_bytes(text, place) == data
    assert media_bytes(text[:76] + "\n" + text[76:], place) == data
    assert media_bytes(f"data:image/{format_.lower()};base64,{text}", place) == data
    quoted = "".join(f"%{byte:02x}" for byte in data)
    assert media_bytes(f"data:image/png,{quoted}", place) == data


def test_structs_and_paths(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"file")
    place = DataFolder(str(tmp_path))
    assert media_bytes({"bytes": b"bytes", "path": "a/x.png"}, place) == b"bytes"
    assert media_bytes({"bytes": None, "path": "a/x.png"}, place) == b"file"
    assert media_bytes("a/x.png", place) == b"file"
    assert media_bytes("a/../a/x.png", place) == b"file"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "neither bytes nor a path"),
        ({"bytes": None, "path": None}, "neither bytes nor a path"),
        (3, "neither bytes nor a path"),
        ("", "neither bytes nor a path"),
        ("../x.png", "leaves the data file's folder"),
        ("/etc/passwd", "leaves the data file's folder"),
        ("absent.png", "no image at"),
        ("x" * 5000, "no image at"),
        ("a\0b", "embedded null byte"),
        ("file:///etc/passwd", "only http, https and data URLs are read"),
        ("FILE:/etc/passwd", "only http, https and data URLs are read"),
        ("s3://bucket/x.png", "only http, https and data URLs are read"),
        ("gopher://host/x", "only http, https and data URLs are read"),
        ("data:image/png;base64", "has no comma"),
        ("data:image/png;base64,a", "base64 is broken"),
        ("iVBORw0KGgo" + "A" * 50 + "=", "base64 is broken"),
    ],
)
def test_what_is_no_image_is_refused(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        media_bytes(value, DataFolder(str(tmp_path)))


def test_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_sources, "MAX_FILE_BYTES", 10)
    (tmp_path / "x.png").write_bytes(b"x" * 11)
    for value in (b"x" * 11, "x.png", "data:;base64," + "A" * 40):
        with pytest.raises(ValueError, match="more than the limit of 10"):
            media_bytes(value, DataFolder(str(tmp_path)))


def test_what_needs_the_network() -> None:
    for url in ("http://a/b", "HTTPS://a/b", {"bytes": None, "path": "https://a"}):
        assert is_url(url)
    for other in (b"http://", "a/http.png", None, {"bytes": b"x", "path": "https://a"}):
        assert not is_url(other)


def lines(path: Path, *records: dict[str, Any]) -> list[str]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [str(path)]


def test_several_image_columns_and_a_question_for_all(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(name.encode())
    files = lines(tmp_path / "x.jsonl", {"left": "a.png", "right": ["b.png", "a.png"]})
    (row,) = read_rows(
        files, prompt_key=None, question="<image>or<image><image>?", answer_key=None,
        image_keys=("left", "right"),
    )  # fmt: skip
    assert row.images == (b"a", b"b", b"a") and row.answer == ""
    with pytest.raises(ValueError, match=r":1: 1 <image> placeholders in 'data\.question' but 3"):
        read_rows(
            files, prompt_key=None, question="<image>", answer_key=None,
            image_keys=("left", "right"),
        )  # fmt: skip
    mixed = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    files = lines(tmp_path / "y.jsonl", {"problem": mixed, "answer": "1", "images": ["a.png"]})
    with pytest.raises(ValueError, match="images both in the messages and in images"):
        read_rows(files)
