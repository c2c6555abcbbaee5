"""Tiny vision towers of every family, as transformers' module and as ours with the same weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megavlm.data.media.image_processing import Grid
from megavlm.models.common.tower import Tower
from megavlm.models.glm4v.vision import VisionTower as Glm4vTower
from megavlm.models.qwen2_5_vl.vision import VisionTower as Qwen2_5_VLTower
from megavlm.models.qwen2_vl.vision import VisionTower as Qwen2VLTower
from megavlm.models.qwen3_5.vision import VisionTower as Qwen3_5Tower
from megavlm.models.qwen3_vl.vision import VisionTower as Qwen3VLTower
from megavlm.parallel.torchvision_ops import define_torchvision_operators

# A patch has 3 x 2 x 4 x 4 numbers; a window of 32 pixels has 4 x 4 merged cells, as released.
PATCH = 96
_COMMON = {"depth": 4, "num_heads": 4, "patch_size": 4}
_QWEN3 = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 24,
    "num_position_embeddings": 49,  # 7 a side: some grids are larger, some smaller
    "deepstack_visual_indexes": [0, 2],
}
_GLM4V = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 24,
    "image_size": 28,  # 7 patches a side
}
_VISION_CONFIGS: dict[str, tuple[type[Tower], dict[str, Any]]] = {
    "qwen2_vl": (Qwen2VLTower, _COMMON | {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": 24}),
    "qwen2_5_vl": (
        Qwen2_5_VLTower,
        _COMMON
        | {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 24,
            "window_size": 32,
            "fullatt_block_indexes": [1, 3],
        },
    ),
    "qwen3_vl": (Qwen3VLTower, _QWEN3),
    "qwen3_vl_moe": (Qwen3VLTower, _QWEN3),
    "qwen3_5": (Qwen3_5Tower, _QWEN3),
    "qwen3_5_moe": (Qwen3_5Tower, _QWEN3),
    "glm4v": (Glm4vTower, _GLM4V),
    "glm4v_moe": (Glm4vTower, _GLM4V),
}
FAMILIES = list(_VISION_CONFIGS)


@dataclass
class Pair:
    ours: Tower
    theirs: nn.Module


def tower_config(family: str, **values: Any) -> Any:
    """transformers' configuration of the family with a tiny tower."""
    define_torchvision_operators()
    from transformers import AutoConfig

    sizes = _VISION_CONFIGS[family][1] | values
    return AutoConfig.for_model(family, vision_config=sizes)


def tower_class(family: str) -> type[Any]:
    return _VISION_CONFIGS[family][0]


def their_class(family: str) -> type[nn.Module]:
    define_torchvision_operators()
    from transformers.models.glm4v import modeling_glm4v as glm4v
    from transformers.models.glm4v_moe import modeling_glm4v_moe as glm4v_moe
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5_vl
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
    from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
    from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as qwen3_vl_moe

    return {
        "qwen2_vl": qwen2_vl.Qwen2VisionTransformerPretrainedModel,
        "qwen2_5_vl": qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel,
        "qwen3_vl": qwen3_vl.Qwen3VLVisionModel,
        "qwen3_vl_moe": qwen3_vl_moe.Qwen3VLMoeVisionModel,
        "qwen3_5": qwen3_5.Qwen3_5VisionModel,
        "qwen3_5_moe": qwen3_5_moe.Qwen3_5MoeVisionModel,
        "glm4v": glm4v.Glm4vVisionModel,
        "glm4v_moe": glm4v_moe.Glm4vMoeVisionModel,
    }[family]


def make_pair(family: str, *, seed: int = 0, **values: Any) -> Pair:
    """Random weights, norms and biases included, large enough that every part of the tower shows in
    the features. `values` change the vision_config.
    """
    config = tower_config(family, **values)
    vision = config.vision_config
    theirs = their_class(family)(vision)
    generator = torch.Generator().manual_seed(seed)
    for parameter in theirs.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:  # norms stay around their 1, biases around their 0
            parameter.data.add_(0.3 * noise)
        elif parameter.shape[0] == 49:  # a table of positions
            parameter.data.copy_(noise)
        else:
            parameter.data.copy_(noise / parameter[0].numel() ** 0.5)
    ours = tower_class(family)(config)
    state = theirs.state_dict()
    # Convolutions are linear layers here.
    ours.load_state_dict({name: x.flatten(1) if x.dim() > 3 else x for name, x in state.items()})
    return Pair(ours, theirs)


def make_patches(grids: Sequence[Grid], *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(t * h * w for t, h, w in grids), PATCH, generator=generator)


def their_features(theirs: nn.Module, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
    """transformers' features and DeepStack levels side by side, as ours come. GLM's model gives
    its tower each frame of a video as a grid.
    """
    if hasattr(theirs, "downsample"):
        grids = [(1, h, w) for t, h, w in grids for _ in range(t)]
    output = theirs(patches, grid_thw=torch.tensor(grids))
    levels = getattr(output, "deepstack_features", None) or []
    return torch.cat([output.pooler_output, *levels], dim=-1)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, of the largest entry."""
    assert ours.shape == theirs.shape
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max() / theirs.abs().max())
