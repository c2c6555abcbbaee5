"""`make bench`: prints what the driver spends on packing a step, and how full its packs are.

Prints, and asserts nothing about time: machines differ.
"""

import time

import torch

from megavlm.data.packing import Segment, Tree, make_pack, pack_trees
from megavlm.data.positions import text_positions
from tests.columns import columns

PROMPTS, RESPONSES, PACK_TOKENS = 128, 8, 18432
IMAGE_TOKEN = 1


def tree(generator: torch.Generator) -> Tree:
    """A prompt of 300 to 1,400 tokens with RESPONSES answers of 50 to 800."""
    length = int(torch.randint(300, 1400, (), generator=generator))
    ids = torch.full((length,), IMAGE_TOKEN)
    segments = [Segment(ids, text_positions(length, 0), parent=-1, is_target=False)]
    for size in torch.randint(50, 800, (RESPONSES,), generator=generator).tolist():
        ids, positions = torch.full((size,), 2), text_positions(size, length)
        segments.append(Segment(ids, positions, parent=0, is_target=True, columns=columns(size)))
    return Tree(tuple(segments), ())


def bench_packing() -> None:
    generator = torch.Generator().manual_seed(0)
    trees = [tree(generator) for _ in range(PROMPTS)]
    start = time.perf_counter()
    bins = pack_trees(trees, PACK_TOKENS)
    packed = time.perf_counter()
    for handles in bins:
        make_pack(handles, vision_token_ids={IMAGE_TOKEN}, multiple=8)
    laid_out = time.perf_counter()
    tokens = sum(item.num_tokens for item in trees)
    print(f"\n{PROMPTS} prompts x {RESPONSES} responses, {tokens} tokens, {len(bins)} packs")
    print(f"  choose packs  {1e3 * (packed - start):8.1f} ms")
    print(f"  lay them out  {1e3 * (laid_out - packed):8.1f} ms")
    print(f"  filled        {tokens / (len(bins) * PACK_TOKENS):8.3f}")
