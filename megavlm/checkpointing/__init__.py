"""Checkpoints: layout-independent, complete or not there at all."""

from megavlm.checkpointing.folder import latest
from megavlm.checkpointing.load import load
from megavlm.checkpointing.retention import Retention
from megavlm.checkpointing.save import Saving, begin, save
from megavlm.checkpointing.saver import Saver

__all__ = ["Retention", "Saver", "Saving", "begin", "latest", "load", "save"]
