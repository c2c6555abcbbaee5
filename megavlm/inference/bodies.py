"""Bodies of requests to SGLang: pure functions.

Tokens in, tokens out: prompts are sent as token ids, with one image token per image that SGLang
expands itself. Images are already resized. They are sent as bytes, or as paths of in-memory files
on this machine, but never as a URL, so that a server downloads nothing. A prompt with videos, or
with images that a server would cut otherwise, is sent with all its vision tokens, its positions and
the frames of its images and videos, for server_support/megavlm_videos.py.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import orjson

from megavlm.inference.protocol import Response, SamplingParams, first_unrouted

if TYPE_CHECKING:
    from megavlm.data.media.image_processing import ProcessedImage
    from megavlm.data.processor import Prompt

# Added to a suppressed token's logit, so that its probability is exactly 0 in every float dtype.
SUPPRESSED_BIAS = -1e9
Body = bytes | memoryview  # a part of a request's body
MEDIA = "megavlm:"  # begin of a video's text in a request, see server_support/megavlm_videos.py


@dataclass(frozen=True)
class Encoder:
    """Functions that return an image, and the content of `processed_media`, as a JSON string."""

    image: Callable[["ProcessedImage"], Body]
    media: Callable[[Sequence[Body]], Body]


def _data_url(image: "ProcessedImage") -> Body:
    return image.request_text.numpy().data


def _base64(parts: Sequence[Body]) -> Body:
    return b'"%s%s"' % (MEDIA.encode(), base64.b64encode(b"".join(parts)))


IN_BODY = Encoder(_data_url, _base64)


def generate_body(
    prompts: Sequence["Prompt"],
    n: int,
    sampling_params: SamplingParams,
    encoder: Encoder = IN_BODY,
    first_routed: int = 0,
) -> list[Body]:
    """Return the JSON body of a /generate request for n responses to each prompt, in parts.
    first_routed: The first token whose routed experts are returned, if any are.
    """
    if sampling_params.returns_kept:
        # SGLang 0.5.23 computes the prompt of several responses by a request without tokens, and
        # fails because it kept none.
        prompts, n = [prompt for prompt in prompts for _ in range(n)], 1
    body: dict[str, Any] = {
        "input_ids": [list(prompt.request_ids) for prompt in prompts],
        "sampling_params": {"n": n, **_parameters(sampling_params, sampling_params.max_new_tokens)},
        "return_logprob": True,
    }
    body |= _names(sampling_params) | _beside_tokens(sampling_params, first_routed)
    media: dict[str, list[Body]] = {}
    if any(prompt.images and not prompt.sends_frames for prompt in prompts):
        media["image_data"] = _listed([_listed(_texts(prompt, encoder)) for prompt in prompts])
    if any(prompt.sends_frames for prompt in prompts):
        media["video_data"] = _listed([_listed(_media(prompt, encoder)) for prompt in prompts])
    return _with_media(body, media)


def continue_body(
    prompt: "Prompt",
    begun: Sequence[Response],
    sampling_params: SamplingParams,
    encoder: Encoder = IN_BODY,
) -> list[Body]:
    """Return the JSON body of a /generate request that continues a prompt's aborted responses, in
    parts.
    """
    body: dict[str, Any] = {
        "input_ids": [[*prompt.request_ids, *response.token_ids.tolist()] for response in begun],
        "sampling_params": [
            {
                "n": 1,
                **_parameters(
                    sampling_params, sampling_params.max_new_tokens - len(response.token_ids)
                ),
            }
            for response in begun
        ],
        "return_logprob": True,
    }
    body |= _names(sampling_params) | _beside_tokens(sampling_params, first_unrouted(prompt, begun))
    return _with_media(body, _shared_media(prompt, len(begun), encoder))


def score_body(
    prompt: "Prompt",
    responses: Sequence[Response],
    num_prompt_tokens: int,
    sampling_params: SamplingParams | None = None,
    encoder: Encoder = IN_BODY,
    *,
    top_k: int = 0,
) -> list[Body]:
    """Return the JSON body of a /generate request for log-probs of responses to a prompt, in
    parts.

    num_prompt_tokens: Number of the prompt's tokens as the server expands its images.
    sampling_params: Give the names of the adapter and the cache that the server uses. top_k:
    Likeliest tokens that are returned at each position.
    """
    body: dict[str, Any] = {
        "input_ids": [
            [*prompt.request_ids, *response.token_ids.tolist()] for response in responses
        ],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        # The server counts all tokens of images. The first entry is that of this token, the
        # prompt's last, and the second that of the response's first token.
        "logprob_start_len": num_prompt_tokens - 1,
    }
    if top_k:
        # Arrays in base64 have a third of the bytes of numbers in JSON.
        body |= {
            "top_logprobs_num": top_k,
            "return_flat_raw_top_logprobs": True,
            "return_flat_raw_top_logprobs_b64": True,
        }
    if sampling_params is not None:
        body |= _names(sampling_params)
    return _with_media(body, _shared_media(prompt, len(responses), encoder))


def count_body(prompt: "Prompt") -> list[Body]:
    """Return the JSON body of a /generate request for only the number of a prompt's tokens, in
    parts.
    """
    body = {"input_ids": [list(prompt.request_ids)], "sampling_params": {"max_new_tokens": 0}}
    return _with_media(body, _shared_media(prompt, 1, IN_BODY))


def _shared_media(prompt: "Prompt", count: int, encoder: Encoder) -> dict[str, Sequence[Body]]:
    """Return the media of a request with `count` times the same prompt. A single image, and the
    media of a prompt with frames, are included once; SGLang accepts several images only as a list
    each time.
    """
    if prompt.sends_frames:
        return {"video_data": _media(prompt, encoder)[0]}
    if not prompt.images:
        return {}
    texts = _texts(prompt, encoder)
    return {"image_data": texts[0] if len(texts) == 1 else _listed([_listed(texts)] * count)}


def _names(sampling_params: SamplingParams) -> dict[str, str]:
    names = {"lora_path": sampling_params.adapter, "extra_key": sampling_params.cache_key}
    return {key: name for key, name in names.items() if name is not None}


def _beside_tokens(sampling_params: SamplingParams, first: int) -> dict[str, Any]:
    """Return the keys that ask for more about tokens. first: First token with routed experts."""
    asked: dict[str, Any] = {}
    if sampling_params.routed_experts is not None:
        asked |= {"return_routed_experts": True, "routed_experts_start_len": first}
    if sampling_params.returns_kept:
        asked["return_sampling_mask"] = True
    return asked


def _parameters(sampling_params: SamplingParams, max_new_tokens: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "temperature": sampling_params.temperature,
        "top_p": sampling_params.top_p,  # SGLang would take the model's own
        "top_k": sampling_params.top_k or -1,
        "max_new_tokens": max_new_tokens,
    }
    if sampling_params.suppressed_ids:
        parameters["logit_bias"] = {
            str(token): SUPPRESSED_BIAS for token in sampling_params.suppressed_ids
        }
    return parameters


def _with_media(body: Mapping[str, Any], media: Mapping[str, Sequence[Body]]) -> list[Body]:
    """Return a body's JSON with more keys appended. Their long texts are not copied."""
    parts: list[Body] = [orjson.dumps(body)[:-1]]
    for key, values in media.items():
        parts += [f', "{key}": '.encode(), *values]
    return [*parts, b"}"]


