"""Conversion of checkpoints between HuggingFace folders and megatron-core."""
