"""Length of the warm start on a user's images, from the cost of a row, and its duration."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megavlm.config.algorithm import SFT
from megavlm.config.schema import Config
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Rows
from megavlm.families import family, family_of
from megavlm.model_config import model_config
from megavlm.models.linear_attention.in_transformers import use_plain_torch
from megavlm.observability.text import duration

EPOCHS = 8
# Limit on the patches and text tokens of all rows together. With images of 64 x 64 pixels it
# allows 400 steps of 64 rows, enough to teach the tower their colours. Larger images get fewer
# steps, but each step teaches more.
MOST_TOKENS = 1_000_000
SAMPLE = 16  # number of rows that are measured
OVERHEAD = 1.5  # factor for the rest of a step: optimizer, packing, gradient reduction


@dataclass(frozen=True)
class WarmStart:
    """Steps of the warm start, and an estimate of their time in seconds on `num_ranks` cores that
    are otherwise idle.
    """

    steps: int
    seconds: float
    num_ranks: int

    def __str__(self) -> str:
        cores = f"{self.num_ranks} cores that have nothing else to do"
        return f"{self.steps:,} steps, about {duration(self.seconds)} on {cores}"


def plan_warm_start(config: Config, steps: int | None) -> WarmStart:
    """Plan the warm start of a recipe. steps: the user's number; None chooses one for its rows.

    Raises ValueError, naming the row, for a row that cannot be trained on.
    """
    assert isinstance(config.algorithm, SFT)
    rows = Rows(config.data.train_files, config.data)
    processor = Processor(config.model.folder, config.data, family_of(config.model.folder))
    indices = range(0, len(rows), max(len(rows) // SAMPLE, 1))
    prompts = [processor.prompt(rows[index]) for index in indices]
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
    """Measure the CPU time of transformers' forward and backward for a prompt, which is the same
    work as in training. CPU time does not depend on other load of the machine.
    """
    from transformers import AutoModelForImageTextToText

    folder = config.model.folder
    model = AutoModelForImageTextToText.from_pretrained(
        folder, config=model_config(folder), local_files_only=True
    )
    use_plain_torch(model)
    _train(model, prompts[0])  # warm up: the first call allocates memory
    start = time.process_time()
    for prompt in prompts:
        _train(model, prompt)
    return (time.process_time() - start) / len(prompts)


def _train(model: Any, prompt: Prompt) -> None:
    config, ids = model.config, prompt.token_ids
    inputs = family(config.model_type).model_inputs(config, ids, prompt.positions, prompt.images)
    model(input_ids=ids[None], labels=ids[None], **inputs, use_cache=False).loss.backward()
