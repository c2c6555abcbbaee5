"""Chunked, vocabulary-parallel scores against a plain softmax over the whole vocabulary."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megavlm.data.packs.token_sets import TokenSets
from megavlm.models.common.logprobs import Scoring, default_chunk_size, token_scores
from tests.support.fork import launch

N, H, V = 13, 6, 20
SCORINGS = {
    "plain": Scoring(),
    "temperature": Scoring(temperature=0.7),
    "suppressed": Scoring(suppressed_ids=(0, 3, 11, 19)),
}


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator)
    weight = torch.randn(V, H, generator=generator)
    allowed = torch.tensor([i for i in range(V) if i not in (0, 3, 11, 19)])
    targets = allowed[torch.randint(0, len(allowed), (N,), generator=generator)]
    return (
        hidden,
        weight,
        targets,
        torch.randn(N, generator=generator),
        torch.randn(N, generator=generator),
    )


def sets(targets: Tensor) -> tuple[Tensor, TokenSets]:
    """Return which tokens [N, V] may be sampled, and the same as sets: one token, several, or all
    of the vocabulary, as a set and as none.
    """
    generator = torch.Generator().manual_seed(1)
    allowed = torch.rand(N, V, generator=generator) < torch.linspace(0, 1, N)[:, None]
    allowed[torch.arange(N), targets] = True
    sizes = allowed.sum(1).int()
    allowed[2], sizes[2] = True, 0
    ids = [row.nonzero()[:, 0].flip(0) for row, size in zip(allowed, sizes, strict=True) if size]
    return allowed, TokenSets.of(sizes, torch.cat(ids).int())


def plain(scoring: Scoring, *, has_sets: bool) -> tuple[Tensor, ...]:
    hidden, weight, targets, logprob_weights, entropy_weights = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    logits = hidden @ weight.t()
    if scoring.suppressed_ids:
        logits = logits.index_fill(1, torch.tensor(scoring.suppressed_ids), -1e30)
    if has_sets:
        logits = logits.where(sets(targets)[0], -1e30)
    logp = (logits / scoring.temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    logprobs = logp.gather(1, targets[:, None])[:, 0]
    ((logprobs * logprob_weights).sum() + (entropy * entropy_weights).sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def parallel(scoring: Scoring, chunk_size: int, has_sets: bool) -> list[Any]:
    """This rank's scores, its part of the hidden gradient, and its rows of the weight's."""
    hidden, weight, targets, logprob_weights, entropy_weights = inputs()
    group = dist.group.WORLD
    assert group is not None
    rows = weight.chunk(group.size())[group.rank()].clone().requires_grad_()
    hidden.requires_grad_()
    kept = sets(targets)[1] if has_sets else None
    logprobs, entropy, _ = token_scores(
        hidden, rows, targets, scoring=scoring, group=group, kept=kept, chunk_size=chunk_size
    )
    loss = (logprobs * logprob_weights).sum() + (entropy * entropy_weights).sum()
    loss.backward()
    return [logprobs, entropy, hidden.grad, rows.grad]


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize(("world_size", "chunk_size"), [(1, 1024), (1, 4), (2, 5), (4, 1024)])
def test_scores_and_gradients(scoring: Scoring, world_size: int, chunk_size: int) -> None:
    assert_as_plain(scoring, world_size, chunk_size, has_sets=False)


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize(("world_size", "chunk_size"), [(1, 4), (2, 5)])
def test_scores_are_those_of_the_softmax_over_a_set(
    scoring: Scoring, world_size: int, chunk_size: int
) -> None:
    assert_as_plain(scoring, world_size, chunk_size, has_sets=True)


def assert_as_plain(scoring: Scoring, world_size: int, chunk_size: int, *, has_sets: bool) -> None:
    logprobs, entropy, hidden_grad, weight_grad = plain(scoring, has_sets=has_sets)
    results = launch(world_size, parallel, scoring, chunk_size, has_sets)
    for result in results:
        torch.testing.assert_close(torch.from_numpy(result[0]), logprobs)
        torch.testing.assert_close(torch.from_numpy(result[1]), entropy)
    torch.testing.assert_close(sum(torch.from_numpy(result[2]) for result in results), hidden_grad)
    torch.testing.assert_close(torch.cat([torch.from_numpy(r[3]) for r in results]), weight_grad)


def without_entropy() -> list[Tensor]:
    hidden, weight, targets, *_ = inputs()
    group = dist.group.WORLD
    assert group is not None
    whole, part = (
        token_scores(hidden, weight, targets, scoring=scoring, group=group, chunk_size=4)
        for scoring in (Scoring(), Scoring(entropy=False))
    )
    return [whole[0], part[0], part[1]]


def test_log_probs_without_entropies_are_the_same_bit_for_bit() -> None:
    ((whole, part, entropy),) = launch(1, without_entropy)
    assert (whole == part).all() and entropy.shape == (0,)


def no_targets() -> list[Any]:
    hidden, weight, *_ = inputs()
    hidden.requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    logprobs, *_ = token_scores(
        hidden[:0], weight, torch.empty(0, dtype=torch.long), scoring=Scoring(), group=group
    )
    logprobs.sum().backward()
    return [logprobs, hidden.grad]


def test_a_pack_without_targets_has_a_zero_gradient() -> None:
    ((logprobs, gradient),) = launch(1, no_targets)
    assert logprobs.shape == (0,) and not gradient.any()


def one_of_two(name: str, dtype: torch.dtype) -> list[Any]:
    """Gradients of a loss of log-probs alone, or of entropies alone."""
    hidden, weight, targets, *weights = inputs()
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    group = dist.group.WORLD
    assert group is not None
    scores = token_scores(hidden, weight, targets, scoring=Scoring(), group=group, chunk_size=4)
    chosen = ("logprobs", "entropy").index(name)
    (scores[chosen] * weights[chosen]).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    assert {hidden.grad.dtype, weight.grad.dtype} == {dtype}
    return [hidden.grad.float(), weight.grad.float()]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("name", ["logprobs", "entropy"])
def test_a_loss_of_one_of_the_two(name: str, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, targets, *weights = (x.to(dtype).float() for x in inputs())
    hidden.requires_grad_(), weight.requires_grad_()
    logp = (hidden @ weight.t()).log_softmax(-1)
    if name == "logprobs":
        loss = (logp.gather(1, targets.long()[:, None])[:, 0] * weights[0]).sum()
    else:
        loss = (-(logp.exp() * logp).sum(-1) * weights[1]).sum()
    loss.backward()
    (ours,) = launch(1, one_of_two, name, dtype)
    for mine, parameter in zip(ours, (hidden, weight), strict=True):
        assert parameter.grad is not None
        difference = (torch.from_numpy(mine) - parameter.grad).abs().max()
        assert difference < tolerance * parameter.grad.abs().max()


def most_bytes(num_targets: int, folder: Path) -> int:
    """Return the most bytes of tensors that live at a time, forward and backward."""
    vocabulary, chunk_size = 50_000, 64
    hidden = torch.randn(num_targets, 8).requires_grad_()
    weight = torch.randn(vocabulary, 8).requires_grad_()
    targets = torch.randint(0, vocabulary, (num_targets,))
    group = dist.group.WORLD
    assert group is not None
    with torch.profiler.profile(profile_memory=True) as profile:
        logprobs, entropy, _ = token_scores(
            hidden, weight, targets, scoring=Scoring(), group=group, chunk_size=chunk_size
        )
        (logprobs - entropy).sum().backward()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    return max(accumulate(change["args"]["Bytes"] for change in changes))


def test_memory_does_not_grow_with_the_targets(tmp_path: Path) -> None:
    """Two chunks of logits are 26 MB; all logits of 1,024 targets would be 205 MB."""
    (few,), (many,) = (launch(1, most_bytes, count, tmp_path) for count in (64, 1024))
    assert few < 30e6
    assert many < few + 1e6


@pytest.mark.parametrize(
    ("vocab_size", "device_type", "expected"),
    [
        (151_936, "cpu", 256),
        (151_936, "cuda", 2056),
        (300_000, "cuda", 2048),
        (38_000, "cuda", 4096),
    ],
)
def test_chunks_are_large_on_a_gpu(vocab_size: int, device_type: str, expected: int) -> None:
    assert default_chunk_size(vocab_size, device_type) == expected


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function.overloadpacket is torch.ops.aten.mm
        return function(*args, **(kwargs or {}))


def products(device: str) -> int:
    """Return the number of chunks of 1,000 targets, each of which is a product."""
    group = dist.group.WORLD
    assert group is not None
    hidden, weight = (torch.zeros(rows, 2, device=device) for rows in (1000, 5))
    ids = torch.zeros(1000, dtype=torch.long, device=device)
    dist.all_reduce = lambda *args, **kwargs: None  # over one rank; gloo knows no other device
    with torch.no_grad(), Products() as found:
        token_scores(hidden, weight, ids, scoring=Scoring(), group=group)
    return found.count


@pytest.mark.parametrize(("device", "expected"), [("cpu", 4), ("meta", 1)])
def test_the_device_chooses_the_chunks(device: str, expected: int) -> None:
    assert launch(1, products, device) == [expected]
