"""Numbers, durations and long texts as people read them."""

import math
from collections.abc import Mapping


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


def points(difference: float) -> str:
    """Format a difference of two shares in percentage points, with its sign."""
    return f"{100 * difference:+.1f}"


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


def shorten(text: str, limit: int) -> str:
    """Cut a text at `limit` characters, and append how many are left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} [... {len(text) - limit} more characters]"


def failed_rewards(failures: Mapping[str, int]) -> str:
    """Return a sentence about responses whose reward failed, counted by kind of failure."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(failures.items()))
    total = sum(failures.values())
    return f"{total} responses count as incorrect because their reward failed ({kinds})"
