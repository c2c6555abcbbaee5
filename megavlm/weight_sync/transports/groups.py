"""Process groups of a sending rank with ranks of servers."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_support.megavlm_weights import join
from megavlm.parallel import platform
from megavlm.parallel.watchdog import SERVERS_GROUP
from megavlm.weight_sync.server_api import CLEANUP_TIMEOUT, Servers
from megavlm.weight_sync.transports.rendezvous import Rendezvous, connect


class ServerGroups:
    """Process groups in which this rank, as rank 0 of the group, broadcasts to ranks of servers.

    prefix: Beginning of the groups' names. invited: Group name -> servers that join by SGLang's own
    request. The megavlm loaders join when they first receive.
    """

    def __init__(self) -> None:
        self.prefix = ""
        self.invited: dict[str, tuple[str, ...]] = {}
        self._names: dict[tuple[Sequence[str], int | None], str] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._store: dist.TCPStore | None = None  # used by this rank to join groups

    def name(self, urls: tuple[str, ...], rank: int | None) -> str:
        """Return the name of the group with rank `rank` of each server, or with all ranks if
        None.
        """
        return self._names.setdefault((urls, rank), f"{self.prefix}_{len(self._names)}")

    def group(
        self, name: str, size: int, rendezvous: Rendezvous, limit: timedelta
    ) -> dist.ProcessGroup:
        """Return a group. This rank joins it first if it has not yet."""
        if name not in self._groups:
            # Joining blocks the store's connection, while the transport must keep polling its own,
            # so joining needs a separate connection. All groups share one, because torch resolves
            # host names for each new connection.
            if self._store is None:
                self._store = connect(rendezvous.host, rendezvous.port, limit)
            self._groups[name] = join(
                self._store, name, 0, size, platform.backend(), limit, SERVERS_GROUP
            )
        return self._groups[name]

    def leave(self, servers: Servers) -> None:
        """Leave all groups. Closing the connections ends receives that servers still wait for."""
        for group in [*self._groups.values()]:  # a copy: a thread may still be joining one
            group.abort()
            dist.destroy_process_group(group)
        for name, urls in self.invited.items():
            for url in urls:
                with suppress(WeightSyncError):  # the server may be gone
                    servers.request(
                        url,
                        "/destroy_weights_update_group",
                        {"group_name": name},
                        timeout=CLEANUP_TIMEOUT,
                    )
        for known in (self._names, self._groups, self.invited):
            known.clear()
        self._store = None
