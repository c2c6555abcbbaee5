"""Log-probabilities and entropies of chosen tokens under a vocabulary-parallel output layer.

Only the hidden states that predict a target come in, and only a chunk of their logits exists at a
time, in forward and in backward: [T, V] is never held. Shapes: N targets, H hidden, V/tp the
vocabulary of this rank, C a chunk of targets.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Far below any logit, yet finite: a suppressed token's probability times its logit must be 0, not
# NaN.
SUPPRESSED = -1e30


@dataclass(frozen=True)
class TokenScores:
    """Per target, fp32: natural-log probability [N], the entropy of its distribution in nats [N],
    and the value of the state that it is chosen in [N]. Empty where the model has no such head.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor

    @property
    def device(self) -> torch.device:  # asked for by megatron-core's schedules
        return self.values.device


@dataclass(frozen=True)
class Scoring:
    """How logits become probabilities: divided by `temperature`, `suppressed_ids` (of the whole
    vocabulary) left out.

    Both as in the rollout server, whose log-probabilities are those of the distribution that it
    samples from.
    """

    temperature: float = 1.0
    suppressed_ids: tuple[int, ...] = ()


def token_scores(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_ids_N: Tensor,
    *,
    scoring: Scoring,
    group: dist.ProcessGroup,
    chunk_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] and entropies [N] of targets. The gradient with respect to `hidden_NH`
    is this rank's part of a sum over the tensor axis.

    Source: d logp/dz = onehot - p; d entropy/dz = -p (log p + entropy), z the scaled logits.
    """
    suppressed = None
    if scoring.suppressed_ids:
        ids = torch.tensor(
            scoring.suppressed_ids, device=weight_VH.device
        ) - group.rank() * weight_VH.size(0)
        suppressed = ids[(ids >= 0) & (ids < weight_VH.size(0))]
    logprobs, entropy = _ChunkedScores.apply(
        hidden_NH, weight_VH, target_ids_N, scoring.temperature, suppressed, group, chunk_size
    )
    return logprobs, entropy


def _scaled_logits(
    hidden_CH: Tensor, weight_VH: Tensor, temperature: float, suppressed: Tensor | None
) -> Tensor:
    logits_CV = (hidden_CH @ weight_VH.t()).float() / temperature
    return logits_CV if suppressed is None else logits_CV.index_fill_(1, suppressed, SUPPRESSED)


class _ChunkedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_ids_N: Tensor,
        temperature: float,
        suppressed: Tensor | None,
        group: dist.ProcessGroup,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        local_ids_N = target_ids_N - group.rank() * weight_VH.size(0)
        logprobs, entropies, log_sums = [], [], []
        for hidden_CH, ids_C in zip(
            hidden_NH.split(chunk_size), local_ids_N.split(chunk_size), strict=True
        ):
            logits_CV = _scaled_logits(hidden_CH, weight_VH, temperature, suppressed)
            max_C = logits_CV.amax(1)
            dist.all_reduce(max_C, op=dist.ReduceOp.MAX, group=group)
            exp_CV = (logits_CV - max_C[:, None]).exp()
            here_C = (ids_C >= 0) & (ids_C < weight_VH.size(0))
            target_C = logits_CV.gather(1, ids_C.where(here_C, 0)[:, None])[:, 0] * here_C
            sums_3C = torch.stack([exp_CV.sum(1), (exp_CV * logits_CV).sum(1), target_C])
            dist.all_reduce(sums_3C, group=group)
            log_sum_C = sums_3C[0].log() + max_C
            log_sums.append(log_sum_C)
            logprobs.append(sums_3C[2] - log_sum_C)
            entropies.append(log_sum_C - sums_3C[1] / sums_3C[0])
        empty = hidden_NH.new_zeros(0, dtype=torch.float32)
        logprobs_N, entropy_N, log_sum_N = (
            torch.cat([empty, *x]) for x in (logprobs, entropies, log_sums)
        )
        ctx.save_for_backward(hidden_NH, weight_VH, local_ids_N, log_sum_N, entropy_N)
        ctx.temperature, ctx.suppressed, ctx.chunk_size = temperature, suppressed, chunk_size
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, local_ids_N, log_sum_N, entropy_N = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden_NH)
        grad_weight = (
            torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        for start in range(0, hidden_NH.size(0), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            ids_C, grad_logprob_C, grad_entropy_C = (
                local_ids_N[part],
                grads[0][part],
                grads[1][part],
            )
            logits_CV = _scaled_logits(hidden_NH[part], weight_VH, ctx.temperature, ctx.suppressed)
            logp_CV = logits_CV - log_sum_N[part, None]
            grad_CV = -logp_CV.exp() * (
                grad_logprob_C[:, None]
                + grad_entropy_C[:, None] * (logp_CV + entropy_N[part, None])
            )
            here_C = (ids_C >= 0) & (ids_C < weight_VH.size(0))
            grad_CV.scatter_add_(
                1, ids_C.where(here_C, 0)[:, None], (grad_logprob_C * here_C)[:, None]
            )
            grad_CV = (grad_CV / ctx.temperature).to(weight_VH.dtype)
            grad_hidden[part] = grad_CV @ weight_VH
            if grad_weight is not None:
                grad_weight += grad_CV.t() @ hidden_NH[part]
        weight_grad = None if grad_weight is None else grad_weight.to(weight_VH.dtype)
        return grad_hidden, weight_grad, None, None, None, None, None
