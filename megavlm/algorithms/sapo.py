"""Soft adaptive policy optimisation (arXiv 2511.20347)."""

import torch

from megavlm.algorithms.policy_loss import PolicyInputs, PolicyTerm, ratios
from megavlm.config.algorithm import PolicyOptimization


def sapo(inputs: PolicyInputs, settings: PolicyOptimization) -> PolicyTerm:
    """Compute -(4 / tau) sigmoid(tau (ratio - 1)) A per token, with `tau_pos` for tau where A > 0
    and `tau_neg` elsewhere.

    The gradient equals the plain policy gradient at ratio 1 and decreases smoothly on both
    sides, so that no token is clipped.
    """
    ratio, advantages = ratios(inputs.logprobs, inputs.old_logprobs), inputs.advantages
    tau = torch.full_like(advantages, settings.tau_neg).where(advantages <= 0, settings.tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return PolicyTerm.unclipped(-gate * advantages, ratio)
