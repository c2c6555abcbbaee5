"""The report: complete in itself, safe whatever a model wrote, bounded in size."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megavlm.observability import report as module
from megavlm.observability.charts import HEIGHT, WIDTH, Line, draw_chart
from megavlm.observability.report import ACCURACY_HEAD, write_report
from megavlm.observability.result import build_result, write_result

from .runs import group, image, write_run

HOSTILE = "<script>alert(1)</script><img src=http://evil.test/x onerror=alert(1)>\"'&amp;\x00"


class Page(HTMLParser):
    """Elements, attributes and visible text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.in_script = False
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.in_script = tag == "script"
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False

    def handle_data(self, data: str) -> None:
        (self.scripts if self.in_script else self.text).append(data)

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]


def report(folder: Path, groups: list[dict[str, Any]] | None = None, steps: int = 5) -> Page:
    write_run(folder, steps=steps, groups=groups)
    write_result(folder, build_result(folder, steps=steps, seed=0, paths={"run": str(folder)}))
    return Page(write_report(folder))


def test_it_shows_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run:\n  seed: 0\n")
    page = report(tmp_path)
    text = "".join(page.text)
    for expected in ("50.0 %", "90.0 %", "+40.0", "this is visual", "How many?", "seed: 0"):
        assert expected in text
    for title in ("Reward", "Test accuracy", "KL to the reference", "Time by phase", "Entropy"):
        assert title in text
    assert page.values("data-step") == ["1", "2", "3", "4", "5"]
    assert page.tags.count("option") == 5 and page.tags.count("article") == 5
    assert len([uri for uri in page.values("src") if uri.startswith("data:image/png")]) == 5


def test_it_loads_nothing(tmp_path: Path) -> None:
    page = report(tmp_path)
    assert all(uri.startswith("data:") for uri in page.values("src"))
    assert not page.values("href") and "link" not in page.tags
    assert "http:" not in page.html and "https:" not in page.html
    assert "url(" not in page.html and "@import" not in page.html


def test_what_a_model_wrote_is_text(tmp_path: Path) -> None:
    response = {"text": HOSTILE, "reward": 0.0, "correct": False, "finish": HOSTILE}
    hostile: dict[str, Any] = dict.fromkeys(("prompt", "answer", "category", "source"), HOSTILE)
    hostile |= {"images": [], "responses": [response]}
    clean, dirty = tmp_path / "clean", tmp_path / "<script>alert(1)<"
    (dirty / "x").mkdir(parents=True)
    (dirty / "config.yaml").write_text(HOSTILE.replace("\x00", ""))
    reference = report(clean, [group()], steps=1)
    page = report(dirty, [hostile], steps=1)
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.scripts == reference.scripts
    assert "".join(page.text).count("<script>alert(1)</script>") >= 5


def test_only_the_pages_own_script_may_run(tmp_path: Path) -> None:
    page = report(tmp_path)
    digest = base64.b64encode(hashlib.sha256("".join(page.scripts).encode()).digest()).decode()
    (policy,) = [value for value in page.values("content") if "default-src" in value]
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy


@pytest.mark.slow
def test_its_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IMAGE_BYTES", 40_000)
    groups = [
        group("p" * 10_000, texts=["r" * 10_000] * 64, images=[image(f"big{i}", (900, 500))])
        for i in range(4)
    ]
    page = report(tmp_path, groups, steps=60)
    assert len(page.values("data-step")) == module.MAX_STEPS
    assert page.values("data-step")[0] == "1" and page.values("data-step")[-1] == "60"
    assert sum(map(len, page.values("src"))) <= 40_000
    assert "left out for size" in page.html
    most = module.MAX_STEPS * 4 * 33 * 2500
    assert len(page.html) < most and "r" * 1300 not in page.html


def test_a_large_image_is_reduced(tmp_path: Path) -> None:
    page = report(tmp_path, [group(images=[image("big", (900, 500))])], steps=1)
    (uri,) = page.values("src")
    assert uri.startswith("data:image/jpeg;base64,")


def test_later_turns_show_their_message(tmp_path: Path) -> None:
    turn = {"message": "It says <image>.", "images": [], "text": "two\x07"}
    asked = group(images=[image("a"), image("b")])
    asked["responses"][0] |= {"turns": [turn]}
    page = report(tmp_path, [asked], steps=1)
    text = "".join(page.text)
    assert text.index("How many?") < text.index("It says <image>.") < text.index("two\\x07")
    assert "card group several" in page.values("class"), "images are side by side, above the text"
    assert len(page.values("src")) == 2


