"""Generalised advantage estimation (arXiv 1506.02438) over tokens and over turns.

All tensors are [N] over whole sequences. ids: the sequence of each token. values: the critic's
value of the state in which the token is chosen. The state after the last token of a sequence has
value 0, even if the response reached its limit.
"""

import torch
from torch import Tensor

from megavlm.algorithms.segments import discounted_sums, next_in_sequence


def gae(
    rewards: Tensor, values: Tensor, ids: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns [N]: delta_t = r_t + gamma V_(t+1) - V_t, A_t = delta_t +
    gamma lam A_(t+1), R_t = A_t + V_t.
    """
    deltas = rewards + gamma * next_in_sequence(values, ids) - values
    advantages = discounted_sums(deltas, ids, gamma * lam)
    return advantages, advantages + values


def turn_gae(
    rewards: Tensor, values: Tensor, ids: Tensor, turns: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns with each turn as one action.

    The reward of a turn is the sum over its tokens, and its value is the value at its first token.
    Every token of a turn gets the advantage and return of the turn. turns: [N], ascending within a
    sequence.
    """
    if not len(rewards):
        return rewards.clone(), values.clone()
    # `unique` sorts the pairs, so that turns become "tokens" of one row, sequence by sequence and
    # in order, as `gae` needs them: ids [0, 0, 0, 1] with turns [0, 0, 1, 0] are the pairs (0, 0),
    # (0, 1), (1, 0) and turn_of [0, 0, 1, 2].
    pairs, turn_of = torch.stack([ids, turns]).unique(dim=1, return_inverse=True)
    num = pairs.shape[1]
    turn_rewards = rewards.new_zeros(num).index_add(0, turn_of, rewards)
    order = torch.arange(len(ids), device=ids.device)
    # Index of each turn's first token, here [0, 2, 3]: the state in which the turn is chosen.
    first = order.new_full((num,), len(ids)).scatter_reduce(0, turn_of, order, "amin")
    advantages, returns = gae(turn_rewards, values[first], pairs[0], gamma=gamma, lam=lam)
    return advantages[turn_of], returns[turn_of]
