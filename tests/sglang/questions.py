"""Prompts for a real server, and what transformers says of the responses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megavlm.data.chat.messages import Message
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.inference.protocol import Response, SamplingParams
from tests.parity.inputs import QUESTION, clip, image, video
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


def audio_prompts(processor: Processor) -> dict[str, Prompt]:
    """Clips of several windows, of one chunk and of less; none for a family without audio."""
    if processor.audio_token_id is None:
        return {}

    def heard(problem: str, *clips: bytes, images: tuple[bytes, ...] = (), **videos: Any) -> Row:
        return Row(1, problem + QUESTION, "", images, "", "test:1", audio=clips, **videos)

    first = processor.prompt(heard("<audio>", clip(1.0, 1)))
    rows = {
        "a short clip": heard("<audio>", clip(0.31, 2)),
        "two clips": heard("a<audio>b<audio>", clip(4.57, 3), clip(1.3, 4)),
        "a clip and images": heard(
            "<image>a<audio>b<image>",
            clip(1.0, 5),
            images=(image(84, 56, seed=1), image(112, 56, seed=2)),
        ),
        "a clip and a video": heard("<audio>a<video>", clip(2.2, 6), videos=(video(84, 56, 6, 1),)),
    }
    later = processor.next_turn(first, [5, processor.eos_id], heard("<audio>", clip(1.3, 7)))
    made = {name: processor.prompt(row) for name, row in rows.items()}
    return {"a clip": first, **made, "a clip in a later turn": later}


def clips_of_all_lengths(processor: Processor) -> list[Prompt]:
    """A prompt with clips of which transformers would fill the short one up to the other's
    chunks, as no other prompt's; none for a family without audio.
    """
    if processor.audio_token_id is None:
        return []
    clips = clip(0.41, 8), clip(1.7, 9)
    row = Row(2, f"a<audio>b<audio>{QUESTION}", "", (), "", "test:2", audio=clips)
    return [processor.prompt(row)]


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