def test_a_prompt_has_a_label_where_an_image_or_a_video_stands(tmp_path: Path) -> None:
    asked = group("Is <image> like <image>?", images=[image("a"), image("b")])
    moved = group("<video>What moved?", images=[image("c")])
    page = report(tmp_path, [asked, moved, group("What is <image>?", "colour")], steps=1)
    prompts = re.findall(r'<div class="prompt">(.*?)</div>', page.html)
    label = "<small>image</small>"
    assert prompts == [
        f"Is {label} like {label}?",
        "What is &lt;image&gt;?",
        "<small>video</small>What moved?",
    ]


def test_a_legend_names_what_was_measured_only(tmp_path: Path) -> None:
    page = report(tmp_path)
    (accuracy,) = [x for x in page.html.split("<figure>") if "<b>Test accuracy</b>" in x]
    assert "shuffled</span>" in accuracy
    lines = [Line("a", "c1", [(1, 0.5)]), Line("b", "c2", [(1, None)]), Line("c", "c3", [])]
    chart = draw_chart("x", lines)
    assert chart is not None and [line.label for line in chart.lines] == ["a"]


def test_cells_carry_their_heading_for_narrow_screens(tmp_path: Path) -> None:
    heads = report(tmp_path).values("data-head")
    assert heads[:10] == list(ACCURACY_HEAD)


def test_an_image_that_is_gone_and_a_path_that_leaves_the_folder(tmp_path: Path) -> None:
    write_run(tmp_path, steps=1)
    lines = tmp_path / "samples" / "rollouts.jsonl"
    (tmp_path / "key1.png").write_bytes((tmp_path / "samples" / "key1.png").read_bytes())
    (tmp_path / "samples" / "key1.png").unlink()
    lines.write_text(lines.read_text().replace("key1.png", "../key1.png"))
    page = Page(write_report(tmp_path))
    assert "image is no longer there" in "".join(page.text) and not page.values("src")


def test_a_run_that_has_left_nothing_yet_has_a_report(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path))
    assert "0 steps recorded" in "".join(page.text) and "section" not in page.tags


def test_a_chart_has_a_gap_where_a_value_is_missing() -> None:
    chart = draw_chart("x", [Line("a", "c1", [(1, 0.0), (2, None), (3, float("nan")), (4, 1.0)])])
    assert chart is not None
    path = chart.lines[0].path
    assert path.count("M") == 2 and "L" not in path and "nan" not in path


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [-2.0, -2.0], [1e-9, 3e-9], [1e6, 9e6]])
def test_a_chart_of_any_range_stays_inside(values: list[float]) -> None:
    chart = draw_chart("x", [Line("a", "c1", list(enumerate(values, 1)))])
    assert chart is not None
    points = chart.lines[0].path.removeprefix("M").split("L")
    assert len(points) == len(values)
    for point in points:
        x, y = map(float, point.split())
        assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT


def test_a_chart_without_values_is_left_out() -> None:
    assert draw_chart("x", [Line("a", "c1", [(1, None)])]) is None


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0, 1.7e-5], ["0", "5e-6", "1e-5", "1.5e-5", "2e-5"]),
        ([10200.0, 11900.0], ["10k", "10.5k", "11k", "11.5k", "12k"]),
        ([-0.5, 0.13], ["-0.6", "-0.4", "-0.2", "0", "0.2"]),
        ([0.0, 2e6], ["0", "500k", "1e6", "1.5e6", "2e6"]),
    ],
)
def test_each_label_of_an_axis_is_its_value(values: list[float], labels: list[str]) -> None:
    chart = draw_chart("x", [Line("a", "c1", list(enumerate(values, 1)))])
    assert chart is not None
    assert [label for _, label in chart.y_ticks] == labels


def test_a_chart_shows_its_values_on_hover() -> None:
    lines = [
        Line("loss", "c1", [(1, 0.5), (2, None), (3, 0.25)]),
        Line("mean", "c2", [(2, 0.75), (3, 0.5)]),
    ]
    chart = draw_chart("Loss", lines)
    assert chart is not None
    hints = [hint for _, _, hint in chart.columns]
    assert hints == ["step 1: loss 0.5", "step 2: mean 0.75", "step 3: loss 0.25, mean 0.5"]
    long = draw_chart("Loss", [Line("loss", "c1", [(step, 1.0) for step in range(5000)])])
    assert long is not None and len(long.columns) <= 100, "a long run's page stays small"
    assert long.columns[-1][2] == "step 4999: loss 1"
