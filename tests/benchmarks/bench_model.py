"""Forward and backward of megavlm's model against transformers', with the same weights and inputs,
in one process, fp32: tiny models on one thread, in processor time, which a busy machine changes
little; the larger one on two threads, by the clock.

An answer to a question about an image; and eight answers to one question, which transformers
computes as a batch of eight sequences and megavlm as one tree (or as eight sequences, to see what
the tree is worth). Towers are frozen, as they are by default, and encode in every run. Seconds are
medians of runs in turn. They differ between machines, and so does their ratio, but less.
"""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.data.packs.packing import make_pack
from megavlm.data.packs.positions import Span, mrope_positions
from megavlm.data.packs.trees import Tree, prompt_tree
from megavlm.data.processor import Prompt
from megavlm.data.rows import Row
from megavlm.families import family
from megavlm.models.build import build_model
from megavlm.models.common.loading import MEMORY, load_hf
from megavlm.models.common.logprobs import Scoring
from megavlm.models.common.tiny import TinySizes, tiny_config
from megavlm.parallel.mesh import build_mesh
from megavlm.parallel.torchvision_ops import define_torchvision_operators
from megavlm.training.forward_backward import forward_backward
from megavlm.training.gradient_buffers import wrap
from megavlm.training.losses import supervised_loss
from megavlm.training.step.vision_features import VisionFeatures
from tests.support.fork import launch
from tests.support.random_images import random_image

VOCABULARY = 8192
TOKENS = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TOKEN_IDS = {token: i for i, token in enumerate((*TOKENS, "<|video_pad|>"))}
GRID = (1, 32, 32)  # patches of the image, 256 tokens
SIZES = {
    "tiny": {"hidden_size": 256, "num_layers": 4, "ffn_size": 768, "num_heads": 8},
    "0.3B": {
        "hidden_size": 1024,
        "num_layers": 24,
        "ffn_size": 2816,
        "num_heads": 8,
        "vision_depth": 8,
        "vision_hidden_size": 512,
        "vision_ffn_size": 1536,
        "vision_num_heads": 8,
    },
}

THREADS = {"tiny": 1, "0.3B": 2}


@dataclass(frozen=True)
class Shape:
    """`text`: tokens of the question beside the images'. `answers`: how many of which length.
    `images`: their grids of patches.
    """

    name: str
    text: int
    answers: tuple[int, int]
    images: tuple[tuple[int, int, int], ...] = (GRID,)


ONE = Shape("an image, one answer of 64", 40, (1, 64))
EIGHT = Shape("prompt of 400, 8 answers of 60", 144, (8, 60))
# Model, family, shape, and runs after a first one. Eight answers of the larger model are left out:
# transformers needs 15 GB for them.
ROWS = [
    ("tiny", "qwen2_5_vl", ONE, 9),
    ("tiny", "qwen2_5_vl", EIGHT, 5),
    ("tiny", "qwen3_vl", ONE, 9),
    ("tiny", "qwen3_vl", EIGHT, 5),
    ("tiny", "qwen3_5", ONE, 9),
    ("tiny", "qwen3_5", EIGHT, 5),
    ("0.3B", "qwen2_5_vl", ONE, 3),
    ("0.3B", "qwen3_vl", ONE, 3),
]
Step = Callable[[], float]  # forward and backward once; gives the loss


def measure(size: str, model_type: str, rows: Sequence[tuple[Shape, int]]) -> list[Any]:
    """(seconds, losses) of each row, by the names of `steps_of`."""
    torch.set_num_threads(THREADS[size])
    torch.manual_seed(0)
    config = tiny_config(model_type, TinySizes(**SIZES[size]), VOCABULARY, TOKEN_IDS)
    theirs, mesh = in_transformers(config), build_mesh()
    chunks = build_model(config, mesh)
    load_hf(chunks[0], family(model_type).mapping(config), theirs.state_dict(), mesh, MEMORY)
    # Whole gradients, as transformers leaves them: no rank has a share of its own.
    ours = wrap(chunks, shard_optimizer=False)
    clock = time.process_time if THREADS[size] == 1 else time.perf_counter
    return [timed(steps_of(ours, theirs, config, shape), repeats, clock) for shape, repeats in rows]


