"""Checkpoints between HuggingFace folders and megatron-core."""
