"""Untrusted images, from file to prompt: used, or skipped with a reason."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from megavlm.config.data import Data
from megavlm.data.loader import PromptStream
from megavlm.data.processor import Processor
from megavlm.data.rows import Rows
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family_of
from tests.conftest import DATA
from tests.unit.data.media.test_image_decoding import bomb, encode

ROOT = Path(__file__).parents[2]
NOISE = np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8)


def gif(num_frames: int) -> bytes:
    """One drawn frame, repeated by its bytes: making 10,000 with Pillow takes long."""
    two = [Image.new("RGB", (32, 32), color) for color in ("red", "blue")]
    file = io.BytesIO()
    two[0].save(file, "GIF", save_all=True, append_images=two[1:], duration=50)
    data = file.getvalue()
    control = b"\x21\xf9\x04"  # before each frame
    start = data.index(control, data.index(control) + 1)
    return data[:start] + data[start:-1] * (num_frames - 1) + data[-1:]


def exif() -> bytes:
    tags = Image.Exif()
    tags[0x0112] = 6
    return encode(Image.fromarray(NOISE), "JPEG", exif=tags)


USED: dict[str, Callable[[], bytes]] = {
    "plain": lambda: encode(Image.fromarray(NOISE)),
    "EXIF rotation": exif,
    "CMYK": lambda: encode(Image.fromarray(NOISE).convert("CMYK"), "JPEG"),
    "palette with transparency": lambda: encode(
        Image.fromarray(NOISE).convert("P"), "GIF", transparency=3
    ),
    "10,000 frames": lambda: gif(10_000),
}
LEFT_OUT: dict[str, Callable[[], bytes]] = {
    "bomb": lambda: bomb(20_000, 20_000),
    "truncated": lambda: encode(Image.fromarray(NOISE), "JPEG")[:900],
    "SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc"/></svg>',
    "text": lambda: b"no image",
    "empty": lambda: b"",
}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, ["What?"] * 50, seed=0, family="qwen2_5_vl", max_pixels=256 * 28**2)
    return Processor(folder, DATA, family_of(folder))


def stream(tmp_path: Path, images: list[Any], processor: Processor, **options: Any) -> Any:
    table = {"problem": ["<image>What?"] * len(images), "answer": ["a"] * len(images)}
    column = pa.array(images, type=pa.binary() if isinstance(images[0], bytes) else None)
    pq.write_table(pa.table({**table, "images": column}), tmp_path / "x.parquet")
    data = Data(category_key=None, **options)
    rows = Rows([str(tmp_path / "x.parquet")], data)
    return PromptStream(rows, processor.prompt, data, seed=0, batch_size=len(images))


def test_odd_images_are_used_and_broken_ones_left_out(tmp_path: Path, processor: Processor) -> None:
    images = [make() for make in (*USED.values(), *LEFT_OUT.values())]
    source = stream(tmp_path, images, processor, bad_samples="skip")
    drawn = source.take(len(USED))
    names = [[*USED, *LEFT_OUT][prompt.row.index] for prompt in drawn]
    assert set(names) == set(USED) and len(names) == len(USED)
    grid = {name: prompt.images[0].grid for name, prompt in zip(names, drawn, strict=True)}
    assert grid["EXIF rotation"][1] > grid["EXIF rotation"][2], "it is upright"
    source.take(len(USED))
    assert source.skipped["bad"] >= len(LEFT_OUT) and source.skipped["long"] == 0
    reasons = " ".join(source.reasons)
    assert "larger than the limit" in reasons and "not an image in one of" in reasons
    assert "x.parquet:" in reasons


def test_broken_images_are_refused_by_configuration(tmp_path: Path, processor: Processor) -> None:
    for name, make in LEFT_OUT.items():
        with pytest.raises(ValueError, match=r"x\.parquet:0: "):
            stream(tmp_path, [make()], processor).take(1)
            pytest.fail(name)


def test_the_extension_says_nothing(tmp_path: Path, processor: Processor) -> None:
    (tmp_path / "a.jpg").write_bytes(USED["plain"]())
    (tmp_path / "b.png").write_bytes(LEFT_OUT["SVG"]())
    source = stream(tmp_path, ["a.jpg", "b.png"], processor, bad_samples="skip")
    assert [prompt.row.index for prompt in source.take(3)] == [0, 0, 0]


@pytest.mark.parametrize("name", ["bomb", "10,000 frames"])
def test_memory_is_bounded(name: str) -> None:
    """In a process of its own, whose peak is nobody else's."""
    script = (
        "import resource, sys; from megavlm.data.media.image_decoding import decode\n"
        "data = sys.stdin.buffer.read()\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "try: decode(data)\n"
        "except ValueError as error: print(error, file=sys.stderr)\n"
        "print(peak() - before)\n"
    )
    data = {**USED, **LEFT_OUT}[name]()
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, cwd=ROOT)
    assert (b"larger than the limit" in done.stderr) == (name == "bomb")
    assert int(done.stdout) < 50 * 1024  # KiB


def test_a_distinct_image_is_processed_once_in_a_step(
    tmp_path: Path, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = encode(Image.fromarray(NOISE[::-1].copy()))
    calls = []
    original = processor._images.process
    monkeypatch.setattr(
        processor._images, "process", lambda image: calls.append(1) or original(image)
    )
    source = stream(tmp_path, [USED["plain"](), other] * 4, processor)
    prompts = source.take(8)
    assert len(calls) <= 2 and len({id(p.images[0]) for p in prompts}) == 2
