"""Prompts for a real server, and what transformers says of the responses."""

import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.rollout.messages import Response, Sampling
from tests.parity.reference import Reference

QUESTION = "Find x in the triangle. How many blue circles?"


def picture(width: int, height: int, seed: int) -> bytes:
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 255, (height // 7, width // 7, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()


def prompts(processor: Processor, seed: int = 0) -> dict[str, Prompt]:
    """Text, one picture, several of different sizes with several windows a side."""
    pictures = {
        "text": (),
        "one picture": (picture(56, 56, seed),),
        "several pictures": (picture(280, 84, seed + 1), picture(140, 196, seed + 2)),
        "odd size": (picture(105, 175, seed + 3),),  # resized by the processor
    }
    return {
        name: processor.prompt(
            Row(index, "<image>" * len(images) + QUESTION[:20], "", images, "", f"test:{index}")
        )
        for index, (name, images) in enumerate(pictures.items())
    }


def largest_difference(
    reference: Reference, prompt: Prompt, responses: Sequence[Response], sampling: Sampling
) -> float:
    """Between the server's log-probs and transformers' of the same tokens, over all tokens."""
    return max(
        float(
            (torch.tensor(response.logprobs) - expected(reference, prompt, response, sampling))
            .abs()
            .max()
        )
        for response in responses
    )


@torch.no_grad()
def expected(
    reference: Reference, prompt: Prompt, response: Response, sampling: Sampling
) -> torch.Tensor:
    logits = reference.logits(prompt, response.token_ids)
    logits[:, list(sampling.suppressed_ids)] = -torch.inf
    logprobs = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
    return logprobs[torch.arange(len(response.token_ids)), torch.tensor(response.token_ids)]
