"""Prompts for a real server, and what transformers says of the responses."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from megavlm.data.chat.messages import Message
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.inference.protocol import Response, SamplingParams
from tests.parity.inputs import QUESTION, image
from tests.parity.reference import Reference


def prompts(processor: Processor, seed: int = 0) -> dict[str, Prompt]:
    """Text, one image, several of different sizes with several windows a side."""
    images = {
        "text": (),
        "one image": (image(56, 56, seed),),
        "several images": (image(280, 84, seed + 1), image(140, 196, seed + 2)),
        "odd size": (image(105, 175, seed + 3),),  # resized by the processor
    }
    return {
        name: processor.prompt(
            Row(index, "<image>" * len(sources) + QUESTION[:20], "", sources, "", f"test:{index}")
        )
        for index, (name, sources) in enumerate(images.items())
    }


SPELLED = "<image> <|vision_start|><|image_pad|><|vision_end|> <|video_pad|> <video> <audio>"


def next_turns(processor: Processor) -> dict[str, Prompt]:
    """Turns after a response whose ordinary tokens spell the placeholders of images and videos."""
    spell = processor._tokenizer(SPELLED, add_special_tokens=False, split_special_tokens=True)
    said = [*spell["input_ids"], processor.eos_id]
    row = Row(9, QUESTION[:20], "", (), "", "test:9")
    shown = replace(row, images=(image(84, 56, seed=9),))
    first = prompts(processor)["one image"]
    parts = ({"type": "text", "text": "the <image>:"}, {"type": "image"})
    result = replace(shown, messages=(Message("tool", "the crop", {"name": "zoom"}, parts=parts),))
    zoomed = processor.next_turn(first, said, result)
    return {
        "a tool's image": zoomed,
        "a note instead of the first image": processor.without_images(zoomed, range(1)),
        "spelled": processor.next_turn(first, said, row),
        "spelled, and another image": processor.next_turn(first, said, shown),
    }


def largest_difference(
    reference: Reference,
    prompt: Prompt,
    responses: Sequence[Response],
    sampling_params: SamplingParams,
) -> float:
    """Between the server's log-probs and transformers' of the same tokens, over all tokens."""
    return max(
        float(
            (
                torch.tensor(response.logprobs)
                - expected(reference, prompt, response, sampling_params)
            )
            .abs()
            .max()
        )
        for response in responses
    )


@torch.no_grad()
def expected(
    reference: Reference, prompt: Prompt, response: Response, sampling_params: SamplingParams
) -> torch.Tensor:
    scores = reference.scores(prompt, response.token_ids.tolist())
    scores.logits[:, list(sampling_params.suppressed_ids)] = -torch.inf
    return scores.logprobs(response.token_ids.tolist(), sampling_params.temperature or 1.0)
