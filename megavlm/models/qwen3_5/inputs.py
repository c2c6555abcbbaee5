"""Inputs of Qwen3.5. They are the same as Qwen3-VL's."""

from megavlm.models.qwen3_vl.inputs import images, model_inputs, positions, videos

__all__ = ["images", "model_inputs", "positions", "videos"]
