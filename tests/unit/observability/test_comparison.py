"""Several runs on one page."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from megavlm.cli import app
from megavlm.observability.comparison import STYLES, write_comparison
from tests.unit.observability.runs import evaluation, write_run


def test_runs_side_by_side(tmp_path: Path) -> None:
    for name, rate, steps in (("<a>", 0.1, 5), ("b", 0.2, 8)):
        write_run(tmp_path / name, steps=steps, after=evaluation(rate))
        config = (
            f"run: {{dir: {name}}}\noptimizer: {{lr: {rate}, clip: 1.0}}\nreward: {{parts: {{}}}}"
        )
        (tmp_path / name / "config.yaml").write_text(config)
    page = tmp_path / "page.html"
    words = ["report", str(tmp_path / "<a>"), str(tmp_path / "b"), "--output", str(page)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "&lt;a&gt;" in text and "optimizer.lr" in text
    for same in ("optimizer.clip", "run.dir", "lora"):
        assert same not in text
    row = text[text.index('data-head="run">b') :]
    cells = [part.partition("<")[0] for part in row.split('">')[1:9]]
    assert cells == ["b", "8", "0.450", "45.0 %", "20.0 %", "0.00450", "2.00", "2.0 s"]
    assert text.count("<figure>") == 8 and "https:" not in text


def test_more_runs_than_lines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="7 runs are more than the 6"):
        write_comparison([tmp_path] * (len(STYLES) + 1), tmp_path / "page.html")
