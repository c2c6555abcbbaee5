"""Reinforcement learning for vision-language models on megatron-core and SGLang."""
