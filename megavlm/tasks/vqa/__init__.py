"""Short answers to questions about images."""
