"""Pure functions on tensors. Nothing here knows about ranks: the caller passes denominators in."""
