"""Prompts for a real server, and what transformers says of the responses."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


TIE = 1e-5  # logits of two experts that are closer may be in another order for the server


def largest_difference(
    reference: Reference,
    prompt: Prompt,
    responses: Sequence[Response],
    sampling_params: SamplingParams,
) -> float:
    """Return the largest difference between the server's log-probs and transformers' of the same
    tokens. Tokens from a near tie of two experts on are left out: that is a response in some
    thousands.
    """
    found = []
    for response in responses:
        theirs, num_certain = expected(reference, prompt, response, sampling_params)
        found.append((torch.tensor(response.logprobs) - theirs).abs()[:num_certain])
    compared = torch.cat(found)
    assert 3 * len(compared) >= sum(len(response.token_ids) for response in responses)
    return float(compared.max())


@torch.no_grad()
def expected(
    reference: Reference, prompt: Prompt, response: Response, sampling_params: SamplingParams
) -> tuple[torch.Tensor, int]:
    """Return transformers' log-probs of a response, and how many come before a near tie."""
    with routing_gaps(reference) as gaps:
        scores = reference.scores(prompt, response.token_ids.tolist())
    scores.logits[:, list(sampling_params.suppressed_ids)] = -torch.inf
    logprobs = scores.logprobs(response.token_ids.tolist(), sampling_params.temperature or 1.0)
    if not gaps:
        return logprobs, len(logprobs)
    # The token before predicts the first one, and the last one predicts none.
    clear = (torch.stack(gaps).amin(0) > TIE).cumprod(0)[len(prompt.token_ids) - 1 : -1]
    return logprobs, int(clear.sum())


@contextmanager
def routing_gaps(reference: Reference) -> Iterator[list[torch.Tensor]]:
    """Yield a list that gets, of each router that computes, by how much each token's last chosen
    expert is ahead of the next one [T].
    """
    top_k = getattr(reference.config.text_config, "num_experts_per_tok", 0)
    gaps: list[torch.Tensor] = []

    def note(router: torch.nn.Module, given: tuple[torch.Tensor, ...], _: object) -> None:
        logits = given[0].flatten(0, -2) @ router.weight.t()
        if (bias := getattr(router, "e_score_correction_bias", None)) is not None:
            logits = logits.sigmoid() + bias
        ordered = logits.sort(-1, descending=True).values
        gaps.append(ordered[:, top_k - 1] - ordered[:, top_k])

    routers = [x for name, x in reference.model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(note) for router in routers]
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()
