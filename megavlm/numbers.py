"""Numbers from outside: from servers, rewards and environments."""

# Share of a number, or of 1, by which the rounding of its sum may move a reward: 0.7 + 0.2 + 0.1 is
# below 1, and training keeps rewards in float32.
ROUNDING = 1e-6
LARGEST = (2.0 - 2.0**-23) * 2.0**127  # of float32, in which training computes


def is_float32(value: object) -> bool:
    """Return True for a number that is finite in float32, however large an int it is."""
    return isinstance(value, int | float) and -LARGEST <= value <= LARGEST


def at_least(value: float, bound: float) -> bool:
    """Return True if a sum is `bound` or more, up to rounding."""
    return value >= bound - ROUNDING * max(1.0, abs(bound))
