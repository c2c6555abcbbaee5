"""Log-probs and entropies of target tokens under a vocabulary-parallel output layer.

Only hidden states that predict a target are passed in, and only a chunk of their logits exists at a
time, in the forward and the backward pass; logits [T, V] are never in memory. Shapes: N targets, H
hidden size, V/tp vocabulary of this rank, C targets in a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.data.packs.token_sets import TokenSets
from megavlm.models.common.teacher_divergence import (
    SUPPRESSED_LOGIT,
    TeacherChunk,
    make_chunks,
    slopes,
)


@dataclass(frozen=True)
class TokenScores:
    """Scores of target tokens, fp32 [N] each: log-prob (natural logarithm), entropy of the token's
    distribution in nats, and the critic's value. A score is empty if the model has no head for it.
    divergence: Forward KL divergence [N] from a teacher in nats; None without a teacher's tokens.
    draft_divergence: KL divergence [N] of the draft head from the policy; None without the head.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor
    divergence: Tensor | None = None
    draft_divergence: Tensor | None = None

    @property
    def device(self) -> torch.device:  # read by megatron-core's schedules
        return self.values.device


@dataclass(frozen=True)
class Scoring:
    """Distribution of the log-probs: logits are divided by `temperature`, and `suppressed_ids` (of
    the whole vocabulary) have probability 0.

    Both must equal the rollout server's settings: the server returns log-probs of the distribution
    that it samples from.

    entropy: Also compute entropies, and the divergence from a teacher. Passes without a loss need
    neither.
    """

    temperature: float = 1.0
    suppressed_ids: tuple[int, ...] = ()
    entropy: bool = True


