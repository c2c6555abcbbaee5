"""Rule-based rewards: plain functions from a response and the true answer to a score. No torch."""
