"""REINFORCE++ (arXiv 2501.03262): no critic, and one normalisation over the whole batch, not over
each group. `whitening.whiten` is its second half, with a group baseline or without.
"""

from torch import Tensor

from megavlm.algorithms.segments import discounted_sums


def returns_to_go(rewards: Tensor, ids: Tensor) -> Tensor:
    """[N]: the sum of a sequence's rewards from each token on. rewards: [N] per token, with the KL
    penalty in them; ids: [N]. Without baseline this is what is whitened.
    """
    return discounted_sums(rewards, ids, 1.0)
