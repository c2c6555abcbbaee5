"""Compare attention over SGLang's KV cache under its own backend and under ours: run in a process
that has cpu_support on its path. Prints a line of JSON: for each case the largest difference, and
the seconds of both.
"""

import json
import time
from typing import Any

import torch
from sglang.srt.layers.attention import torch_native_backend
from torch import Tensor

Ours = torch_native_backend.TorchNativeAttnBackend
Own = Ours.__bases__[0]
assert Ours.__name__ == "CacheAttention", "cpu_support is not on the path"
HEADS, KV_HEADS, SIZE, POOL = 4, 2, 32, 20000
# Tokens of each sequence before the new ones, and the new ones.
CASES = {
    "decoding, equal": ([57] * 128, [1] * 128),
    "decoding, uneven": ([1, 800, 57, 57, 58, 3, 400], [1] * 7),
    "decoding, more than a call": ([4000, 3000, 4001, 2999, 5], [1] * 5),
    "prompts": ([0] * 4, [25, 30, 25, 1]),
    "prompts with prefixes": ([400, 0, 399, 12, 400, 64], [1, 400, 1, 30, 60, 30]),
}


def caches(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keys, values = (torch.randn(POOL, KV_HEADS, SIZE) for _ in range(2))
    # What no sequence holds must not be read.
    keys[0] = values[0] = torch.nan
    slots = torch.zeros(256, max(lengths) + 1, dtype=torch.int32)
    requests, free = torch.randperm(256)[: len(lengths)], (torch.randperm(POOL - 1) + 1).int()
    for request, length in zip(requests, lengths, strict=True):
        slots[request, :length], free = free[:length], free[length:]
    return keys, values, slots, requests


def compare(before: list[int], new: list[int]) -> tuple[float, list[float]]:
    lengths = [a + b for a, b in zip(before, new, strict=True)]
    inputs = [*caches(lengths), torch.tensor(lengths)]
    query = torch.randn(sum(new), HEADS, SIZE)
    options: dict[str, Any] = {"scaling": SIZE**-0.5, "enable_gqa": True, "is_cross_attn": False}
    name = "_run_sdpa_forward_decode"
    if set(new) != {1}:
        name, options["causal"] = "_run_sdpa_forward_extend", True
        inputs += [torch.tensor(before), torch.tensor(new)]
    outputs, seconds = [], []
    for cls in (Own, Ours):
        output = torch.full_like(query, torch.nan)
        backend = cls.__new__(cls)
        start = time.process_time()
        getattr(backend, name)(query, output, *inputs, None, **options)
        seconds.append(time.process_time() - start)
        outputs.append(output)
    return (outputs[0] - outputs[1]).abs().max().item(), seconds


torch.manual_seed(0)
compare(*CASES["decoding, equal"])  # first calls are slow
print(json.dumps({name: compare(*case) for name, case in CASES.items()}))
