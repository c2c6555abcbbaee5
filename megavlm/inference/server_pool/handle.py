"""One server of the fleet: where it is, what opens it, and the process if it is ours."""

from dataclasses import dataclass, field

from megavlm.inference.server import ManagedServer
from megavlm.inference.server_pool.requirements import Requirements


@dataclass
class ServerHandle:
    """tensor_parallel and device of an external server are known once it has answered; `required`:
    of an external one.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    server: ManagedServer | None = None  # None: external
    tensor_parallel: int = 1
    device: str = "cpu"
    required: Requirements = field(default_factory=Requirements)

    @staticmethod
    def managed(server: ManagedServer) -> "ServerHandle":
        return ServerHandle(
            server.url,
            server.api_key,
            server.admin_key,
            server,
            server.tensor_parallel,
            server.device,
        )
