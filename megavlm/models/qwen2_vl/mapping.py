"""Mapping of Qwen2-VL between hub tensors and this model's tensors."""

from typing import Any

from megavlm.models.common.mapping import Entry
from megavlm.models.common.mapping_parts import tower
from megavlm.models.qwen2_5_vl.mapping import text_entries
from megavlm.models.qwen2_vl.vision import VisionTower


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor. `config` is transformers' Qwen2VLConfig."""
    return [*tower("visual", VisionTower, config), *text_entries(config)]
