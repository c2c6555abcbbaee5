"""Tiny models, drawn images, and the demo that trains on them."""

FAMILY = "qwen2_5_vl"  # of a tiny model, unless another is named
