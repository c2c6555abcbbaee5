"""Compare the vision towers of SGLang's models under its own attention and under ours: run in a
process that has sglang_cpu on its path. Prints a line of JSON with the largest difference for each
family, and the largest magnitude.
"""

import json
import os
import sys
from typing import Any

import torch
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.attention import vision
from sglang.srt.layers.attention.vision import VisionAttention
from sglang.srt.models.glm4v import Glm4vVisionModel
from sglang.srt.models.internvl import InternVisionModel
from sglang.srt.models.minicpmv import MiniCPMV_VisionTransformer
from sglang.srt.models.qwen2_5_vl import Qwen2_5_VisionTransformer
from sglang.srt.models.qwen2_vl import Qwen2VisionTransformer
from sglang.srt.models.qwen3_omni_moe import Qwen3OmniMoeVisionEncoder
from sglang.srt.models.qwen3_vl import Qwen3VLMoeVisionModel
from sglang.srt.runtime_context import get_context, get_parallel

sys.path.append(sys.argv[1])  # this project's folder

from megavlm.families import FAMILIES
from megavlm.model_config import trained_config
from megavlm.models.common.tiny import TinySizes, tiny_config, tiny_family

TOWERS = {
    "qwen2_vl": Qwen2VisionTransformer,
    "qwen2_5_vl": Qwen2_5_VisionTransformer,
    "qwen3_vl": Qwen3VLMoeVisionModel,
    "qwen3_vl_moe": Qwen3VLMoeVisionModel,
    "qwen3_5": Qwen3VLMoeVisionModel,
    "qwen3_5_moe": Qwen3VLMoeVisionModel,
    "glm4v": Glm4vVisionModel,
    "glm4v_moe": Glm4vVisionModel,
    "qwen3_omni_moe": Qwen3OmniMoeVisionEncoder,
}
GRIDS = [[1, 4, 4], [1, 20, 12], [1, 20, 12], [1, 2, 30], [2, 8, 6]]


def difference(family: str) -> tuple[float, float]:
    """Return the largest difference and the largest magnitude of a tower's features."""
    sizes = TinySizes(full_attention_blocks=[1] if family == "qwen2_5_vl" else None)
    ids = {token: index for index, token in enumerate(tiny_family(family).tokens.special)}
    config = trained_config(tiny_config(family, sizes, 64, ids)).vision_config
    torch.manual_seed(0)
    config.num_dummy_heads = 0  # SGLang's models set it before they build the tower
    tower, inputs = tower_of(family, config)
    for parameter in tower.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = [part.qkv_backend for part in tower.modules() if isinstance(part, VisionAttention)]
    assert ours and all(type(part) is not vision.VisionSdpaAttention for part in ours)
    with torch.no_grad():
        found = tower(**inputs)
        for backend in ours:
            backend.__class__ = vision.VisionSdpaAttention
        expected = tower(**inputs)
    found, expected = (x if isinstance(x, torch.Tensor) else x[0] for x in (found, expected))
    return (found - expected).abs().max().item(), expected.abs().max().item()


def tower_of(family: str, config: Any) -> tuple[Any, dict[str, Any]]:
    """Return a tower, and its inputs for images of `GRIDS`, or of equal tiles."""
    if family == "internvl":
        values = {"text_config": {"rope_theta": 1.0}}
        for name, value in FAMILIES[family].served_values(values)["vision_config"].items():
            setattr(config, name, value)
        return InternVisionModel(config), {"pixel_values": torch.randn(3, 3, *config.image_size)}
    if family == "minicpmv4_6":
        sizes = torch.tensor([[h, w] for _, h, w in GRIDS if h % 4 == w % 4 == 0])
        lengths = sizes.prod(1)
        longest = int(lengths.max())
        return MiniCPMV_VisionTransformer(config), {
            "pixel_values": torch.randn(
                len(sizes), 3, config.patch_size, longest * config.patch_size
            ),
            "patch_attention_mask": (torch.arange(longest) < lengths[:, None])[:, None],
            "target_sizes": sizes,
        }
    tower = TOWERS[family](config, **({} if family.startswith("glm") else {"norm_eps": 1e-6}))
    frames = [[1, *size] for count, *size in GRIDS for _ in range(count)]
    # SGLang gives GLM's towers each frame of a video by itself.
    grids = torch.tensor(frames if family.startswith("glm") else GRIDS)
    pixels = torch.randn(int(grids.prod(1).sum()), 3 * 2 * config.patch_size**2)
    return tower, {"x": pixels, "grid_thw": grids}


os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
ranks = {"attn_tp_rank": 0, "tp_rank": 0}
with get_context().override_server_args(device="cpu"), get_parallel().override(**ranks):
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
    initialize_model_parallel()
    print(json.dumps({family: difference(family) for family in FAMILIES}))
