"""Tiny models, drawn images, and the demo that trains on them."""
