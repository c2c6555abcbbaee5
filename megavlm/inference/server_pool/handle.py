"""Handle of one server of the pool: its address, its keys, and its process if it is managed."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megavlm.inference.server import ManagedServer
from megavlm.inference.server_pool.requirements import Requirements
from megavlm.inference.server_pool.routing import Address

if TYPE_CHECKING:  # it imports megatron-core, which the producer of rollouts does without
    from megavlm.inference.server_pool.nodes import RemoteServer


@dataclass
class ServerHandle:
    """One server. server: Its process; None for an external server. tensor_parallel, device,
    takes_videos: Number of ranks, device, and whether prompts may have videos; for an external
    server they are known once it has answered. cache_tokens: Tokens that its prefix cache holds;
    None until it has answered. required: Requirements on an external server. is_added: True for an
    external server that the recipe does not name (`megavlm servers add`): a run starts without it.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    server: "ManagedServer | RemoteServer | None" = None
    tensor_parallel: int = 1
    device: str = "cpu"
    takes_videos: bool = False
    cache_tokens: int | None = None
    required: Requirements = field(default_factory=Requirements)
    is_added: bool = False

    @property
    def node(self) -> int | None:
        """Trainer node whose memory the server can open; see Receiver."""
        return None if self.server is None else self.server.node

    @property
    def is_local(self) -> bool:
        """True if the server can read this process's files; see Address."""
        return self.node == 0

    @property
    def address(self) -> Address:
        keys = self.api_key, self.admin_key
        return Address(self.url, *keys, self.is_local, self.takes_videos, self.cache_tokens)

    @staticmethod
    def managed(server: "ManagedServer | RemoteServer") -> "ServerHandle":
        return ServerHandle(
            server.url,
            server.api_key,
            server.admin_key,
            server,
            server.tensor_parallel,
            server.device,
            takes_videos=True,
        )
