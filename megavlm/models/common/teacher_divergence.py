"""Forward KL divergence of the policy from a teacher, over the teacher's k likeliest tokens, with
all other tokens as one bucket. Shapes: C targets in a chunk, V vocabulary of this rank.

With p the teacher's probabilities, q the policy's, K the teacher's tokens, and p(rest) and q(rest)
the probabilities of all other tokens together:

    D = sum over K of p log(p / q) + p(rest) log(p(rest) / q(rest))

    dD/dz = q - p in K, and q - q p(rest) / q(rest) outside, where z are the policy's logits

Source: the forward KL divergence of arXiv 2306.13649, section 3. On a partition of the vocabulary
it is at most the divergence over all tokens (log sum inequality), and equal where K is all tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megavlm.data.packs.token_sets import TokenSets

# Far below any logit, yet finite: a suppressed token's probability times its logit must be 0, not
# NaN.
SUPPRESSED_LOGIT = -1e30


@dataclass(frozen=True)
class TeacherChunk:
    """The teacher's tokens K at the targets of a chunk.

    Tokens that the policy cannot sample are left out of K, and the teacher's probabilities are
    divided by the sum over all other tokens, `mass_C`. A target without tokens has divergence 0.

    index_Ck: Place of each token in this rank's vocabulary; 0 for a token of another rank. here_Ck:
    True for tokens of this rank. It is not used as an index, because that would wait for the GPU.
    logprobs_Ck: Log-probs of all tokens by the teacher.
    """

    index_Ck: Tensor  # int64
    here_Ck: Tensor
    logprobs_Ck: Tensor

    def take(self, values_CV: Tensor) -> Tensor:
        """Return the values [C, k] of this rank in K."""
        return values_CV.gather(1, self.index_Ck)

    def clear(self, values_CV: Tensor) -> None:
        """Set the values of this rank in K to 0."""
        values_CV.scatter_reduce_(1, self.index_Ck, (~self.here_Ck).to(values_CV.dtype), "prod")

    def add(self, values_CV: Tensor, values_Ck: Tensor) -> None:
        """Add values of this rank in K."""
        values_CV.scatter_add_(1, self.index_Ck, values_Ck.where(self.here_Ck, 0.0))

    def probs(self, logits_Ck: Tensor) -> Tensor:
        """Return the teacher's probabilities [C, k] of this rank's tokens that the policy can
        sample, and 0 for others.
        """
        is_possible = self.here_Ck & (logits_Ck > SUPPRESSED_LOGIT / 2)
        return self.logprobs_Ck.exp().where(is_possible, 0.0)

    def sums(self, logits_Ck: Tensor, max_C: Tensor, exp_CV: Tensor) -> list[Tensor]:
        """Return four sums [C] over this rank's vocabulary. `divergence` takes them, once they are
        reduced over all ranks. exp_CV: exp(logits - max). It becomes 0 in K.
        """
        p_Ck = self.probs(logits_Ck)
        self.clear(exp_CV)
        return [
            p_Ck.sum(1),
            (p_Ck * self.logprobs_Ck).sum(1),
            (p_Ck * (logits_Ck - max_C[:, None])).sum(1),
            exp_CV.sum(1),
        ]

    def divergence(self, sums: Sequence[Tensor], total_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return D [C], mass_C, and p(rest) / q(rest) times mass_C. total_C: Sum of
        exp(logits - max) over the vocabulary.
        """
        inside_C, own_C, cross_C, rest_C = sums
        # Where K is the whole vocabulary, this is rounding of 1e-7 and changes D by less than 1e-5.
        others_C = (1 - self.logprobs_Ck.exp().sum(1)).clamp(min=0)
        mass_C = inside_C + others_C
        rest_C = rest_C.clamp(min=torch.finfo(rest_C.dtype).tiny)
        own_C = own_C + torch.xlogy(others_C, others_C) - torch.xlogy(mass_C, mass_C)
        cross_C = cross_C + others_C * rest_C.log() - mass_C * total_C.log()
        return (own_C - cross_C) * _inverse(mass_C), mass_C, others_C * total_C / rest_C


def make_chunks(sets: TokenSets, size: int, vocab_size: int, rank: int) -> list[TeacherChunk]:
    """Return the teacher's tokens of each `size` targets. vocab_size: Size of a rank's vocabulary.
    rank: Rank on the tensor axis.
    """
    ids, logprobs = sets.table()
    index = ids.long() - rank * vocab_size
    here = (index >= 0) & (index < vocab_size)
    parts = (x.split(size) for x in (index.where(here, 0), here, logprobs))
    return [TeacherChunk(*part) for part in zip(*parts, strict=True)]


def slopes(grad_C: Tensor, mass_C: Tensor, ratio_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors [C] of -p in K, of q in K and of q outside in dD/dz, times `grad_C`.
    mass_C, ratio_C: See `TeacherChunk.divergence`.
    """
    scale_C = grad_C * _inverse(mass_C)
    return scale_C, scale_C * mass_C, scale_C * (mass_C - ratio_C)


def _inverse(mass_C: Tensor) -> Tensor:
    """Return 1 / mass; 0 where the policy can sample nothing that the teacher would."""
    return (1 / mass_C).where(mass_C > 0, 0.0)
