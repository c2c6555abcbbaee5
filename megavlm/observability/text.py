"""Numbers, durations and long texts as people read them."""

import math
import re
from collections.abc import Mapping, Sequence


def number(value: float | None, digits: int = 3) -> str:
    """Format a number in at most seven characters and a sign: `digits` significant ones, k, or an
    exponent.
    """
    if value is None or not math.isfinite(value):
        return "nan" if value is None or math.isnan(value) else str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if round(size) >= 1000:
        return f"{value / 1e3:.{0 if size >= 9950 else 1}f}k"
    return f"{value:.0f}" if round(size) >= 10**digits else f"{value:#.{digits}g}".rstrip(".")


def percent(share: float | None, digits: int = 1) -> str:
    """Format a share of 0..1 in percent; None is a dash."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def points(difference: float | None) -> str:
    """Format a difference of two shares in percentage points, with its sign; None is a dash."""
    return "-" if difference is None else f"{100 * difference:+.1f}"


def duration(seconds: float) -> str:
    """Format seconds as 12.3 s, 4 min 05 s, or 3 h 12 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def minutes(seconds: float) -> str:
    """Format seconds as a clock does: 0:05, 4:05, 3:12:00."""
    whole, rest = divmod(round(seconds), 60)
    return f"{whole}:{rest:02d}" if whole < 60 else f"{whole // 60}:{whole % 60:02d}:{rest:02d}"


def visible(text: str) -> str:
    """Escape characters that a page would not show, and those that stand for bytes that are not
    valid UTF-8.
    """
    return "".join(
        char if char in "\n\t" or (char.isprintable() and char != "\ufffd") else _escape(char)
        for char in text
    )


def _escape(char: str) -> str:
    return " " if char.isspace() else char.encode("unicode_escape").decode()


def short_names(names: Sequence[str]) -> list[str]:
    """Return names of models for a table: the last parts of their paths that are meaningful and
    tell them apart.
    """
    general = re.compile(r"checkpoints|hf|step_\d+")

    def end(name: str, count: int) -> str:
        parts = [part for part in name.split("/") if part] or [name]
        while count < len(parts) and general.fullmatch(parts[-count]):
            count += 1
        return "/".join(parts[-count:])

    longest = max((name.count("/") + 1 for name in names), default=1)
    for count in range(1, longest + 1):
        found = [end(name, count) for name in names]
        if len(set(found)) == len(set(names)):
            break
    return found


def shorten(text: str, limit: int) -> str:
    """Cut a text at `limit` characters, and append how many characters are left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} [... {len(text) - limit} more characters]"


def failed_rewards(failures: Mapping[str, int]) -> str:
    """Return a sentence about responses whose reward failed, counted by kind of failure."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(failures.items()))
    total = sum(failures.values())
    return f"{total} responses count as incorrect because their reward failed ({kinds})"
