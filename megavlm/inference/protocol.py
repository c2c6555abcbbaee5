"""SGLang's HTTP protocol: pure functions that build request bodies and parse responses.

Tokens in, tokens out: prompts are sent as token ids, with one image token per image that SGLang
expands itself. Images are already resized. They are sent as bytes, or as paths of in-memory files
on this machine, but never as a URL, so that a server downloads nothing. A prompt with videos is
sent with all its vision tokens, its positions and the frames of its images and videos, for
server_support/megavlm_videos.py.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import numpy.typing as npt
import orjson

from megavlm.inference.errors import RolloutRequestError
from megavlm.inference.routes import RouteShape
from megavlm.numbers import LARGEST

if TYPE_CHECKING:
    from megavlm.data.media.image_processing import ProcessedImage
    from megavlm.data.processor import Prompt

# Added to a suppressed token's logit, so that its probability is exactly 0 in every float dtype.
SUPPRESSED_BIAS = -1e9
ABORT = "abort"
ADAPTER_PREFIX = "megavlm-"
# Exceptions of parsing an answer of another form. OverflowError: JSON's 1e999 is read as infinity,
# and int() of it overflows.
MALFORMED = (KeyError, TypeError, ValueError, OverflowError)
Array = npt.NDArray[Any]
Body = bytes | memoryview  # a part of a request's body
MEDIA = "megavlm:"  # begin of a video's text in a request, see server_support/megavlm_videos.py


@dataclass(frozen=True)
class Encoder:
    """Functions that return an image, and the content of `processed_media`, as a JSON string."""

    image: Callable[["ProcessedImage"], Body]
    media: Callable[[Sequence[Body]], Body]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy.

    suppressed_ids: Tokens that are never sampled; log-probs refer to the distribution without them.
    stop_ids: Tokens at which servers end a response, from the model folder. adapter: Name of the
    LoRA adapter to use; None uses only the base weights. vocab_size: Vocabulary size of the model;
    a response with a larger token id is malformed. cache_key: Servers reuse prefixes only among
    requests with the same key; None shares them with all requests without a key. routes: Sizes of
    the routes that servers return with the tokens; None asks for none.
    """

    temperature: float
    max_new_tokens: int
    suppressed_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    adapter: str | None = None
    vocab_size: int = 2**31
    cache_key: str | None = None
    routes: RouteShape | None = None


