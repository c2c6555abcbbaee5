"""Numbers from outside: from servers, rewards and environments."""

LARGEST = (2.0 - 2.0**-23) * 2.0**127  # of float32, in which training computes


def is_float32(value: object) -> bool:
    """Return True for a number that is finite in float32, however large an int it is."""
    return isinstance(value, int | float) and -LARGEST <= value <= LARGEST
