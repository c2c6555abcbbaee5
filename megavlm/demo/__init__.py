"""Tiny models, drawn images, and the demo that trains on them."""

FAMILY = "qwen2_5_vl"  # default family of a tiny model
