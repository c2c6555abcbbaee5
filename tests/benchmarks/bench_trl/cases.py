"""Sizes that are compared, and the files of each: data, a tiny model, both trainers' settings."""

import json
import random
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from PIL import Image

from megavlm.demo.shapes import ROW_SCHEMA
from megavlm.demo.tiny_model import make_tiny_model

WORDS = "the a one big red old new low hot dry cat dog sun sea map box car bus hat pen".split()
FRAME = 8  # tokens of the chat template around a question
IMAGE_FRAME = 2  # the start and the end of an image
PIXELS = 28  # of a side of an image token
PROMPTS = 8  # of a step
LR = 1e-5
PROCESSES = 2  # of TRL, on two cores


@dataclass(frozen=True)
class Case:
    """Sizes of a step. prompt: tokens with those of images; image: tokens in height and width of
    each of `images`. n: responses to a prompt, of `length` tokens. staleness: megavlm's
    rollout.max_staleness, with so many ranks and as many servers: on two cores two that take turns,
    or one that works at the same time. goal: megavlm's steps an hour over TRL's that are aimed at.
    """

    name: str
    prompt: int
    n: int
    length: int
    images: int = 0
    image: tuple[int, int] = (0, 0)
    prompts: int = PROMPTS
    steps: int = 8
    staleness: int = 0
    ranks: int = 2
    goal: float | None = None

    @property
    def text(self) -> int:
        """Words of a question."""
        shown = self.image[0] * self.image[1] + IMAGE_FRAME
        return self.prompt - FRAME - self.images * shown


TEXT = Case("text", 25, 16, 32, goal=1.5, steps=16)
TEXT_AHEAD = replace(TEXT, name="text_ahead", staleness=1, ranks=1)
LONG_TEXT = Case("text_long", 25, 16, 60, steps=12)
IMAGES = Case("image", 400, 8, 32, images=1, image=(16, 23), goal=5.0, steps=8)
IMAGES_AHEAD = replace(IMAGES, name="image_ahead", staleness=1, ranks=1)
MANY_IMAGES = Case("image_long", 400, 16, 60, images=1, image=(16, 23), steps=6)
CASES = (TEXT, TEXT_AHEAD, LONG_TEXT, IMAGES, IMAGES_AHEAD, MANY_IMAGES)


def prepare(case: Case, folder: Path) -> None:
    """Write data.parquet, model/, ours.yaml and theirs.json."""
    chance = random.Random(0)
    count = case.prompts * case.steps
    # A question begins with a word that is one token there.
    problems = [" ".join(["the", *chance.choices(WORDS, k=case.text - 1)]) for _ in range(count)]
    height, width = (PIXELS * side for side in case.image)
    rows = [
        {
            "images": [
                {"bytes": _png(chance, height, width), "path": None} for _ in range(case.images)
            ],
            "problem": "<image>" * case.images + problem,
            "answer": "e",
            "task": "",
        }
        for problem in problems
    ]
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=ROW_SCHEMA), folder / "data.parquet")
    torch.manual_seed(0)
    make_tiny_model(folder / "model", [" ".join([*WORDS, "the"])] * 100, seed=0)
    (folder / "ours.yaml").write_text(yaml.safe_dump(ours(case, folder)))
    settings = {"length": case.length, "n": case.n, "prompts": case.prompts, "lr": LR}
    (folder / "theirs.json").write_text(json.dumps(settings | {"steps": case.steps}))


def ours(case: Case, folder: Path) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder / "run"), "summary": False},
        "model": {"folder": str(folder / "model"), "dtype": "float32"},
        "data": {
            "train_files": [str(folder / "data.parquet")],
            "max_prompt_tokens": case.prompt + 8,
            "workers": min(case.images, 1),  # images are decoded ahead; so they are in theirs.py
        },
        "algorithm": {
            "name": "grpo",
            "steps": case.steps,
            "prompts_per_step": case.prompts,
            "responses_per_prompt": case.n,
            "kl_coefficient": 0.0,
            "importance": "token" if case.staleness else "none",
        },
        "parallel": {"data": case.ranks},
        "rollout": {
            "servers": case.ranks,
            "max_new_tokens": case.length,
            "max_staleness": case.staleness,
            # The end of a response is sampled and ignored, in TRL it is never sampled.
            "server_args": {"preferred_sampling_params": '{"ignore_eos": true}'},
        },
        "reward": {"name": "reward:score"},
        "optimizer": {"lr": LR, "warmup_steps": 0, "betas": [0.9, 0.999], "weight_decay": 0.0},
        "checkpoint": {"every": 0},
        "evaluation": {"before": False, "after": False},
    }


def _png(chance: random.Random, height: int, width: int) -> bytes:
    noise = Image.frombytes("RGB", (8, 8), chance.randbytes(8 * 8 * 3))
    content = BytesIO()
    noise.resize((width, height)).save(content, "PNG")
    return content.getvalue()
