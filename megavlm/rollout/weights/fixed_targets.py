"""Servers that nobody supervises, as targets of a push."""

from collections.abc import Sequence
from dataclasses import replace

from megavlm.rollout.fleet.targets import Target
from megavlm.rollout.weights.servers import Servers


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
        infos = Servers(unknown, timeout=timeout).get("/server_info")
        sizes = {url: (int(info["tp_size"]), info["device"]) for url, info in infos.items()}
        return cls(
            [
                replace(target, tensor_parallel=sizes[target.url][0], device=sizes[target.url][1])
                for target in unknown
                if target.url in sizes
            ]
        )

    def targets(self) -> list[Target]:
        return list(self._targets.values())

    def refitted(self, url: str, version: str) -> None:
        self._targets[url] = replace(self._targets[url], needs_all=False)

    def failed(self, url: str, reason: str) -> None:
        self._targets[url] = replace(self._targets[url], needs_all=True)
