"""Rank 0's part of a push: all that servers are told besides the tensors."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_pool.targets import Target, Targets
from megavlm.weight_sync import checksums as verify
from megavlm.weight_sync.gather import NamedTensors
from megavlm.weight_sync.lora import adapter_name, load_adapter, unload_adapters
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.sglang_layout import Engine
from megavlm.weight_sync.transports.base import Transport

CONTINUE = {"torch_empty_cache": False}
# Of prefixes, which the old weights computed; by SGLang's mode of pausing. Requests that were
# aborted may take seconds to be gone; those that were retracted wait, and none must be waited for;
# under those that go on in place SGLang refuses it.
FLUSH = {"abort": "/flush_cache?timeout=20", "retract": "/flush_cache"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Round:
    """An attempt of a push, the same on every rank. `refitted`: addresses of targets that get every
    tensor; `compared`: of those whose checksums can be compared.
    """

    targets: tuple[Target, ...]
    engines: Mapping[str, Engine]
    refitted: tuple[str, ...]
    compared: tuple[str, ...]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(target.url for target in self.targets)


@dataclass(frozen=True)
class Sent:
    """What one rank has sent in a round. `lost`: servers that failed, and why. `error`: why it
    stopped; `is_own_fault`: no server is to blame for that. Checksums of what servers must hold
    now: of a layout, of each rank, by engine name; `changed` of what all servers got, `rest` of
    what the refitted ones got besides.
    """

    bytes: int
    tensors: int
    changed: verify.Expected
    rest: verify.Expected
    lost: Mapping[str, str]
    error: str | None
    is_own_fault: bool


@dataclass(frozen=True)
class Closed:
    """What a round came to; the fields are SyncReport's."""

    bytes: int
    tensors: int
    checked: int
    servers: int


