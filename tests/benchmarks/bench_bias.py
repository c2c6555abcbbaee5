"""`make bench`: the suppressed tokens of a server's batch, as SGLang adds them and shared."""

import time
from collections.abc import Callable
from typing import Any

import torch

from megavlm.inference.server_support.megavlm_bias import SharedBias

REQUESTS, VOCABULARY, SUPPRESSED = 256, 151936, 400


def bench_bias() -> None:
    bias = {str(token): -1e9 for token in range(VOCABULARY - SUPPRESSED, VOCABULARY)}
    shared = SharedBias(bias, REQUESTS, VOCABULARY, "cpu")
    dense, logits = shared.dense(), torch.randn(REQUESTS, VOCABULARY)
    kept = torch.arange(REQUESTS - 1)  # a request has ended
    softmax = seconds(lambda: logits.softmax(-1))
    print(f"\n{REQUESTS} requests, {VOCABULARY} tokens, {SUPPRESSED} suppressed; one core")
    for name, work in (
        ("added for each token", lambda x: logits.add_(x)),
        ("when a request ends", lambda x: x[kept]),
    ):
        slow, fast = seconds(work, dense), seconds(work, shared)
        print(
            f"{name}: matrix {slow * 1e3:.2f} ms, shared {fast * 1e3:.2f} ms, "
            f"{slow / fast:.0f} x (a softmax takes {softmax * 1e3:.1f} ms)"
        )
    size = dense.nbytes / 2**20
    print(f"memory: matrix {size:.0f} MiB, shared {shared.tokens.nbytes * 1.5 / 2**10:.1f} KiB")


def seconds(work: Callable[..., Any], *arguments: Any) -> float:
    """Return the least time of five calls."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work(*arguments)
        times.append(time.perf_counter() - start)
    return min(times)
