"""`make bench`: the suppressed tokens of a server's batch, as SGLang adds them and shared."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForImageTextToText

from megavlm.demo.tiny_model import make_tiny_model
from megavlm.inference.protocol import bearer
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_support.megavlm_bias import SharedBias
from tests.support.servers import run_server

REQUESTS, VOCABULARY, SUPPRESSED = 256, 151936, 400
SERVED, TOKENS = 64, 32  # requests at once, and tokens of each


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


def bench_served_bias(tmp_path: Path) -> None:
    """Compare a server's seconds for requests that share their bias, and for requests of which each
    suppresses a token more, so that SGLang's matrix is made; and without any bias.
    """
    folder = tmp_path / "model"
    make_tiny_model(folder, ["a b c"], seed=1)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    model.resize_token_embeddings(VOCABULARY)
    model.save_pretrained(folder)
    suppressed = {str(token): -1e9 for token in range(VOCABULARY - SUPPRESSED, VOCABULARY)}
    biases = {
        "none": [{}] * SERVED,
        "shared": [suppressed] * SERVED,
        "matrix": [suppressed | {str(1000 + number): -1e9} for number in range(SERVED)],
    }
    took: dict[str, list[float]] = {name: [] for name in biases}
    options = ServerOptions(folder, dtype="float32", device="cpu")
    with run_server(ManagedServer(options, log_path=tmp_path / "server.log")) as server:
        for turn in range(4):
            for name, given in biases.items():
                body = {
                    "input_ids": [[10 + number] * 8 for number in range(SERVED)],
                    "sampling_params": [
                        {"max_new_tokens": TOKENS, "ignore_eos": True, "logit_bias": bias}
                        for bias in given
                    ],
                }
                start = time.perf_counter()
                answer = httpx.post(
                    f"{server.url}/generate",
                    json=body,
                    headers=bearer(server.api_key),
                    timeout=600,
                )
                answer.raise_for_status()
                if turn:  # the first is a warm-up
                    took[name].append((time.perf_counter() - start) / TOKENS)
    least = {name: min(times) for name, times in took.items()}
    print(
        f"\na CPU server, {SERVED} requests, {VOCABULARY} tokens, a step of decoding: "
        + ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in least.items())
        + f"; shared / matrix {least['shared'] / least['matrix']:.2f}"
    )
