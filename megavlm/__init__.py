"""Reinforcement learning for vision-language models on megatron-core and SGLang."""

__version__ = "0.1.0"
