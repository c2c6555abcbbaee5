"""Parts of RESULTS.md that commands write: each stands between two comments."""

import re
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")


def replace_part(name: str, text: str, path: Path = RESULTS) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- end of NAME -->`."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before = path.read_text(encoding="utf-8")
    pattern = f"(?<={re.escape(begin)}\n).*(?={re.escape(end)})"
    after, count = re.subn(pattern, lambda _: f"\n{text.strip()}\n\n", before, flags=re.DOTALL)
    assert count == 1, f"{path} has no part {name}"
    path.write_text(after, encoding="utf-8")
