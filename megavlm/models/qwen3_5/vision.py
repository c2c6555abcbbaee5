"""Vision tower of Qwen3.5, dense and MoE. It is Qwen3-VL's tower without DeepStack."""

from typing import Any

from megavlm.models.qwen3_vl import vision as qwen3_vl


class VisionTower(qwen3_vl.VisionTower):
    """Tower that maps patches [P, C*T*P*P] in merge order and their grids to [P / merge^2, H]."""

    def __init__(self, hf_config: Any) -> None:
        """Build the tower from the `vision_config` of Qwen3.5, dense or MoE. In released files its
        list of DeepStack levels is empty or missing.
        """
        super().__init__(hf_config, tapped_blocks=())
