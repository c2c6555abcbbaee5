"""The divergence from a teacher over its likeliest tokens, against plain formulas in float64."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megavlm.data.packs.token_sets import TokenSets
from megavlm.models.common.logprobs import Scoring, token_scores
from tests.support.fork import launch

N, H, V = 13, 6, 20
SUPPRESSED = (0, 3, 11, 19)


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor
    weight: Tensor
    teacher: Tensor  # [N, V], log-probs of all tokens
    targets: Tensor
    loss_weights: Tensor  # [3, N], of log-probs, entropies and divergences


def inputs(scale: float = 1.0) -> Inputs:
    """scale: Factor of the policy's logits."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, logits, loss_weights = (
        torch.randn(*shape, generator=generator) for shape in ((N, H), (V, H), (N, V), (3, N))
    )
    targets = torch.tensor([i for i in range(V) if i not in SUPPRESSED])[torch.arange(N)]
    return Inputs(scale * hidden, weight, (2 * logits).log_softmax(-1), targets, loss_weights)


def top(logprobs: Tensor, k: int) -> TokenSets:
    """Return the sets of k tokens; below V, the third target has none and the fourth only two."""
    values, ids = logprobs.topk(k)
    sizes = torch.full((len(logprobs),), k, dtype=torch.int32)
    if k < V:
        sizes[2], sizes[3] = 0, min(k, 2)
    held = torch.arange(k) < sizes[:, None]
    return TokenSets.of(sizes, ids[held].int(), values[held])


def plain(logq: Tensor, teacher: TokenSets, suppressed: tuple[int, ...]) -> Tensor:
    """Return the divergence [N] of log-probs [N, V], target by target."""
    assert teacher.logprobs is not None
    found, sizes = [], teacher.sizes.tolist()
    parts = teacher.ids.split(sizes), teacher.logprobs.double().split(sizes)
    for row, ids, logp in zip(logq, *parts, strict=True):
        inside = torch.tensor([int(i) for i in ids if i not in suppressed], dtype=torch.long)
        p = torch.tensor(
            [float(x.exp()) for i, x in zip(ids, logp, strict=True) if i not in suppressed]
        ).double()
        outside = [i for i in range(V) if i not in ids.tolist() and i not in suppressed]
        rest = (1 - logp.exp().sum()) * bool(outside)
        mass = p.sum() + rest
        total = (p / mass * ((p / mass).log() - row[inside])).sum()
        if outside:
            total = total + rest / mass * ((rest / mass).log() - row[outside].logsumexp(0))
        found.append(total)
    return torch.stack(found)


def expected(k: int, suppressed: tuple[int, ...], chosen: tuple[int, ...]) -> tuple[Tensor, ...]:
    given = inputs()
    hidden, weight = (x.double().requires_grad_() for x in (given.hidden, given.weight))
    logits = (hidden @ weight.t()).index_fill(1, torch.tensor(suppressed).long(), -1e30)
    logq = logits.log_softmax(-1)
    divergence = plain(logq, top(given.teacher, k), suppressed)
    scores = (
        logq.gather(1, given.targets[:, None])[:, 0],
        -(logq.exp() * logq).sum(-1),
        divergence,
    )
    torch.stack([(scores[i] * given.loss_weights[i]).sum() for i in chosen]).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return divergence.detach().float(), hidden.grad.float(), weight.grad.float()


def found(k: int, suppressed: tuple[int, ...], chosen: tuple[int, ...], size: int) -> list[Any]:
    """This rank's divergences, its part of the hidden gradient, and its rows of the weight's."""
    given, group = inputs(), dist.group.WORLD
    assert group is not None
    rows = given.weight.chunk(group.size())[group.rank()].clone().requires_grad_()
    hidden = given.hidden.requires_grad_()
    scores = token_scores(
        hidden,
        rows,
        given.targets,
        scoring=Scoring(suppressed_ids=suppressed),
        group=group,
        teacher=top(given.teacher, k),
        chunk_size=size,
    )
    assert scores[2] is not None
    parts: list[Any] = [(scores[i] * given.loss_weights[i]).sum() for i in chosen]  # type: ignore[operator]
    torch.stack(parts).sum().backward()
    return [scores[2], hidden.grad, rows.grad]


