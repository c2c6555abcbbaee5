"""Errors of rollout servers, which callers handle differently."""


class RolloutServerError(RuntimeError):
    """A server did not start, died, or cannot be reached."""


class RolloutRequestError(RuntimeError):
    """A request failed for good: the server refused it, or its response cannot be used."""


class WeightSyncError(RuntimeError):
    """A weight push failed; the servers' weight version did not advance."""


class TrainerFault(WeightSyncError):
    """A push failed on the trainer's side: no server is at fault, and a retry is useless."""
