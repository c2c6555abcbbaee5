"""Checkpoints: layout-independent, complete or not there at all."""

from megavlm.checkpointing.folder import latest
from megavlm.checkpointing.load import load
from megavlm.checkpointing.save import save

__all__ = ["latest", "load", "save"]