def _listed(items: Sequence[Sequence[Body]]) -> list[Body]:
    """Return a JSON list of items, in parts."""
    parts: list[Body] = []
    for item in items:
        parts += [b", " if parts else b"[", *item]
    return [*parts, b"]"] if parts else [b"[]"]


def _texts(prompt: "Prompt", encoder: Encoder) -> list[list[Body]]:
    if prompt.sends_frames:
        return []
    return [[encoder.image(image)] for image in prompt.images]


def _media(prompt: "Prompt", encoder: Encoder) -> list[list[Body]]:
    return [[encoder.media(processed_media(prompt))]] if prompt.sends_frames else []


def processed_media(prompt: "Prompt") -> list[Body]:
    """Return the images and videos of a prompt for server_support/megavlm_videos.py: the length of
    a header, the header, the positions, and the frames of each image and video.
    """
    header = {
        "media": [
            {"medium": image.medium, "shape": shape, "hash": _cache_key(image, part)}
            for image in prompt.images
            for part, shape in enumerate(image.shapes)
        ],
        "format": asdict(prompt.images[0].format),
        "num_tokens": len(prompt.token_ids),
        "next_position": prompt.next_position,
    }
    text = orjson.dumps(header)
    frames = [part for image in prompt.images for part in image.contents]
    tensors = [prompt.positions.int().contiguous(), *frames]
    contents = [tensor.numpy().data.cast("B") for tensor in tensors]
    return [len(text).to_bytes(8, "little"), text, *contents]


def _cache_key(image: "ProcessedImage", part: int) -> int:
    """Return the number by which a server caches the features and prefixes of an image or a video,
    or of its overview or its slices (`part`). It includes the times of a video, because its tokens'
    positions may depend on them.
    """
    times = getattr(image, "times", ())
    digest = hashlib.sha256(f"{image.key} {image.grids[part]} {part} {times}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