class SyncCoordinator:
    """Opens and closes rounds. A server that fails at any point is told to `targets`, and the
    others go on; WeightSyncError when none is left.

    http: for all requests. pause: SGLang's mode, which says what becomes of requests in flight; one
    that goes on in place keeps its prefix, so that servers must have no prefix cache then.
    num_kv_heads, tied_embeddings: of the model. adapter_config: PEFT's, where adapters are sent as
    such; then weights are for servers that need all of them, and no other is paused.
    """

    def __init__(
        self,
        targets: Targets,
        transport: Transport,
        *,
        http: httpx.Client,
        pause: str,
        timeout: float,
        num_kv_heads: int,
        tied_embeddings: bool,
        adapter_config: dict[str, Any] | None = None,
    ) -> None:
        self._adapter_config = adapter_config
        self._adapter: str | None = None  # that servers have
        self._http, self._has_warned = http, False
        self._targets, self._transport = targets, transport
        self._pause, self._timeout = pause, timeout
        self._num_kv_heads, self._tied = num_kv_heads, tied_embeddings

    def open(self, failed: set[str], *, full: bool) -> Round:
        """Servers paused and ready for tensors, without those that have `failed` in this push.
        `full`: all of them get every tensor.
        """
        targets = self._targets.targets(without=failed)
        if not targets:
            raise WeightSyncError("there is no rollout server to push to")
        servers = self._servers = Servers(targets, timeout=self._timeout, http=self._http)
        path = "/server_info"
        try:
            expert_parallel = servers.read(
                path, servers.get(path), lambda info: int(info.get("ep_size", 1))
            )
            self._loading = [
                target.url
                for target in servers.live
                if full or target.needs_all or self._adapter_config is None
            ]
            self._post("/pause_generation", {"mode": self._pause})
            if self._transport.in_session:
                # A trainer that died in mid-push, or a server that could not be told, left it open.
                unsure = [target.url for target in servers.live if target.needs_all]
                servers.try_each("/end_weight_update", {}, unsure)
                self._post("/begin_weight_update", {})
            self._transport.prepare()
        except WeightSyncError:
            self._leave(failed, whole=True)
            raise
        live = servers.live
        return Round(
            tuple(live),
            {target.url: self._engine(target, expert_parallel[target.url]) for target in live},
            tuple(target.url for target in live if full or target.needs_all),
            self._comparable(live),
        )

    def close(
        self,
        round_: Round,
        sent: Sequence[Sent],
        version: str,
        failed: set[str],
        adapters: NamedTensors,
    ) -> Closed | None:
        """The servers load what they were sent, are compared, and only then say the new version.
        `adapters`: all pairs, where they are sent as such. None when the round must be made again
        for those that are left, without `failed`.
        """
        servers, result = self._servers, None
        try:
            if not self._is_broken(sent):
                result = self._finish(round_, sent, version, adapters)
        except WeightSyncError:
            self._leave(failed, whole=True)
            raise
        self._leave(failed, whole=result is None)
        if result is not None:
            for target in servers.live:
                self._targets.refitted(target.url, version)
        return result

    def _finish(
        self, round_: Round, sent: Sequence[Sent], version: str, adapters: NamedTensors
    ) -> Closed:
        servers = self._servers
        self._transport.commit(servers, self._refitted(round_))
        if self._transport.in_session:
            self._post("/end_weight_update", {})
        # On a CPU a flush collects garbage, among all that a server has loaded unless that is
        # frozen: half a second a push. A server asks itself at its start, too early to be heard.
        servers.try_each("/freeze_gc", {}, self._refitted(round_))
        if self._pause in FLUSH:
            self._post(FLUSH[self._pause], {})
        checked = self._compare(round_, sent)
        num_bytes = sum(part.bytes for part in sent)
        if self._adapter_config is not None:
            name = adapter_name(version)
            num_bytes += load_adapter(servers, name, self._adapter_config, adapters)
            checked += len(adapters) * len(servers.live)
        servers.post(
            "/update_weight_version", {"new_version": version, "abort_all_requests": False}
        )
        verify.check_version(servers, version)
        self._post("/continue_generation", CONTINUE)
        if self._adapter_config is not None:
            self._adapter = adapter_name(version)
            unload_adapters(servers, but=self._adapter)
        return Closed(
            bytes=num_bytes,
            tensors=sum(part.tensors for part in sent) + len(adapters),
            checked=checked,
            servers=len(servers.live),
        )

    def _refitted(self, round_: Round) -> list[str]:
        live = {target.url for target in self._servers.live}
        return [url for url in round_.refitted if url in live]

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        """To the servers that load weights."""
        self._servers.post_each(path, dict.fromkeys(self._loading, body))

    def finish(self) -> None:
        """Servers that go on without this run have no adapter of it."""
        if self._adapter is not None:
            self._servers.try_each("/unload_lora_adapter", {"lora_name": self._adapter})
            self._adapter = None

    def _comparable(self, targets: Sequence[Target]) -> tuple[str, ...]:
        urls = tuple(target.url for target in targets if verify.is_comparable(target.device))
        if len(urls) < len(targets) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "checksums of weights on GPU servers are compared where rank 0 has a GPU and "
                "SGLang installed; here they are not, and a push is verified by its version alone "
                "(sync_checked in metrics.jsonl counts compared tensors)"
            )
        return urls

    def _is_broken(self, sent: Sequence[Sent]) -> bool:
        """Takes notice of servers that ranks have lost; says whether the others miss something.
        WeightSyncError where that is a rank's own fault.
        """
        for part in sent:
            for url, reason in part.lost.items():
                self._servers.lose(url, reason)
        errors = [part.error for part in sent if part.error]
        if own := [part.error for part in sent if part.error and part.is_own_fault]:
            raise WeightSyncError(own[0])
        if errors and not self._servers.lost:  # who is to blame is not known
            for target in self._servers.live:
                self._servers.lose(target.url, errors[0])
        return bool(errors)

    def _leave(self, failed: set[str], *, whole: bool) -> None:
        """Tells `targets` of lost servers and adds them to `failed`; leaves them, or `whole`: all,
        able to take the next push.
        """
        servers = self._servers
        urls = list(servers.lost)
        if whole:
            self._transport.abort(servers)
            urls += [target.url for target in servers.live]
        if self._transport.in_session:
            servers.try_each("/end_weight_update", {}, urls)
        servers.try_each("/continue_generation", CONTINUE, urls)
        failed.update(servers.lost)
        for url, reason in servers.lost.items():
            if url in servers.mismatched:
                self._targets.mismatched(url, reason)
            else:
                self._targets.failed(url, reason)

    def _engine(self, target: Target, expert_parallel: int) -> Engine:
        return Engine(
            target.tensor_parallel,
            expert_parallel,
            self._num_kv_heads,
            self._tied,
            on_cpu=target.device == "cpu",
        )

    def _compare(self, round_: Round, sent: Sequence[Sent]) -> int:
        """With the checksums that servers compute of what they hold."""
        expected: dict[str, list[dict[str, str]]] = {}
        for url in round_.compared:
            parts = [part.changed for part in sent]
            parts += [part.rest for part in sent] if url in round_.refitted else []
            expected[url] = verify.joined(parts, round_.engines[url])
        return verify.check_checksums(self._servers, expected)
