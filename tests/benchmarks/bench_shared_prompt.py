"""A prompt with its n responses: computed once as a tree, or n times as n sequences.

Time of forward and backward as a ratio in one run, one process, one thread, text only.
"""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from megavlm.data.packing import Pack, Tree, make_pack, prompt_tree
from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.models.common.logprobs import Scoring
from megavlm.models.registry import build_model
from megavlm.parallel.mesh import build_mesh
from megavlm.training.optimizer import wrap
from megavlm.training.passes import VisionFeatures, forward_backward
from megavlm.training.policy_loss import supervised_loss
from tests.distributed.fork import launch

PROMPT, RESPONSES, LENGTH, REPEATS = 400, 8, 60, 3


def measure(folder: Path) -> list[Any]:
    """Seconds of a step as one tree and as separate sequences, best of REPEATS; and tokens."""
    config = AutoConfig.from_pretrained(folder)
    model = wrap(build_model(config, build_mesh(), dtype=torch.float32))
    processor = Processor(folder, min_pixels=None, max_pixels=None)
    text = "a" * 4 * PROMPT
    prompt = processor.prompt(Row(0, text, "", (), "", ""))
    responses = [[1 + i] * LENGTH for i in range(RESPONSES)]
    packs = [
        pack([prompt_tree(prompt, responses)], config),
        pack([prompt_tree(prompt, [response]) for response in responses], config),
    ]
    loss = supervised_loss(RESPONSES * LENGTH)
    best = [float("inf")] * 2
    for _ in range(REPEATS):
        for index, one in enumerate(packs):
            start = time.perf_counter()
            forward_backward(model, [one], VisionFeatures(model, {}), Scoring(), loss)
            best[index] = min(best[index], time.perf_counter() - start)
    return [*best, *(len(one.token_ids) for one in packs), len(prompt.token_ids)]


def pack(trees: list[Tree], config: Any) -> Pack:
    return make_pack(trees, vision_token_ids={config.image_token_id})


def bench_shared_prompt(tmp_path: Path) -> None:
    make_tiny_model(
        tmp_path, ["aaaa "] * 10, seed=0, hidden_size=512, num_layers=4, ffn_size=1536, num_heads=8
    )
    ((tree, separate, tree_tokens, separate_tokens, prompt_tokens),) = launch(1, measure, tmp_path)
    print(
        f"\nprompt {prompt_tokens}, {RESPONSES} responses of {LENGTH}: "
        f"{separate_tokens} tokens in {separate:.2f} s apart, {tree_tokens} in {tree:.2f} s as a "
        f"tree: {separate / tree:.2f} x"
    )
    assert tree_tokens == prompt_tokens + RESPONSES * LENGTH < separate_tokens
