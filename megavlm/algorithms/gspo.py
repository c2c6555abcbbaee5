"""Group sequence policy optimisation (arXiv 2507.18071)."""

from megavlm.algorithms.clip import clip_ratio
from megavlm.algorithms.policy_loss import LOG_RATIO_LIMIT, PolicyInputs, PolicyTerm
from megavlm.algorithms.segments import segment_mean
from megavlm.config.algorithm import PolicyOptimization


def gspo(inputs: PolicyInputs, settings: PolicyOptimization) -> PolicyTerm:
    """Compute the clipped surrogate of s = exp(mean over the sequence of log p - log p_old) for
    each token of the sequence.

    Every token of a sequence has the value s and the gradient s grad(log p) with its own log p (the
    paper's GSPO-token). The mean of these gradients over the sequence is the gradient of s, so no
    gradient has to be sent between ranks.
    """
    logprobs, ids = inputs.logprobs, inputs.sequence_ids
    difference = (logprobs - inputs.old_logprobs).detach()
    means = segment_mean(difference, ids, inputs.num_sequences, inputs.reduce)
    means = means.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = (means[ids] + (logprobs - logprobs.detach())).exp()
    return clip_ratio(ratio, inputs.advantages, settings)
