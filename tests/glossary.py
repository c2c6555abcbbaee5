"""Names that docs/reference/metrics.md explains."""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"


def unexplained(names: Iterable[str]) -> set[str]:
    """The metrics among `names` that have no entry."""
    firsts = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("|")]
    entries = [name for cell in firsts for name in re.findall("`([^`]+)`", cell)]
    # `reward/<category>` stands for every category.
    known = [re.sub("<[a-z]+>", ".+", re.escape(entry)) for entry in entries]
    return {name for name in names if not any(re.fullmatch(entry, name) for entry in known)}
