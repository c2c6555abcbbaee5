"""Clips of audio one by one, in each rank of a server.

SGLang 0.5.23 encodes the clips of all new requests together. It joins their log-mel frames, and its
scheduler ends with a RuntimeError if two clips have different lengths. It also fills chunks up to
the longest one, so that the features of a clip below a chunk (one second) depend on the clips of
other requests: behind its end, the second convolution sees the first one's bias. The trainer
encodes every clip alone.

SGLang loads this module as a plugin (megavlm_plugins.dist-info).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


def install() -> None:
    """Make SGLang encode every clip alone."""
    from sglang.srt.managers import mm_schedule

    embed = mm_schedule._get_chunked_prefill_embedding

    def embed_clips(encode: Any, items: Sequence[Any], *arguments: Any) -> Any:
        if items[0].is_audio():  # all are of one medium
            encode = partial(one_by_one, encode)
        return embed(encode, items, *arguments)

    mm_schedule._get_chunked_prefill_embedding = embed_clips


def one_by_one(encode: Callable[[Sequence[Any]], Any], clips: Sequence[Any]) -> list[Any]:
    """Return the features of each clip."""
    return [encode([clip]) for clip in clips]