def token_scores(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_ids_N: Tensor,
    *,
    scoring: Scoring,
    group: dist.ProcessGroup,
    kept: TokenSets | None = None,
    teacher: TokenSets | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute log-probs [N] and entropies [N] of targets, and their divergence [N] from a teacher.
    Without `scoring.entropy`, entropies are empty, and there is no divergence and no gradient.
    Collective over `group`, the tensor axis.

    kept: The tokens among which each target was sampled, itself included. All others have
    probability 0, so that log-probs and entropies are those of the softmax over the set.
    teacher: The teacher's likeliest tokens with their log-probs; None computes no divergence.
    chunk_size: Targets whose logits are in memory at a time; None uses default_chunk_size.

    The gradient with respect to `hidden_NH` is this rank's part of a sum over the tensor axis.
    Apart from inputs and gradients, two fp32 tensors [chunk_size, V/tp] are in memory.

    Source: d logp/dz = onehot - p; d entropy/dz = -p (log p + entropy), z the scaled logits. For
    the divergence see teacher_divergence.py.
    """
    chunk_size = chunk_size or default_chunk_size(weight_VH.size(0), weight_VH.device.type)
    vocab_size, chunks = weight_VH.size(0), list[TeacherChunk]()
    if teacher is not None and scoring.entropy:
        chunks = make_chunks(teacher, chunk_size, vocab_size, group.rank())
    logits = _Logits(
        weight_VH.detach(),
        scoring.temperature,
        _suppressed(scoring, weight_VH, group),
        [] if kept is None else kept.chunks(chunk_size, group.rank() * vocab_size),
        chunks,
        scoring.entropy,
    )
    logprobs, entropy, divergence = _ChunkedScores.apply(
        hidden_NH, weight_VH, target_ids_N, logits, group, chunk_size
    )
    return logprobs, entropy, divergence if chunks else None


@torch.no_grad()
def likeliest_tokens(
    hidden_NH: Tensor, weight_VH: Tensor, k: int, *, scoring: Scoring, group: dist.ProcessGroup
) -> TokenSets:
    """Return the `k` likeliest tokens of the whole vocabulary at targets, with their log-probs.
    Collective over `group`, the tensor axis. A chunk of the logits is in memory at a time.
    """
    num, vocab_size = weight_VH.size(0), weight_VH.size(0) * group.size()
    chunk_size = default_chunk_size(num, weight_VH.device.type)
    suppressed = _suppressed(scoring, weight_VH, group)
    logits = _Logits(weight_VH, scoring.temperature, suppressed, [], [], False)
    buffer, _ = logits.buffers(len(hidden_NH), chunk_size)
    k, k_here = min(k, vocab_size), min(k, num)
    ids, logprobs = [], []
    for number, hidden_CH in enumerate(hidden_NH.split(chunk_size)):
        logits_CV = logits.write(hidden_CH, buffer, number)
        here_Ck, index_Ck = logits_CV.topk(k_here)
        here = torch.cat([here_Ck, logits_CV.logsumexp(1, keepdim=True)], 1)
        values, indices = _from_all(here, group), _from_all(index_Ck + group.rank() * num, group)
        top_Ck, places_Ck = values[..., :-1].transpose(0, 1).flatten(1).topk(k)
        ids.append(indices.transpose(0, 1).flatten(1).gather(1, places_Ck))
        logprobs.append(top_Ck - values[..., -1].logsumexp(0)[:, None])
    sizes = torch.full((len(hidden_NH),), k, dtype=torch.int32)
    sets = TokenSets.of(sizes, torch.cat(ids).flatten().int(), torch.cat(logprobs).flatten())
    return sets.to(hidden_NH.device)


def _from_all(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the values of all ranks of a group, [ranks, ...]. Collective."""
    gathered = values.new_empty(group.size(), *values.shape)
    dist.all_gather_into_tensor(gathered.flatten(0, 1), values.contiguous(), group=group)
    return gathered


def _suppressed(scoring: Scoring, weight_VH: Tensor, group: dist.ProcessGroup) -> Tensor | None:
    """Return the suppressed ids as indices into this rank's vocabulary; None without any."""
    if not scoring.suppressed_ids:
        return None
    # Selected on the host: indexing by a mask would wait for the GPU.
    local = (i - group.rank() * weight_VH.size(0) for i in scoring.suppressed_ids)
    held = [i for i in local if 0 <= i < weight_VH.size(0)]
    return torch.tensor(held, dtype=torch.long, device=weight_VH.device)


def default_chunk_size(vocab_size: int, device_type: str) -> int:
    """Return the number of targets in a chunk.

    vocab_size: Size of this rank's vocabulary, V/tp.

    The backward pass reads and writes the whole fp32 gradient of the weight for each chunk.
    Therefore chunks are large on a GPU: 2,048 to 4,096 targets, with two tensors of about 2.5 GB
    together. On a CPU they are small, since memory is short.
    """
    if device_type == "cpu":
        return 256
    return min(max(int(2.5e9) // (2 * 4 * vocab_size), 2048), 4096)


@dataclass(frozen=True)
class _Logits:
    """Scaled logits of hidden states.

    suppressed: Suppressed ids as indices into this rank's vocabulary. kept: The ids that each chunk
    keeps, see TokenSets.chunks; empty if all chunks keep the whole vocabulary. teacher: The
    teacher's tokens at each chunk's targets; empty without a divergence.
    """

    weight_VH: Tensor
    temperature: float
    suppressed: Tensor | None
    kept: Sequence[tuple[Tensor, Tensor]]
    teacher: Sequence[TeacherChunk]
    entropy: bool

    def write(self, hidden_CH: Tensor, out: Tensor, chunk: int) -> Tensor:
        """Write the logits to the first C rows of `out` [rows, V] (fp32), and return these rows
        [C, V]. Allocating memory for every chunk would double the memory, and on a CPU take as long
        as the arithmetic. chunk: Number of the chunk.
        """
        logits_CV = out[: len(hidden_CH)]
        if self.weight_VH.dtype == torch.float32:
            torch.mm(hidden_CH, self.weight_VH.t(), out=logits_CV)
        else:
            logits_CV.copy_(hidden_CH @ self.weight_VH.t())
        if self.temperature != 1.0:
            logits_CV /= self.temperature
        if self.suppressed is not None:
            logits_CV.index_fill_(1, self.suppressed, SUPPRESSED_LOGIT)
        if self.kept:
            _keep_only(logits_CV, *self.kept[chunk])
        return logits_CV

    def buffers(self, num_targets: int, chunk_size: int) -> tuple[Tensor, Tensor]:
        """Allocate two buffers [rows, V] for a chunk's logits, in fp32."""
        shape = (2, min(num_targets, chunk_size), self.weight_VH.size(0))
        first, second = self.weight_VH.new_empty(shape, dtype=torch.float32)
        return first, second


def _keep_only(logits_CV: Tensor, rows_K: Tensor, ids_K: Tensor) -> None:
    """Suppress all logits of the rows `rows_K` except at ids_K, in place. An id of another
    rank's vocabulary is out of range.
    """
    here_K = (ids_K >= 0) & (ids_K < logits_CV.size(1))
    # Ids are not selected by a mask, which would wait for the GPU: those of other ranks write a
    # suppressed logit to the row's first token, whose own is larger if it is kept.
    index_K = rows_K * logits_CV.size(1) + ids_K.where(here_K, 0)
    kept_K = logits_CV.view(-1)[index_K].where(here_K, SUPPRESSED_LOGIT)
    has_set_C = here_K.new_zeros(len(logits_CV)).index_fill_(0, rows_K, True)
    logits_CV.masked_fill_(has_set_C[:, None], SUPPRESSED_LOGIT)
    logits_CV.view(-1).scatter_reduce_(0, index_K, kept_K, "amax")


class _ChunkedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_ids_N: Tensor,
        logits: _Logits,
        group: dist.ProcessGroup,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        local_ids_N = target_ids_N - group.rank() * weight_VH.size(0)
        first, second = logits.buffers(len(hidden_NH), chunk_size)
        logprobs, entropies, log_sums, divergences = [], [], [], []
        chunks = zip(hidden_NH.split(chunk_size), local_ids_N.split(chunk_size), strict=True)
        for number, (hidden_CH, ids_C) in enumerate(chunks):
            logits_CV = logits.write(hidden_CH, first, number)
            max_C = logits_CV.amax(1)
            dist.all_reduce(max_C, op=dist.ReduceOp.MAX, group=group)
            exp_CV = torch.sub(logits_CV, max_C[:, None], out=second[: len(ids_C)]).exp_()
            here_C = (ids_C >= 0) & (ids_C < weight_VH.size(0))
            target_C = logits_CV.gather(1, ids_C.where(here_C, 0)[:, None])[:, 0] * here_C
            teacher = logits.teacher[number] if logits.teacher else None
            sums = [exp_CV.sum(1), target_C]
            logits_Ck = None if teacher is None else teacher.take(logits_CV)
            if logits.entropy:
                sums.append(logits_CV.mul_(exp_CV).sum(1))
            if teacher is not None and logits_Ck is not None:
                sums += teacher.sums(logits_Ck, max_C, exp_CV)
            reduced = torch.stack(sums)
            dist.all_reduce(reduced, group=group)
            total_C, target_C, *others = reduced
            log_sum_C = total_C.log() + max_C
            log_sums.append(log_sum_C)
            logprobs.append(target_C - log_sum_C)
            if logits.entropy:
                entropies.append(log_sum_C - others[0] / total_C)
            if teacher is not None:
                divergences.append(torch.stack(teacher.divergence(others[1:], total_C)))
        empty = hidden_NH.new_zeros(0, dtype=torch.float32)
        logprobs_N, entropy_N, log_sum_N = (
            torch.cat([empty, *x]) for x in (logprobs, entropies, log_sums)
        )
        divergence_N, mass_N, ratio_N = torch.cat([empty.expand(3, 0), *divergences], 1)
        ctx.save_for_backward(
            hidden_NH, weight_VH, local_ids_N, log_sum_N, entropy_N, mass_N, ratio_N
        )
        ctx.set_materialize_grads(False)
        ctx.logits, ctx.chunk_size = logits, chunk_size
        return logprobs_N, entropy_N, divergence_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, local_ids_N, log_sum_N, entropy_N, mass_N, ratio_N = ctx.saved_tensors
        grad_logprob_N = torch.zeros_like(log_sum_N) if grads[0] is None else grads[0]
        grad_entropy_N, grad_divergence_N = grads[1:]  # None if the loss does not depend on it
        grad_hidden = torch.empty_like(hidden_NH)
        grad_weight = (
            torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        first, second = ctx.logits.buffers(len(hidden_NH), ctx.chunk_size)
        for number, start in enumerate(range(0, hidden_NH.size(0), ctx.chunk_size)):
            part = slice(start, start + ctx.chunk_size)
            ids_C, grad_logprob_C = local_ids_N[part], grad_logprob_N[part]
            logp_CV = ctx.logits.write(hidden_NH[part], first, number).sub_(log_sum_N[part, None])
            grad_CV = torch.exp(logp_CV, out=second[: len(ids_C)]).neg_()
            grad_entropy_C = None if grad_entropy_N is None else grad_entropy_N[part]
            slope_C, teacher, grad_Ck = grad_logprob_C, None, None
            if grad_divergence_N is not None:
                teacher = ctx.logits.teacher[number]
                scale_C, inside_C, outside_C = slopes(
                    grad_divergence_N[part], mass_N[part], ratio_N[part]
                )
                logp_Ck, grad_Ck = teacher.take(logp_CV), teacher.take(grad_CV)
                scaled_Ck = teacher.probs(logp_Ck) * scale_C[:, None]
                grad_Ck *= _slope(logp_Ck, slope_C - inside_C, grad_entropy_C, entropy_N[part])
                grad_Ck -= scaled_Ck
                teacher.clear(grad_CV)
                slope_C = slope_C - outside_C
            grad_CV *= _slope(logp_CV, slope_C, grad_entropy_C, entropy_N[part])
            if teacher is not None:
                teacher.add(grad_CV, grad_Ck)
            here_C = (ids_C >= 0) & (ids_C < weight_VH.size(0))
            grad_CV.scatter_add_(
                1, ids_C.where(here_C, 0)[:, None], (grad_logprob_C * here_C)[:, None]
            )
            if ctx.logits.temperature != 1.0:
                grad_CV /= ctx.logits.temperature
            grad_CV = grad_CV.to(weight_VH.dtype)
            grad_hidden[part] = grad_CV @ weight_VH
            if grad_weight is not None and weight_VH.dtype == torch.float32:
                grad_weight.addmm_(grad_CV.t(), hidden_NH[part])
            elif grad_weight is not None:
                grad_weight += grad_CV.t() @ hidden_NH[part]
        weight_grad = None if grad_weight is None else grad_weight.to(weight_VH.dtype)
        return grad_hidden, weight_grad, None, None, None, None


def _slope(
    logp: Tensor, slope_C: Tensor, grad_entropy_C: Tensor | None, entropy_C: Tensor
) -> Tensor:
    """Return what -p is multiplied with in the gradient of the logits: `slope_C`, and the part of
    the entropy. logp: Log-probs [C, V] or [C, k], which are changed.
    """
    if grad_entropy_C is None:
        return slope_C[:, None]
    return logp.add_(entropy_C[:, None]).mul_(grad_entropy_C[:, None]).add_(slope_C[:, None])
