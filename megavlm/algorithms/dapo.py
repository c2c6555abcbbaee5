"""DAPO's penalty for long responses (arXiv 2503.14476)."""


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """Compute the soft punishment of a long response (equation 13), in -1..0.

    0 up to max_length - buffer tokens, then linear, -1 at max_length.
    """
    assert 0 < buffer <= max_length
    excess = length - (max_length - buffer)
    return -min(max(excess / buffer, 0.0), 1.0)
