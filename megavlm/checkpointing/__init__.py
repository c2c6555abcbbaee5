"""Checkpoints that do not depend on the parallel layout, and that are either complete or absent."""
