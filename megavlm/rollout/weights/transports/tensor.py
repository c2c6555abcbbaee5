"""By value over HTTP: for servers on this machine, a CPU's above all."""

import base64
import pickle
from collections.abc import Sequence

from torch import Tensor

from megavlm.rollout.weights.servers import Servers
from megavlm.rollout.weights.transports.bucket import flatten
from megavlm.rollout.weights.transports.session import Session


class TensorTransport(Session):
    """Each tensor-parallel rank of a server reads its own copy of the bucket out of one request."""

    def __init__(self, servers: Servers) -> None:
        super().__init__(servers)
        self._ranks = [int(info["tp_size"]) for info in servers.get("/server_info")]

    def send(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        flat, places = flatten(tensors)
        # By value: torch's shared-memory handles need the server's trust of our processes.
        payload = base64.b64encode(
            pickle.dumps({"flattened_tensor": flat.cpu(), "metadata": places})
        ).decode("ascii")
        self.servers.post_each(
            "/update_weights_from_tensor",
            [
                {
                    "serialized_named_tensors": [payload] * ranks,
                    "load_format": "flattened_bucket",
                    "flush_cache": True,
                }
                for ranks in self._ranks
            ],
        )
        return len(payload) * sum(self._ranks)
