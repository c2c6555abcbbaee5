"""Length of the warm start on a user's images, by what a row costs, and how long that takes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megavlm.config.algorithm import SFT
from megavlm.config.schema import Config
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Rows
from megavlm.models.linear_attention.in_transformers import use_plain_torch
from megavlm.observability.text import duration

EPOCHS = 8
# Patches and text tokens of all rows together. Images of 64 x 64 pixels make it 400 steps of 64
# rows, which teach the tower their colours; with larger images each step counts for more.
MOST_TOKENS = 1_000_000
SAMPLE = 16  # rows that are measured
OVERHEAD = 1.5  # of a step over forward and backward alone: optimizer, packing, gradients' sum


@dataclass(frozen=True)
class WarmStart:
    """Steps of the warm start, and an estimate of their time in seconds if `num_ranks` cores have
    nothing else to do.
    """

    steps: int
    seconds: float
    num_ranks: int

    def __str__(self) -> str:
        cores = f"{self.num_ranks} cores that have nothing else to do"
        return f"{self.steps:,} steps, about {duration(self.seconds)} on {cores}"


def plan_warm_start(config: Config, steps: int | None) -> WarmStart:
    """Plan the warm start of a recipe. steps: as the user wants it; None: as many as suit its rows.

    Raises ValueError, naming the row, for a row that cannot be trained on.
    """
    assert isinstance(config.algorithm, SFT)
    rows = Rows(config.data.train_files, config.data)
    processor = Processor(config.model.folder, config.data)
    places = range(0, len(rows), max(len(rows) // SAMPLE, 1))
    prompts = [processor.prompt(rows[place]) for place in places]
    if steps is None:
        steps = num_steps(len(rows), prompts, config.algorithm.batch_size)
    ranks = config.parallel.num_ranks
    seconds = OVERHEAD * _seconds_per_row(config, prompts) * config.algorithm.batch_size / ranks
    return WarmStart(steps, steps * seconds, ranks)


def num_steps(num_rows: int, sample: Sequence[Prompt], batch_size: int) -> int:
    """Return the steps of EPOCHS epochs, or fewer if they would see more than MOST_TOKENS."""
    patches = sum(image.num_patches for prompt in sample for image in prompt.images)
    text = sum(len(prompt.token_ids) - prompt.num_vision_tokens for prompt in sample)
    seen = min(EPOCHS * num_rows, MOST_TOKENS * len(sample) // (patches + text))
    return max(seen // batch_size, 1)


def _seconds_per_row(config: Config, prompts: Sequence[Prompt]) -> float:
    """Measure the CPU time of transformers' forward and backward of each prompt, the same work as
    training's. It says the same on a busy machine.
    """
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(config.model.folder, local_files_only=True)
    use_plain_torch(model)
    _train(model, prompts[0])  # the first one allocates
    start = time.process_time()
    for prompt in prompts:
        _train(model, prompt)
    return (time.process_time() - start) / len(prompts)


def _train(model: Any, prompt: Prompt) -> None:
    ids = prompt.token_ids[None]
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if prompt.images:
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).long()
        inputs["pixel_values"] = torch.cat([image.patches() for image in prompt.images])
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in prompt.images])
    model(**inputs, use_cache=False).loss.backward()
