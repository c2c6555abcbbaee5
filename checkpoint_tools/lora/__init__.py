"""Adapters: PEFT folders, and the adapters of a step."""
