"""Errors of rollout servers, by how callers handle them."""


class RolloutServerError(RuntimeError):
    """A server did not start, died, or cannot be reached."""


class RolloutRequestError(RuntimeError):
    """A request failed for good: the server refused it, or its response cannot be used."""


class WeightSyncError(RuntimeError):
    """A weight push failed; the servers' weight version did not advance."""


class TrainerFault(WeightSyncError):
    """A push failed on the trainer's side. No server is at fault, so a retry would not help."""
