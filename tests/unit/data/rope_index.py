"""M-RoPE positions of transformers and of SGLang, without a model's weights."""

import importlib
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

from torch import Tensor

from megavlm.parallel.torchvision_ops import define_torchvision_operators

MODELS = {
    "qwen2_vl": "Qwen2VLModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen3_vl": "Qwen3VLModel",
    "qwen3_vl_moe": "Qwen3VLMoeModel",
    "qwen3_5": "Qwen3_5Model",
    "qwen3_5_moe": "Qwen3_5MoeModel",
    "glm4v": "Glm4vModel",
    "glm4v_moe": "Glm4vMoeModel",
}


class Tokens(NamedTuple):
    """Ids of the tokens of images and videos, and of the tokens around them. GLM's videos have
    image tokens.
    """

    image: int
    video: int
    start: int
    video_start: int
    video_end: int
    audio: int
    audio_start: int

    @classmethod
    def of(cls, config: Any) -> Self:
        names = ("vision_start", "video_start", "video_end", "audio", "audio_start")
        marks = (getattr(config, f"{name}_token_id", -1) for name in names)
        return cls(config.image_token_id, config.video_token_id, *marks)


def rope_index(
    family: str,
    vision_config: dict[str, int],
    token_ids: Tensor,
    token_types: Tensor,
    image_grids: Tensor | None,
    video_grids: Tensor | None,
    seconds_per_grid: Tensor | None,
) -> tuple[Tensor, int]:
    """Positions [3, T] of token_ids [T] and the next position, by the family's get_rope_index.

    token_types [T]: 0 text, 1 image, 2 video. seconds_per_grid: only Qwen2.5-VL looks at it.
    """
    define_torchvision_operators()
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    model_class: Any = getattr(module, MODELS[family])
    model = SimpleNamespace(
        config=model_class.config_class(vision_config=vision_config),
        get_vision_position_ids=lambda *args, **kwargs: model_class.get_vision_position_ids(
            None, *args, **kwargs
        ),
    )
    positions, delta = model_class.get_rope_index(
        model,
        token_ids[None],
        token_types.int()[None],
        image_grid_thw=image_grids,
        video_grid_thw=video_grids,
        second_per_grid_ts=seconds_per_grid,
    )
    return positions[:, 0], int(delta) + len(token_ids)


def sglang_rope_index(
    family: str,
    merge_size: int,
    tokens_per_second: int,
    tokens: Tokens,
    token_ids: Tensor,
    image_grids: Tensor | None,
    video_grids: Tensor | None,
    seconds_per_grid: Tensor | None,
    audio_lengths: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Positions [3, T] of token_ids [T] and the next position, as a server computes them.
    audio_lengths: Numbers of log-mel frames of clips.
    """
    define_torchvision_operators()
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    if family.startswith("glm"):
        config = SimpleNamespace(
            image_token_id=tokens.image,
            video_start_token_id=tokens.video_start,
            video_end_token_id=tokens.video_end,
            vision_config=SimpleNamespace(spatial_merge_size=merge_size),
        )
        positions, delta = MRotaryEmbedding.get_rope_index_glm4v(
            token_ids[None], config, image_grids, video_grids, None
        )
        return positions[:, 0], int(delta) + len(token_ids)
    own = {}
    if family == "qwen3_omni_moe":
        own = {
            "position_id_per_seconds": tokens_per_second,
            "audio_token_id": tokens.audio,
            "audio_start_token_id": tokens.audio_start,
            "audio_seqlens": audio_lengths,
        }
    positions, delta = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=merge_size,
        image_token_id=tokens.image,
        video_token_id=tokens.video,
        vision_start_token_id=tokens.start,
        model_type=family,
        tokens_per_second=tokens_per_second,
        input_ids=token_ids[None],
        image_grid_thw=image_grids,
        video_grid_thw=video_grids,
        # Of others, SGLang's processors give none.
        second_per_grid_ts=seconds_per_grid if own or family == "qwen2_5_vl" else None,
        **own,
    )
    return positions[:, 0].long(), int(delta) + len(token_ids)
