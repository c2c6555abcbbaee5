"""Aggregation of token losses. The weights include the denominator, so that the loss of an update
is a plain sum, whatever packs and ranks hold the tokens.

    token_mean      sum / tokens of the batch                   DAPO (arXiv 2503.14476)
    sequence_mean   mean over sequences of their mean           GRPO (arXiv 2402.03300), GSPO
    sequence_sum    mean over sequences of their sum
    constant        sum / (sequences * longest possible)        Dr. GRPO (arXiv 2503.20783)
"""

from collections.abc import Sequence


def loss_denominator(lengths: Sequence[int], counted: Sequence[bool], aggregation: str) -> int:
    """Return the number of tokens, or of sequences, over which the loss of these sequences is
    averaged. The arguments are as in `token_weights`.
    """
    if aggregation != "token_mean":
        return sum(counted)
    return sum(length for length, counts in zip(lengths, counted, strict=True) if counts)


def token_weights(
    lengths: Sequence[int],
    counted: Sequence[bool],
    aggregation: str,
    max_length: int,
    denominator: float | None = None,
) -> list[float]:
    """Return the weight of each token of a sequence, for every sequence of an update.

    lengths: number of tokens of each sequence, > 0. counted: False for sequences that are not
    trained on; they get weight 0, and no denominator counts them. max_length: longest possible
    sequence. denominator: `loss_denominator` of the whole update; None if these are all of its
    sequences.
    """
    if denominator is None:
        denominator = max(loss_denominator(lengths, counted, aggregation), 1)
    weights = {
        "token_mean": lambda length: 1.0 / denominator,
        "sequence_mean": lambda length: 1.0 / (denominator * length),
        "sequence_sum": lambda length: 1.0 / denominator,
        "constant": lambda length: 1.0 / (denominator * max_length),
    }
    weight = weights[aggregation]
    return [
        weight(length) if counts else 0.0 for length, counts in zip(lengths, counted, strict=True)
    ]
