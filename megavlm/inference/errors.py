"""What goes wrong with rollout servers, for callers to tell apart."""


class RolloutServerError(RuntimeError):
    """A server did not start, died, or cannot be reached."""


class RolloutRequestError(RuntimeError):
    """A request failed for good: refused, malformed, or out of retries."""


class WeightSyncError(RuntimeError):
    """A weight push failed; the servers' version did not advance."""


class TrainerFault(WeightSyncError):
    """A push failed on the trainer's side: no server is to blame, and a new attempt is useless."""
