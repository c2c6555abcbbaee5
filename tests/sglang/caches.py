"""Compare attention over SGLang's KV cache under its own backend and under ours: run in a process
that has sglang_cpu on its path. Prints a line of JSON: for each case the largest difference, the
cached tokens that ours reads, and the seconds of both.
"""

import json
import time
from typing import Any

import torch
from sglang.srt.layers.attention import torch_native_backend
from torch import Tensor

Ours = torch_native_backend.TorchNativeAttnBackend
Own = Ours.__bases__[0]
assert Ours.__name__ == "CacheAttention", "sglang_cpu is not on the path"
HEADS, KV_HEADS, SIZE, POOL = 4, 2, 32, 20000
# Tokens of each sequence before the new ones, and the new ones.
CASES = {
    "decoding, equal": ([57] * 128, [1] * 128),
    "decoding, uneven": ([1, 800, 57, 57, 58, 3, 400], [1] * 7),
    "decoding, more than a call": ([4000, 3000, 4001, 2999, 5], [1] * 5),
    "prompts": ([0] * 4, [25, 30, 25, 1]),
    "prompts with prefixes": ([400, 0, 399, 12, 400, 64], [1, 400, 1, 30, 60, 30]),
    "decoding, responses": ([*range(430, 438), *[410] * 8, 120, 121, 79, 80, 60], [1] * 21),
    "decoding, branches": ([410, 409, 408, 407], [1] * 4),
    "decoding, short prompts": ([40] * 32 + [29] * 4, [1] * 36),
    "first tokens": ([421] * 8 + [0] + [299] * 4, [1] * 8 + [30] + [1] * 4),
}
# Of a case, which sequences share how many tokens: [first, end) of them.
SHARED = {
    "decoding, responses": [(0, 8, 420), (8, 16, 400), (16, 18, 110), (18, 20, 78)],
    "decoding, branches": [(0, 4, 300), (1, 4, 400)],
    "decoding, short prompts": [(0, 16, 10), (16, 32, 10), (32, 36, 28)],
    "first tokens": [(0, 8, 421), (9, 13, 299)],
}


def caches(lengths: list[int], shared: list[tuple[int, int, int]]) -> tuple[Tensor, ...]:
    keys, values = (torch.randn(POOL, KV_HEADS, SIZE) for _ in range(2))
    # What no sequence holds must not be read.
    keys[0] = values[0] = torch.nan
    slots = torch.zeros(256, max(lengths) + 1, dtype=torch.int32)
    requests, free = torch.randperm(256)[: len(lengths)], (torch.randperm(POOL - 1) + 1).int()
    for request, length in zip(requests, lengths, strict=True):
        slots[request, :length], free = free[:length], free[length:]
    for first, end, count in shared:
        slots[requests[first:end], :count] = slots[requests[first], :count]
    return keys, values, slots, requests


def compare(name: str) -> tuple[float, int, list[float]]:
    before, new = CASES[name]
    lengths = [a + b for a, b in zip(before, new, strict=True)]
    inputs = [*caches(lengths, SHARED.get(name, [])), torch.tensor(lengths)]
    query = torch.randn(sum(new), HEADS, SIZE)
    options: dict[str, Any] = {"scaling": SIZE**-0.5, "enable_gqa": True, "is_cross_attn": False}
    function = "_run_sdpa_forward_decode"
    if set(new) != {1}:
        function, options["causal"] = "_run_sdpa_forward_extend", True
        inputs += [torch.tensor(before), torch.tensor(new)]
    outputs, seconds = [], []
    for cls in (Own, Ours):
        output = torch.full_like(query, torch.nan)
        backend = cls.__new__(cls)
        start = time.process_time()
        getattr(backend, function)(query, output, *inputs, None, **options)
        seconds.append(time.process_time() - start)
        outputs.append(output)
    read = sum(call.slots.numel() for call in backend._calls)
    return (outputs[0] - outputs[1]).abs().max().item(), read, seconds


torch.manual_seed(0)
compare("decoding, equal")  # first calls are slow
print(json.dumps({name: compare(name) for name in CASES}))
