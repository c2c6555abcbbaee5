"""Aggregation of token losses. The weights include the denominator, so that the loss of an update
is a plain sum, whatever packs and ranks hold the tokens.

    token_mean      sum / tokens of the batch                   DAPO (arXiv 2503.14476)
    sequence_mean   mean over sequences of their mean           GRPO (arXiv 2402.03300), GSPO
    sequence_sum    mean over sequences of their sum
    constant        sum / (sequences * longest possible)        Dr. GRPO (arXiv 2503.20783)
"""

from collections.abc import Sequence


def token_weights(
    lengths: Sequence[int], counted: Sequence[bool], aggregation: str, max_length: int
) -> list[float]:
    """Return the weight of each token of a sequence, for every sequence of an update.

    lengths: number of tokens of each sequence, > 0. counted: False for sequences that are not
    trained on; they get weight 0, and no denominator counts them. max_length: longest possible
    sequence.
    """
    num_sequences = max(sum(counted), 1)
    num_tokens = max(
        sum(length for length, counts in zip(lengths, counted, strict=True) if counts), 1
    )
    weights = {
        "token_mean": lambda length: 1.0 / num_tokens,
        "sequence_mean": lambda length: 1.0 / (num_sequences * length),
        "sequence_sum": lambda length: 1.0 / num_sequences,
        "constant": lambda length: 1.0 / (num_sequences * max_length),
    }
    weight = weights[aggregation]
    return [
        weight(length) if counts else 0.0 for length, counts in zip(lengths, counted, strict=True)
    ]
