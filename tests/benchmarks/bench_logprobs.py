"""Peak memory and time of scoring tokens under a vocabulary of 151,936: megavlm's `token_scores`
against the plain form, all logits [T, V] and their log-softmax.

Both start from the hidden states of T tokens, N of which predict a token that the loss counts, and
both run forward and backward, gradients of the hidden states and of the output weight included.
Memory: how far the resident set of a process of its own rises above what it held before, which is
what the machine must have; torch's profiler sees allocations, not when they come back.

And the share of a step of a 0.3B model that it is: of forward and backward of one tree, in one run.

And with the tokens that top-p kept of normally distributed logits: their number and bytes, and the
CPU time of log-probs and entropies, divided by that of the whole vocabulary. The same with the
divergence over a teacher's likeliest tokens, and the bytes of its answer over HTTP.
"""

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megavlm.data.packs.token_sets import TokenSets
from megavlm.data.packs.trees import prompt_tree
from megavlm.models.build import build_model
from megavlm.models.common import logprobs
from megavlm.models.common.logprobs import Scoring, token_scores
from megavlm.models.common.tiny import TinySizes, tiny_config
from megavlm.parallel import platform
from megavlm.parallel.mesh import build_mesh
from megavlm.training.gradient_buffers import wrap
from tests.benchmarks.bench_model import GRID, SIZES, TOKEN_IDS, Shape, inputs, our_step
from tests.support.fork import launch

VOCABULARY, HIDDEN = 151_936, 256
TOP_P = (0.9, 0.95)
# T tokens, N of them scored; whether the plain form is run: for 8,192 tokens it takes 15 GB
CASES = ((2048, 128, True), (2048, 2048, True), (8192, 128, False), (8192, 2048, False))


@dataclass(frozen=True)
class Cost:
    """`added`: bytes above what the process held before; the sum of log-probs shows that two forms
    computed the same.
    """

    seconds: float
    added: int
    total: float


def scored(hidden: Tensor, weight: Tensor, index: Tensor, targets: Tensor) -> Tensor:
    """Log-probs [N] of `targets`, predicted by the hidden states [T, H] at `index`."""
    group = dist.group.WORLD
    assert group is not None
    return token_scores(hidden[index], weight, targets, scoring=Scoring(), group=group)[0]


def plain(hidden: Tensor, weight: Tensor, index: Tensor, targets: Tensor) -> Tensor:
    scores = F.log_softmax(hidden @ weight.t(), dim=-1)
    return scores[index].gather(1, targets[:, None])[:, 0]


FORMS = {"megavlm": scored, "plain": plain}


def measure(form: str, num_tokens: int, num_scored: int) -> Cost:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=generator) / 16).requires_grad_()
    index = torch.arange(num_tokens - num_scored, num_tokens)
    targets = torch.randint(0, VOCABULARY, (num_scored,), generator=generator)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    torch.set_num_threads(2)
    before = resident_bytes()
    start = time.perf_counter()
    total = FORMS[form](hidden, weight, index, targets).sum()
    total.backward()
    seconds = time.perf_counter() - start
    return Cost(seconds, platform.peak_memory_bytes() - before, float(total))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.timeout(0)
def bench_logprobs() -> None:
    print(f"\nforward and backward, vocabulary {VOCABULARY}, hidden {HIDDEN}, fp32, two threads")
    print(f"{'tokens':>8}{'scored':>8}{'megavlm':>20}{'plain':>20}{'less memory':>13}{'faster':>8}")
    for num_tokens, num_scored, run_plain in CASES:
        (ours,) = launch(1, measure, "megavlm", num_tokens, num_scored)
        line = f"{num_tokens:8}{num_scored:8}{shown(ours):>20}"
        if run_plain:
            (theirs,) = launch(1, measure, "plain", num_tokens, num_scored)
            assert abs(ours.total - theirs.total) < 1e-4 * abs(theirs.total)
            memory, speed = theirs.added / ours.added, theirs.seconds / ours.seconds
            line += f"{shown(theirs):>20}{memory:12.1f}x{speed:7.1f}x"
        else:
            line += f"{'not run':>20}"
        print(line)


def shown(cost: Cost) -> str:
    return f"{cost.added / 1e9:.2f} GB {cost.seconds:6.2f} s"


def kept_by(logits: Tensor, top_p: float, top_k: int) -> TokenSets:
    """Return the sets that SGLang's sampler keeps of logits [N, V]."""
    probs, ids = logits.softmax(-1).topk(top_k)
    is_kept = probs.cumsum(-1) - probs <= top_p
    return TokenSets.of(is_kept.sum(-1).int(), ids[is_kept].int())