@pytest.mark.parametrize("suppressed", [(), SUPPRESSED], ids=["all", "suppressed"])
@pytest.mark.parametrize(
    ("k", "chosen", "world_size", "size"),
    [(5, (2,), 1, 1024), (5, (0, 1, 2), 1, 4), (1, (0, 2), 2, 5), (7, (0, 1, 2), 4, 4)],
)
def test_divergence_and_gradients(
    k: int, chosen: tuple[int, ...], world_size: int, size: int, suppressed: tuple[int, ...]
) -> None:
    divergence, hidden, weight = expected(k, suppressed, chosen)
    results = launch(world_size, found, k, suppressed, chosen, size)
    for result in results:
        torch.testing.assert_close(torch.from_numpy(result[0]), divergence)
        assert result[0][2] == 0, "no tokens"
    torch.testing.assert_close(sum(torch.from_numpy(result[1]) for result in results), hidden)
    torch.testing.assert_close(torch.cat([torch.from_numpy(r[2]) for r in results]), weight)


def alone(hidden: Tensor, weight: Tensor, teacher: TokenSets) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    targets = torch.zeros(len(hidden), dtype=torch.long)
    *_, divergence = token_scores(
        hidden, weight, targets, scoring=Scoring(), group=group, teacher=teacher, chunk_size=4
    )
    assert divergence is not None
    return divergence


def over_all_tokens() -> list[Any]:
    given = inputs()
    results = []
    for full in (False, True):
        hidden, weight = (x.clone().requires_grad_() for x in (given.hidden, given.weight))
        if full:
            logq = (hidden @ weight.t()).log_softmax(-1)
            divergence = F.kl_div(logq, given.teacher, reduction="none", log_target=True).sum(-1)
        else:
            divergence = alone(hidden, weight, top(given.teacher, V))
        (divergence * given.loss_weights[2]).sum().backward()
        results.append([divergence, hidden.grad, weight.grad])
    return results


def test_over_all_tokens_it_is_the_kl_divergence_of_torch() -> None:
    ((ours, theirs),) = launch(1, over_all_tokens)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(expected))


def of_a_sharp_policy() -> list[Any]:
    """Return divergences and gradients by ours and by the formula, and the least probabilities of
    the bucket by the policy and by the teacher.
    """
    given = inputs(scale=10.0)
    logits = given.hidden @ given.weight.t()
    logp = (logits / 20).log_softmax(-1)
    teacher, results = top(logp, 3), []
    for is_plain in (False, True):
        hidden = given.hidden.to(torch.float64 if is_plain else torch.float32, copy=True)
        hidden.requires_grad_()
        if is_plain:
            logq = (hidden @ given.weight.double().t()).log_softmax(-1)
            divergence = plain(logq, teacher, ())
        else:
            divergence = alone(hidden, given.weight, teacher)
        divergence.sum().backward()
        assert hidden.grad is not None
        results.append([divergence.float(), hidden.grad.float()])
    by_policy, by_teacher = (
        x.scatter(1, logp.topk(3).indices, -torch.inf).logsumexp(-1).exp()
        for x in (logits.log_softmax(-1), logp)
    )
    return [*results, float(by_policy.amin()), float(by_teacher.amin())]


def test_the_bucket_of_a_policy_that_gives_it_nearly_nothing() -> None:
    ((ours, theirs, by_policy, by_teacher),) = launch(1, of_a_sharp_policy)
    assert by_policy < 1e-6 and by_teacher > 0.1, (by_policy, by_teacher)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(expected))


def numerically() -> bool:
    given = inputs()
    teacher = top(given.teacher[:4], 3)
    variables = given.hidden[:4].requires_grad_(), given.weight.requires_grad_()
    return torch.autograd.gradcheck(
        lambda hidden, weight: alone(hidden, weight, teacher),
        variables,
        eps=1e-2,
        atol=2e-3,
        rtol=2e-2,
    )


@pytest.mark.filterwarnings("ignore:Input #0 requires gradient:UserWarning")
@pytest.mark.filterwarnings("ignore:Input #1 requires gradient:UserWarning")
def test_gradients_are_those_of_finite_differences() -> None:
    assert launch(1, numerically) == [True]
