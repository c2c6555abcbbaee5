"""Layout-independent checkpoints that are complete or absent."""
