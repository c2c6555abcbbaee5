"""The update session that SGLang wants around tensor and distributed updates."""

from megavlm.rollout.errors import WeightSyncError
from megavlm.rollout.weights.servers import Servers


class Session:
    """begin, commit and abort for transports that hand over tensor by tensor.

    Each update drops the keys and values of the old weights itself (`flush_cache`): /flush_cache
    would also empty the allocator's cache, which takes 0.4 s on a CPU.
    """

    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    def begin(self) -> None:
        self.servers.post("/begin_weight_update", {})

    def commit(self) -> None:
        self.servers.post("/end_weight_update", {})

    def abort(self) -> None:
        try:
            self.servers.post("/end_weight_update", {})
        except WeightSyncError:
            pass  # no session was open, or the server is gone; the push has failed already

    def close(self) -> None:
        pass