def with_sets(scale: float) -> list[Any]:
    """Return the entropy of logits of this standard deviation, and for each top_p the mean number
    of tokens that it keeps; then the seconds without and with each of these sets.
    """
    torch.set_num_threads(2)
    generator, num = torch.Generator().manual_seed(0), 512
    hidden = torch.randn(num, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator) * scale / HIDDEN**0.5
    logits = hidden @ weight.t()
    sets = [kept_by(logits, top_p, 1024) for top_p in TOP_P]
    targets, logp = logits.argmax(-1), logits.log_softmax(-1)
    entropy = float(-(logp.exp() * logp).sum(-1).mean())
    del logits, logp
    seconds = least_seconds(hidden, weight, targets, [{}, *({"kept": kept} for kept in sets)])
    return [entropy, [len(kept.ids) / num for kept in sets], seconds]


def least_seconds(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: Sequence[Mapping[str, TokenSets]]
) -> list[float]:
    """Return the CPU seconds of scores and their gradients with each of some options. They depend
    less than the time does on what else the machine computes.
    """
    hidden.requires_grad_(), weight.requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    seconds = [1e9 for _ in options]
    for _ in range(3):
        for number, option in enumerate(options):
            start = time.process_time()
            scores = token_scores(hidden, weight, targets, scoring=Scoring(), group=group, **option)
            sum(score.sum() for score in scores if score is not None).backward()
            seconds[number] = min(seconds[number], time.process_time() - start)
    return seconds


def with_a_teacher(numbers: Sequence[int]) -> list[Any]:
    """Return the mean probability of all but the k likeliest tokens, for each of these numbers k,
    and the seconds without a teacher and with each.
    """
    torch.set_num_threads(2)
    generator, num = torch.Generator().manual_seed(0), 512
    hidden = torch.randn(num, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator) * 5 / HIDDEN**0.5
    logprobs = (hidden @ weight.t()).log_softmax(-1)
    sets, rests = [], []
    for k in numbers:
        values, ids = logprobs.topk(k)
        sizes = torch.full((num,), k, dtype=torch.int32)
        sets.append(TokenSets.of(sizes, ids.flatten().int(), values.flatten()))
        rests.append(float(1 - values.exp().sum(-1).mean()))
    targets = logprobs.argmax(-1)
    del logprobs
    options = [{}, *({"teacher": teacher} for teacher in sets)]
    return [rests, least_seconds(hidden, weight, targets, options)]


@pytest.mark.timeout(0)
def bench_kept() -> None:
    print(f"\nlog-probs and entropies among kept tokens, vocabulary {VOCABULARY}, two threads")
    print(f"{'entropy':>8}{'top-p':>7}{'tokens kept':>13}{'bytes':>8}{'CPU time':>10}")
    for scale in (4.0, 5.0, 7.0):
        ((entropy, sizes, (whole, *each)),) = launch(1, with_sets, scale, timeout=900)
        for top_p, size, seconds in zip(TOP_P, sizes, each, strict=True):
            cost = f"{size:13.1f}{4 + 4 * size:8.0f}{seconds / whole:9.2f}x"
            print(f"{entropy:8.2f}{top_p:7}{cost}")


@pytest.mark.timeout(0)
def bench_teacher() -> None:
    print(f"\ndivergence over a teacher's tokens, vocabulary {VOCABULARY}, two threads")
    print(f"{'k':>6}{'all others':>12}{'bytes':>8}{'over HTTP':>11}{'CPU time':>10}")
    numbers = (16, 64, 256)
    ((rests, (without, *each)),) = launch(1, with_a_teacher, numbers, timeout=900)
    for k, rest, seconds in zip(numbers, rests, each, strict=True):
        http = 2 * len(base64.b64encode(bytes(4 * k)))
        print(f"{k:6}{rest:12.3f}{4 + 8 * k:8}{http:11}{seconds / without:9.2f}x")


def share(prompt_tokens: int, answers: tuple[int, int]) -> tuple[float, float]:
    """Seconds of log-probs and of the whole, forward and backward, the second time."""
    torch.set_num_threads(2)
    config = tiny_config("qwen2_5_vl", TinySizes(**SIZES["0.3B"]), VOCABULARY, TOKEN_IDS)
    chunks = wrap(build_model(config, build_mesh()), shard_optimizer=False)
    text = prompt_tokens - GRID[1] * GRID[2] // 4
    prompt, made = inputs(config, Shape("", text, answers))
    step = our_step(chunks, config, prompt, [prompt_tree(prompt, made)])
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            spent[0] += time.perf_counter() - start
            return result

        return run

    scores: Any = logprobs._ChunkedScores
    scores.forward, scores.backward = timed(scores.forward), timed(scores.backward)
    step()
    spent[0], start = 0.0, time.perf_counter()
    step()
    return spent[0], time.perf_counter() - start


@pytest.mark.timeout(0)
def bench_share() -> None:
    print("\nlog-probs in forward and backward of a 0.3B model, vocabulary 151936, two threads")
    for prompt_tokens, answers in ((400, (2, 60)), (400, (8, 60))):
        ((own, whole),) = launch(1, share, prompt_tokens, answers, timeout=900)
        scored = f"prompt {prompt_tokens}, {answers[0] * answers[1]} scored"
        print(f"{scored}: {own:.1f} of {whole:.1f} s, {own / whole:.0%}")