def adapter_name(version: int | str) -> str:
    """Return the adapter name that requests use for a weight version."""
    return f"{ADAPTER_PREFIX}{version}"


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a response, sampled with weight version `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Response:
    """One sampled response of T tokens, including its end-of-turn token if it has one.

    logprobs: Natural log-prob of each token at the sampling temperature (1 if greedy), before
    top-p, under the weights that sampled it. finish: "stop", "length", or "abort" if the response
    can be continued. weight_version: Version of the weights that finished it. spans: Weight
    versions of all tokens, in order. routes: Experts of the R tokens before the last one, which
    begin in the prompt, as they were when the tokens after them were sampled. None if the server
    returned none. teacher_logprobs: Log-prob of each token by a teacher, at temperature 1; None if
    it gave none. drafts: Drafts that the server accepted, and the passes in which it verified some;
    (0, 0) without speculative decoding.
    """

    token_ids: npt.NDArray[np.int32]  # [T]
    logprobs: npt.NDArray[np.float32]  # [T]
    finish: str
    weight_version: str
    spans: tuple[VersionSpan, ...] = ()
    routes: npt.NDArray[Any] | None = None  # [R, layers, top-k] uint8 or int16
    teacher_logprobs: npt.NDArray[np.float32] | None = None  # [T]
    drafts: tuple[int, int] = (0, 0)

    @property
    def is_complete(self) -> bool:
        return self.finish != ABORT

    def then(self, rest: "Response") -> "Response":
        """Return the response joined with its continuation."""
        offset = len(self.token_ids)
        spans = list(self.spans)
        for span in rest.spans:
            start, end = span.start + offset, span.end + offset
            if spans and spans[-1].version == span.version:
                spans[-1] = VersionSpan(span.version, spans[-1].start, end)
            else:
                spans.append(VersionSpan(span.version, start, end))
        return Response(
            np.concatenate([self.token_ids, rest.token_ids]),
            np.concatenate([self.logprobs, rest.logprobs]),
            rest.finish,
            rest.weight_version,
            tuple(spans),
            self._routes_then(rest),
            drafts=(self.drafts[0] + rest.drafts[0], self.drafts[1] + rest.drafts[1]),
        )

    def _routes_then(self, rest: "Response") -> Array | None:
        """Return the routes joined with those of a continuation. Where some between the two are
        missing, only the continuation's are kept.
        """
        if not len(rest.token_ids):
            return self.routes
        if self.routes is None or rest.routes is None:
            return rest.routes
        return np.concatenate([self.routes, rest.routes])

    def first_unrouted(self, num_prompt_tokens: int) -> int:
        """Return the number of tokens, the prompt's included, before those whose routes are not
        known yet.
        """
        if self.routes is None:
            return 0
        return num_prompt_tokens + max(len(self.token_ids) - 1, 0)


def is_complete(responses: Sequence[Response]) -> bool:
    """Return True if a group has all its responses and none is aborted."""
    return bool(responses) and all(response.is_complete for response in responses)


def _data_url(image: "ProcessedImage") -> Body:
    return image.request_text.numpy().data


def _base64(parts: Sequence[Body]) -> Body:
    return b'"%s%s"' % (MEDIA.encode(), base64.b64encode(b"".join(parts)))


IN_BODY = Encoder(_data_url, _base64)


def generate_body(
    prompts: Sequence["Prompt"],
    n: int,
    sampling: Sampling,
    encoder: Encoder = IN_BODY,
    first_routed: int = 0,
) -> list[Body]:
    """Return the JSON body of a /generate request for n responses to each prompt, in parts.
    first_routed: The first token whose routes are returned, if any are.
    """
    body: dict[str, Any] = {
        "input_ids": [list(prompt.request_ids) for prompt in prompts],
        "sampling_params": {"n": n, **_parameters(sampling, sampling.max_new_tokens)},
        "return_logprob": True,
    }
    body |= _names(sampling) | _route_request(sampling, first_routed)
    media: dict[str, list[Body]] = {}
    if any(prompt.images and not prompt.has_videos for prompt in prompts):
        media["image_data"] = _listed([_listed(_texts(prompt, encoder)) for prompt in prompts])
    if any(prompt.has_videos for prompt in prompts):
        media["video_data"] = _listed([_listed(_media(prompt, encoder)) for prompt in prompts])
    return _with_media(body, media)


def continue_body(
    prompt: "Prompt", begun: Sequence[Response], sampling: Sampling, encoder: Encoder = IN_BODY
) -> list[Body]:
    """Return the JSON body of a /generate request that continues a prompt's aborted responses, in
    parts.
    """
    body: dict[str, Any] = {
        "input_ids": [[*prompt.request_ids, *response.token_ids.tolist()] for response in begun],
        "sampling_params": [
            {"n": 1, **_parameters(sampling, sampling.max_new_tokens - len(response.token_ids))}
            for response in begun
        ],
        "return_logprob": True,
    }
    body |= _names(sampling) | _route_request(sampling, _first_unrouted(prompt, begun))
    return _with_media(body, _shared_media(prompt, len(begun), encoder))


def score_body(
    prompt: "Prompt", responses: Sequence[Response], encoder: Encoder = IN_BODY
) -> list[Body]:
    """Return the JSON body of a /generate request for log-probs of responses to a prompt, in
    parts.
    """
    body = {
        "input_ids": [
            [*prompt.request_ids, *response.token_ids.tolist()] for response in responses
        ],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        # The server counts all tokens of images. The first entry is that of this token, the
        # prompt's last, and the second that of the response's first token.
        "logprob_start_len": len(prompt.token_ids) - 1,
    }
    return _with_media(body, _shared_media(prompt, len(responses), encoder))


def parse_scores(
    answer: Any, prompt: "Prompt", responses: Sequence[Response]
) -> list[npt.NDArray[np.float32]]:
    """Return the log-probs of each response in an answer to `score_body`.

    Raises MALFORMED for an answer of another form, and RolloutRequestError if the server counts
    other prompt tokens.
    """
    found = []
    for item, response in zip(_items(answer, len(responses)), responses, strict=True):
        meta, num_tokens = item["meta_info"], len(response.token_ids)
        counted, expected = meta["prompt_tokens"], len(prompt.token_ids) + num_tokens
        if counted != expected:
            raise RolloutRequestError(
                f"{prompt.row.source}: the server counts {counted} tokens of prompt and response "
                f"and the trainer {expected}; both must have images of the same sizes"
            )
        tokens, logprobs = _arrays(meta["input_token_logprobs"][1:])
        if not np.array_equal(tokens, response.token_ids):
            raise ValueError("log-probs of other tokens")
        if not (np.abs(logprobs) <= LARGEST).all():  # NaN is not either
            raise ValueError("log-probs that are not finite")
        found.append(logprobs.astype(np.float32))
    return found


def _shared_media(prompt: "Prompt", count: int, encoder: Encoder) -> dict[str, Sequence[Body]]:
    """Return the media of a request with `count` times the same prompt. A single image, and the
    media of a prompt with videos, are included once; SGLang accepts several images only as a list
    each time.
    """
    if prompt.has_videos:
        return {"video_data": _media(prompt, encoder)[0]}
    if not prompt.images:
        return {}
    texts = _texts(prompt, encoder)
    return {"image_data": texts[0] if len(texts) == 1 else _listed([_listed(texts)] * count)}


def _names(sampling: Sampling) -> dict[str, str]:
    names = {"lora_path": sampling.adapter, "extra_key": sampling.cache_key}
    return {key: name for key, name in names.items() if name is not None}


def _route_request(sampling: Sampling, first: int) -> dict[str, Any]:
    if sampling.routes is None:
        return {}
    return {"return_routed_experts": True, "routed_experts_start_len": first}


def _first_unrouted(prompt: "Prompt", begun: Sequence[Response]) -> int:
    """Return the first token that has no routes yet in one of the responses."""
    return min(response.first_unrouted(len(prompt.token_ids)) for response in begun)


def _parameters(sampling: Sampling, max_new_tokens: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": 1.0,  # SGLang would take the model's own
        "max_new_tokens": max_new_tokens,
    }
    if sampling.suppressed_ids:
        parameters["logit_bias"] = {
            str(token): SUPPRESSED_BIAS for token in sampling.suppressed_ids
        }
    return parameters


def bearer(key: str | None) -> dict[str, str]:
    """Return the Authorization header for `key`; empty without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def json_object(reply: httpx.Response) -> dict[str, Any]:
    """Return the JSON object in a reply. Raises ValueError if the reply is anything else."""
    answer = reply.json()
    if not isinstance(answer, dict):
        raise ValueError(f"{str(answer)[:100]!r} is not a JSON object")
    return answer


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
    if prompt.has_videos:
        return []
    return [[encoder.image(image)] for image in prompt.images]


def _media(prompt: "Prompt", encoder: Encoder) -> list[list[Body]]:
    return [[encoder.media(processed_media(prompt))]] if prompt.has_videos else []


def processed_media(prompt: "Prompt") -> list[Body]:
    """Return the images and videos of a prompt for server_support/megavlm_videos.py: the length of
    a header, the header, the positions, and the frames of each image and video.
    """
    header = {
        "media": [
            {
                "is_video": image.is_video,
                "shape": [*image.pixels.shape[:3]],
                "hash": _cache_key(image),
            }
            for image in prompt.images
        ],
        "format": asdict(prompt.images[0].format),
        "num_tokens": len(prompt.token_ids),
        "next_position": prompt.next_position,
    }
    text = orjson.dumps(header)
    tensors = [prompt.positions.int().contiguous(), *(image.content for image in prompt.images)]
    contents = [tensor.numpy().data.cast("B") for tensor in tensors]
    return [len(text).to_bytes(8, "little"), text, *contents]


def _cache_key(image: "ProcessedImage") -> int:
    """Return the number by which a server caches an image's or a video's features and prefixes. It
    includes the times of a video, because its tokens' positions may depend on them.
    """
    times = getattr(image, "times", ())
    digest = hashlib.sha256(f"{image.key} {image.grid} {times}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def parse_generate(
    answer: Any,
    prompts: Sequence["Prompt"],
    n: int,
    sampling: Sampling,
    first_routed: int = 0,
) -> list[list[Response]]:
    """Return the n responses of each prompt, in the order of the request. Of a prompt's routes, the
    first response has all, and the others have only its last token's.

    Raises one of MALFORMED if the answer does not have SGLang's form, and RolloutRequestError if
    the server counts a different number of prompt tokens than the trainer. Their image processing
    differs then, and the log-probs would belong to another prompt.
    """
    items = _items(answer, len(prompts) * n)
    return [
        [
            _response(
                item["meta_info"],
                prompt,
                0,
                sampling,
                (first_routed, len(prompt.token_ids) - 1 if number else first_routed),
            )
            for number, item in enumerate(items[index * n : (index + 1) * n])
        ]
        for index, prompt in enumerate(prompts)
    ]


def parse_continue(
    answer: Any, prompt: "Prompt", begun: Sequence[Response], sampling: Sampling
) -> list[Response]:
    """Return the responses of `begun`, joined with their continuations. Raises as `parse_generate`
    does.
    """
    items, first = _items(answer, len(begun)), _first_unrouted(prompt, begun)
    return [
        response.then(
            _response(
                item["meta_info"],
                prompt,
                len(response.token_ids),
                sampling,
                (first, response.first_unrouted(len(prompt.token_ids))),
            )
        )
        for item, response in zip(items, begun, strict=True)
    ]


def _items(answer: Any, count: int) -> list[Any]:
    items = answer if isinstance(answer, list) else [answer]
    if len(items) != count:
        raise ValueError(f"{len(items)} responses instead of {count}")
    return items


def _response(
    meta: Mapping[str, Any],
    prompt: "Prompt",
    num_before: int,
    sampling: Sampling,
    routed: tuple[int, int],
) -> Response:
    """Return a response, or its continuation after num_before tokens. routed: The first token whose
    routes are in the answer, and the first whose routes are kept.
    """
    tokens, logprobs = _arrays(meta["output_token_logprobs"])
    finish = _finish(meta["finish_reason"], tokens, num_before, sampling)
    if not len(tokens) and finish != ABORT:
        raise ValueError(f"a response without a token ended with {finish}")
    if finish != ABORT:  # the counts of an aborted response may lag
        counted = meta.get("completion_tokens", len(tokens))
        if counted != len(tokens) or num_before + len(tokens) > sampling.max_new_tokens:
            raise ValueError(
                f"a response of {counted} tokens has {len(tokens)} log-probs, but may have "
                f"{sampling.max_new_tokens - num_before}"
            )
    if not (np.abs(logprobs) <= LARGEST).all():  # NaN is not either
        raise ValueError("a response has log-probs that are not finite")
    if not ((tokens >= 0) & (tokens < sampling.vocab_size)).all():
        raise ValueError(f"a response has a token beyond the {sampling.vocab_size} of the model")
    if len(tokens):  # a response that was aborted in the queue has no counts yet
        counted, expected = meta["prompt_tokens"], len(prompt.token_ids) + num_before
        if counted != expected:
            raise RolloutRequestError(
                f"{prompt.row.source}: the rollout server counts {counted} prompt tokens and "
                f"the trainer {expected}; both must use the same model folder and image sizes"
            )
    version = str(meta["weight_version"])
    spans = meta.get("weight_versions") or [{"version": version, "start": 0, "end": len(tokens)}]
    return Response(
        token_ids=tokens.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        finish=finish,
        weight_version=version,
        spans=tuple(
            VersionSpan(str(span["version"]), int(span["start"]), int(span["end"]))
            for span in spans
            if span["end"] > span["start"]
        ),
        routes=_routes(meta, len(prompt.token_ids) + num_before, len(tokens), sampling, routed),
        drafts=(meta.get("spec_num_correct_drafts", 0), meta.get("spec_verify_ct", 0)),
    )


def _routes(
    meta: Mapping[str, Any],
    num_before: int,
    num_tokens: int,
    sampling: Sampling,
    routed: tuple[int, int],
) -> Array | None:
    """Return the routes of a response's tokens before its last one; None if none were asked for,
    or if a server had dropped its cache of a response before it was aborted. num_before: Tokens
    before those of the answer.
    """
    shape, text = sampling.routes, meta.get("routed_experts")
    if shape is None or not num_tokens:
        return None
    aborted = str(meta["finish_reason"]["type"]) == ABORT
    if text is None and not aborted:
        raise RolloutRequestError(
            "algorithm.routing_replay=true needs the routed experts, but a rollout server returns "
            "none: start it with --enable-return-routed-experts, or set routing_replay=false"
        )
    first, kept = routed
    wanted = num_before + num_tokens - 1 - first
    routes = None if text is None else shape.decode(text)[:wanted]
    if routes is None or len(routes) < wanted:
        if aborted:
            return None
        raise ValueError(f"{wanted} tokens have routes for {0 if routes is None else len(routes)}")
    return routes[kept - first :].astype(shape.dtype)


def _arrays(
    items: Sequence[Sequence[Any]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the tokens and their log-probs, of items that begin with log-prob and token."""
    logprobs, tokens, *_ = zip(*items, strict=True) if items else ((), ())
    return (
        np.fromiter(tokens, np.int64, len(tokens)),
        np.fromiter(logprobs, np.float64, len(logprobs)),
    )


def _finish(
    reason: Mapping[str, Any], tokens: npt.NDArray[np.int64], num_before: int, sampling: Sampling
) -> str:
    # On an abort the running step still ends, and its token may happen to finish the response.
    finish = str(reason["type"])
    if finish == ABORT and len(tokens):
        if tokens[-1] in sampling.stop_ids:
            return "stop"
        if num_before + len(tokens) == sampling.max_new_tokens:
            return "length"
    if finish not in ("stop", "length", ABORT):
        raise ValueError(f"a response ended with {reason}")
    return finish