def steps_of(ours: Any, theirs: Any, config: Any, shape: Shape) -> dict[str, Step]:
    prompt, answers = inputs(config, shape)
    tree = [prompt_tree(prompt, answers)]
    apart = [prompt_tree(prompt, [answer]) for answer in answers]
    return {
        "tree": our_step(ours, config, prompt, tree),
        **({"apart": our_step(ours, config, prompt, apart)} if len(apart) > 1 else {}),
        "transformers": their_step(theirs, config, prompt, answers),
    }


def timed(
    steps: dict[str, Step], repeats: int, clock: Callable[[], float]
) -> tuple[dict[str, float], dict[str, float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for _ in range(1 + repeats):
        for name, step in steps.items():
            gc.collect()
            start = clock()
            losses[name] = step()
            seconds[name].append(clock() - start)
    return {n: statistics.median(x[1:]) for n, x in seconds.items()}, losses


def in_transformers(config: Any) -> Any:
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_config(config)
    model.model.visual.requires_grad_(False)
    return model.train()


def inputs(config: Any, shape: Shape) -> tuple[Prompt, list[list[int]]]:
    generator = torch.Generator().manual_seed(1)
    count, length = shape.answers
    num_words = shape.text - 2 * len(shape.images)
    words = torch.randint(len(TOKEN_IDS), VOCABULARY, (num_words,), generator=generator)
    start, end, source = (
        config.vision_start_token_id,
        TOKEN_IDS["<|vision_end|>"],
        config.image_token_id,
    )
    merge = config.vision_config.spatial_merge_size
    shown = [[start, *[source] * (math.prod(grid) // merge**2), end] for grid in shape.images]
    before = torch.tensor(list(itertools.chain(*shown)), dtype=torch.long)
    ids = torch.cat([before, words])
    positions, following = mrope_positions(
        ids, [Span(grid) for grid in shape.images], vision_token_ids=[source], merge_size=merge
    )
    images = tuple(
        random_image(
            f"image {number}", family(config.model_type).patch_sizes(config), grid, generator
        )
        for number, grid in enumerate(shape.images)
    )
    row = Row(0, "", "", (), "", "")
    prompt = Prompt(row, ids, tuple(ids.tolist()), positions, following, images)
    answers = torch.randint(len(TOKEN_IDS), VOCABULARY, (count, length), generator=generator)
    return prompt, answers.tolist()


def our_step(chunks: list[Any], config: Any, prompt: Prompt, trees: list[Tree]) -> Step:
    pack = make_pack(trees, vision_token_ids={config.image_token_id})
    images = {image.key: image for image in prompt.images}
    loss = supervised_loss(pack.num_targets)

    def step() -> float:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        features = VisionFeatures.everywhere(chunks, images)
        (measures,) = forward_backward(chunks, [pack], features, Scoring(), loss)
        return float(measures["loss"]) / pack.num_targets

    return step


def their_step(model: Any, config: Any, prompt: Prompt, answers: list[list[int]]) -> Step:
    """As their users do it: a padded batch, labels where an answer is."""
    ids = torch.stack([torch.cat([prompt.token_ids, torch.tensor(x)]) for x in answers])
    labels = ids.clone()
    labels[:, : len(prompt.token_ids)] = -100
    batch: dict[str, Tensor] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
        "mm_token_type_ids": (ids == config.image_token_id).long(),
    }
    if prompt.images:
        patches = [image.patches() for image in prompt.images]
        grids = [image.grid for image in prompt.images]
        batch["pixel_values"] = torch.cat(patches * len(answers))
        batch["image_grid_thw"] = torch.tensor(grids * len(answers))

    def step() -> float:
        model.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    return step


@pytest.mark.timeout(0)
def bench_model() -> None:
    print(f"\n{'':18}{'':32}{'megavlm':>10}{'apart':>10}{'transformers':>14}{'faster':>9}")
    for (size, model_type), group in itertools.groupby(ROWS, key=lambda row: row[:2]):
        rows = [(shape, repeats) for _, _, shape, repeats in group]
        (results,) = launch(1, measure, size, model_type, rows, timeout=900)
        for (shape, _), (seconds, losses) in zip(rows, results, strict=True):
            for loss in losses.values():
                assert abs(loss - losses["transformers"]) < 1e-4 * loss
            apart = f"{seconds['apart']:8.2f} s" if "apart" in seconds else ""
            tree, theirs = seconds["tree"], seconds["transformers"]
            print(
                f"{size:6}{model_type:12}{shape.name:32}{tree:8.2f} s{apart:>10}{theirs:12.2f} s"
                f"{theirs / tree:8.2f}x",
                flush=True,
            )
