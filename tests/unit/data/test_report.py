"""The page about a data set: right numbers, nothing of the data run or loaded."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from megavlm.config.data import Data
from megavlm.config.load import load
from megavlm.data.processor import Processor
from megavlm.data.report import write_data_report
from megavlm.data.rows import Rows
from megavlm.data.summary import MAX_REASONS, Summary, evenly, summarize
from megavlm.families import family_of
from megavlm.observability.progress import Progress
from megavlm.run.data_report import data_report
from tests.conftest import DATA
from tests.unit.data.media.test_image_decoding import encode

LONG = "q " * 500
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def image(width: int, height: int, seed: int = 0) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return encode(Image.fromarray(noise))


class Tags(HTMLParser):
    """Checks nesting, and collects tags and attributes."""

    VOID = ("meta", "img", "br", "circle", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    records: list[dict[str, Any]] = [
        {"images": [image(60, 90, i % 3)], "problem": f"<image>q{i}", "answer": "a", "task": "t"}
        for i in range(20)
    ]
    whole = encode(Image.effect_noise((60, 90), 50).convert("RGB"), "JPEG")
    half = whole[: len(whole) // 2]  # its header is whole
    records += [
        {"images": [b"broken"], "problem": "<image>q", "answer": "a", "task": "t"},
        {"images": [half], "problem": "<image>q", "answer": "a", "task": "t"},
        {"images": [image(60, 90)], "problem": "<image>" + LONG, "answer": "a", "task": "t"},
        {"images": [], "problem": EVIL, "answer": EVIL, "task": EVIL},
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "x.parquet")
    return Rows([str(tmp_path / "x.parquet")], Data())


@pytest.fixture(scope="module")
def processor(folder_of: Callable[[str], Path]) -> Processor:
    return Processor(folder_of("qwen2_5_vl"), DATA, family_of(folder_of("qwen2_5_vl")))


def test_numbers(rows: Rows, processor: Processor) -> None:
    summary = summarize(rows, processor, max_tokens=200, limit=100)
    assert (summary.num_rows, summary.num_looked_at) == (24, 24)
    assert (summary.num_bad, summary.num_long) == (2, 1)
    assert "x.parquet:21: image 1: the JPEG image is broken" in summary.reasons[1]
    assert summary.num_usable == 21
    assert summary.by_category == {"t": 21, EVIL: 1}  # the long one too
    assert max(summary.prompt_tokens) > 500
    assert set(summary.widths) == {60} and set(summary.heights) == {90}
    assert len(summary.distinct_images) == 3 and len(summary.widths) == 21
    assert len(summary.samples) >= 8
    assert summary.prompt_tokens[0] == processor.num_tokens(rows[0])
    few = summarize(rows, processor, max_tokens=200, limit=5)
    assert (few.num_rows, few.num_looked_at) == (24, 5)


def test_the_page_is_whole_and_holds_nothing_that_runs(
    rows: Rows, processor: Processor, tmp_path: Path
) -> None:
    summary = summarize(rows, processor, max_tokens=200, limit=100)
    write_data_report(tmp_path / "page.html", {"Training data": summary})
    html = (tmp_path / "page.html").read_text()
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    names = [tag for tag, _ in tags.seen]
    assert "script" not in names and "iframe" not in names and "link" not in names
    assert not any(name.startswith("on") for _, attributes in tags.seen for name in attributes)
    images = [attributes["src"] for tag, attributes in tags.seen if tag == "img"]
    assert images and all(src.startswith("data:image/") for src in images)
    assert names.count("article") == len(summary.samples)
    assert "&lt;script&gt;" in html and "cannot be used" in html
    assert "tokens, more than data.max_prompt_tokens=200" in html
    policy = re.search('Content-Security-Policy" content="([^"]*)"', html)
    assert policy and policy[1].startswith("default-src 'none'")
    assert not re.search(r"https?://", html)


def test_a_page_tells_how_many_reasons_it_leaves_out(tmp_path: Path) -> None:
    summary = Summary(25, num_looked_at=25, num_bad=25, reasons=["broken"] * MAX_REASONS)
    write_data_report(tmp_path / "page.html", {"Training data": summary})
    assert "and 5 more" in (tmp_path / "page.html").read_text()


def test_a_recipe_s_report(
    write_recipe: Callable[..., Path], folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    lines = [r'{"problem": "q", "answer": "a"}', r'{"problem": "q", "answer": ']
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    folder = f"model.folder={folder_of('qwen2_5_vl')}"
    files = f"data.test_files=[{tmp_path / 'x.jsonl'}]"
    html = data_report(load(write_recipe(), [folder, files]), Progress(is_quiet=True)).read_text()
    assert "Training data" in html and "Test data" in html
    assert "x.jsonl:2: the line is not JSON" in html


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.dir=/etc/passwd/x"], "run.dir=/etc/passwd/x cannot be written, because /etc/passwd"),
        (["data.train_files=[]", "data.test_files=[]"], "data.train_files=[] names no data: add"),
    ],
)
def test_a_report_that_cannot_be_made_is_refused(
    write_recipe: Callable[..., Path], overrides: list[str], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        data_report(load(write_recipe(), overrides), Progress(is_quiet=True))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_evenly() -> None:
    assert evenly(3, 10) == [0, 1, 2] and evenly(0, 5) == [] and evenly(9, 1) == [0]
    assert evenly(101, 3) == [0, 50, 100]
