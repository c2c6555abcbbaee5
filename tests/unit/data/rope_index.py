"""M-RoPE positions of transformers and of SGLang, without a model's weights."""

import importlib
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from megavlm.parallel.torchvision_ops import define_torchvision_operators

MODELS = {
    "qwen2_vl": "Qwen2VLModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen3_vl": "Qwen3VLModel",
    "qwen3_vl_moe": "Qwen3VLMoeModel",
    "qwen3_5": "Qwen3_5Model",
    "qwen3_5_moe": "Qwen3_5MoeModel",
}


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
    tokens: tuple[int, int, int],
    token_ids: Tensor,
    image_grids: Tensor | None,
    video_grids: Tensor | None,
    seconds_per_grid: Tensor | None,
) -> tuple[Tensor, int]:
    """Positions [3, T] of token_ids [T] and the next position, as a server computes them.

    tokens: ids of an image, a video, and the start of either.
    """
    define_torchvision_operators()
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    image, video, start = tokens
    positions, delta = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=merge_size,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        model_type=family,
        tokens_per_second=tokens_per_second,
        input_ids=token_ids[None],
        image_grid_thw=image_grids,
        video_grid_thw=video_grids,
        # Of others, SGLang's processors give none.
        second_per_grid_ts=seconds_per_grid if family == "qwen2_5_vl" else None,
    )
    return positions[:, 0], int(delta) + len(token_ids)
