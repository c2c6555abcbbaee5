"""The documentation builds, and a link to nothing fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def build(site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site), *options]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "true", "NO_COLOR": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_built_pages_need_no_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 3
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for marker in ('src="http', "src=//", 'rel="stylesheet" href="http', "fonts.googleapis"):
            assert marker not in text, page


def test_generated_pages_are_built(site: Path) -> None:
    commands = (site / "reference/cli.html").read_text(encoding="utf-8")
    assert "megavlm train" in commands and "megavlm-convert import" in commands
    assert not re.search(r"\.\.\.</li>", commands), "the list of commands is cut off"
    assert (site / "changelog.html").is_file() and (site / "parity-results.html").is_file()
    assert 'src="images/cost.svg"' in (site / "benchmarks.html").read_text(encoding="utf-8")


def test_a_broken_link_fails(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("[a](#nowhere)\n\n[b](nothing.md)\n")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    validation = settings[settings.index("validation:") : settings.index("\nnav:")]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\nstrict: true\n{validation}")
    done = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert done.returncode == 1
    assert "nothing.md" in done.stderr and "#nowhere" in done.stderr
