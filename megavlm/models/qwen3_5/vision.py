"""Qwen3.5's vision tower, of the dense and the MoE model: Qwen3-VL's without DeepStack."""

from typing import Any

from megavlm.models.qwen3_vl import vision as qwen3_vl


class VisionTower(qwen3_vl.VisionTower):
    """Tower from patches [P, C*T*P*P] in merge order and their grids to [P / merge^2, H]."""

    def __init__(self, config: Any) -> None:
        """Build the tower. `config`: the `vision_config` of Qwen3.5, dense or MoE, in which the
        released files may name an empty list of DeepStack levels, or none.
        """
        super().__init__(config, tapped_blocks=())
