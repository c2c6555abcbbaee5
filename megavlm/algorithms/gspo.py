"""Group sequence policy optimisation (arXiv 2507.18071)."""

from torch import Tensor

from megavlm.algorithms.clip import clip_ratio
from megavlm.algorithms.ratios import LOG_RATIO_LIMIT, PolicyTerm
from megavlm.algorithms.segments import Reduce, alone, segment_mean


def sequence_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    ids: Tensor,
    num_sequences: int,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    reduce: Reduce = alone,
) -> PolicyTerm:
    """The clipped surrogate of s = exp(mean over the sequence of log p - log p_old), at each of its
    tokens. All tensors [N]; ids: each token's sequence; `reduce` sums over ranks that hold parts of
    the same sequences.

    In value every token of a sequence has s; in gradient it has s grad(log p) of its own (the
    paper's GSPO-token). Averaged over a sequence's tokens that is the gradient of s, and no
    gradient needs to cross ranks.
    """
    difference = (logprobs - old_logprobs).detach()
    means = segment_mean(difference, ids, num_sequences, reduce)
    means = means.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = (means[ids] + (logprobs - logprobs.detach())).exp()
    return clip_ratio(ratio, advantages, clip_low, clip_high, dual_clip)
