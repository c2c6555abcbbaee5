"""Group sequence policy optimisation (arXiv 2507.18071)."""

from megavlm.algorithms.clip import clip_ratio
from megavlm.algorithms.policy_loss import LOG_RATIO_LIMIT, PolicyInputs, PolicyTerm
from megavlm.algorithms.segments import segment_mean
from megavlm.config.algorithm import PolicyOptimization


def gspo(inputs: PolicyInputs, settings: PolicyOptimization) -> PolicyTerm:
    """Compute the clipped surrogate of s = exp(mean over the sequence of log p - log p_old), at
    each of its tokens.

    In value every token of a sequence has s; in gradient it has s grad(log p) of its own (the
    paper's GSPO-token). Averaged over a sequence's tokens that is the gradient of s, and no
    gradient needs to cross ranks.
    """
    logprobs, ids = inputs.logprobs, inputs.sequence_ids
    difference = (logprobs - inputs.old_logprobs).detach()
    means = segment_mean(difference, ids, inputs.num_sequences, inputs.reduce)
    means = means.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = (means[ids] + (logprobs - logprobs.detach())).exp()
    return clip_ratio(ratio, inputs.advantages, settings)
