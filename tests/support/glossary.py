"""Names that docs/reference/metrics.md explains."""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def entries() -> list[str]:
    """The metrics that have an entry; `reward/<category>` stands for every category."""
    firsts = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [name for cell in firsts for name in re.findall("`([^`]+)`", cell)]


def unexplained(names: Iterable[str]) -> set[str]:
    """The metrics among `names` that have no entry."""
    known = [re.sub("<[a-z]+>", ".+", re.escape(entry)) for entry in entries()]
    return {name for name in names if not any(re.fullmatch(entry, name) for entry in known)}
