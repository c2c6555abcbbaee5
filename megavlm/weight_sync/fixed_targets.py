"""Servers that nobody supervises, as targets of a push."""

from collections.abc import Container, Sequence
from dataclasses import replace

from megavlm.inference.server_pool.targets import Target
from megavlm.weight_sync.server_api import Servers, control_client


class FixedTargets:
    """One that fails needs every tensor from then on; none is ever given up."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = {target.url: target for target in targets}

    @classmethod
    def connect(
        cls,
        urls: Sequence[str],
        *,
        api_key: str | None,
        admin_key: str | None,
        timeout: float = 300.0,
    ) -> "FixedTargets":
        """Running servers, which say themselves what they are. WeightSyncError when none can be
        reached.
        """
        unknown = [
            Target(url.rstrip("/"), 1, "cpu", True, api_key=api_key, admin_key=admin_key)
            for url in urls
        ]
        path = "/server_info"
        with control_client() as http:
            servers = Servers(unknown, timeout=timeout, http=http)
            sizes = servers.read(
                path, servers.get(path), lambda info: (int(info["tp_size"]), str(info["device"]))
            )
        return cls(
            [
                replace(target, tensor_parallel=sizes[target.url][0], device=sizes[target.url][1])
                for target in unknown
                if target.url in sizes
            ]
        )

    def targets(self, without: Container[str] = ()) -> list[Target]:
        return [target for url, target in self._targets.items() if url not in without]

    def refitted(self, url: str, version: str) -> None:
        self._targets[url] = replace(self._targets[url], needs_all=False)

    def failed(self, url: str, reason: str) -> None:
        self._targets[url] = replace(self._targets[url], needs_all=True)

    def mismatched(self, url: str, reason: str) -> None:
        self.failed(url, reason)
