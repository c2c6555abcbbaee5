"""Rank 0's part of a weight update: it makes every control request to the servers."""

import logging
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from megavlm.inference.errors import ServersFailed, TrainerFault, WeightSyncError
from megavlm.inference.protocol import adapter_name
from megavlm.inference.server_pool.receivers import Receiver, Receivers
from megavlm.inference.server_pool.requirements import SESSIONS, server_version
from megavlm.weight_sync import checksums as verify
from megavlm.weight_sync.gather import NamedTensors
from megavlm.weight_sync.lora import load_adapter, unload_adapters
from megavlm.weight_sync.server_api import Answers, Servers
from megavlm.weight_sync.server_parameters import ServerParameters
from megavlm.weight_sync.sglang_layout import ServerLayout
from megavlm.weight_sync.transports.base import Delivery, Transport
from megavlm.weight_sync.update import SendReport, SyncAttempt, SyncReport, SyncSettings

CONTINUE = {"torch_empty_cache": False}
# Requests that flush the prefix cache of the old weights, by SGLang's pause mode. Aborted requests
# may take seconds to disappear, so the flush waits. Retracted requests stay queued, so waiting for
# them would never end. There is no flush for in_place: SGLang refuses one while requests continue.
FLUSH_PATHS = {"abort": "/flush_cache?timeout=20", "retract": "/flush_cache"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenAttempt:
    """An attempt whose servers are paused, on rank 0.

    loading: URLs of the servers that load weights. sessions: URLs of the servers with an open
    session, between begin_weight_update and end_weight_update. delivery: Rank 0's sending.
    shared: The attempt as every rank knows it.
    """

    servers: Servers
    loading: Sequence[str]
    sessions: Sequence[str]
    delivery: Delivery
    shared: SyncAttempt


class SyncCoordinator:
    """Opens and closes attempts to update the servers.

    A server that fails at any point is reported to `receivers`. With settings.pause=in_place,
    running requests continue and the prefixes of older weights stay in the servers' caches; a
    cache_key in each request keeps the prefixes of different versions apart.

    senders: Trainer ranks that send tensors. http: HTTP client for all requests. adapter_config:
    PEFT's adapter_config, if LoRA adapters are sent unmerged. Only servers that need every tensor
    load weights then, and no other server is paused.
    """

    def __init__(
        self,
        receivers: Receivers,
        transport: Transport,
        settings: SyncSettings,
        senders: tuple[int, ...],
        *,
        http: httpx.Client,
        adapter_config: dict[str, Any] | None = None,
    ) -> None:
        self._receivers, self._transport, self._settings = receivers, transport, settings
        self._http, self._adapter_config = http, adapter_config
        self._senders = senders
        self._parameters = ServerParameters()
        self._infos: Answers = {}  # each server's /server_info, read once per server process
        self._adapter: tuple[Servers, str] | None = None  # servers that have loaded it, and name
        self._has_warned = False

    def open(self, without: Container[str], *, full: bool) -> OpenAttempt:
        """Pause the servers and prepare them to take tensors.

        without: URLs of servers to leave out. full: True to send every tensor to every server.
        Raises ServersFailed if no server is left.
        """
        receivers = self._receivers.receivers(without)
        if not receivers:
            raise ServersFailed("there is no rollout server to update")
        servers = Servers(receivers, timeout=self._settings.timeout, http=self._http)
        sessions: list[str] = []
        path = "/server_info"
        try:
            unread = [x.url for x in receivers if x.needs_all or x.url not in self._infos]
            self._infos |= servers.request_each(path, dict.fromkeys(unread))
            infos = {x.url: self._infos[x.url] for x in servers.live}
            expert_parallel = servers.read(path, infos, lambda info: int(info.get("ep_size", 1)))
            has_sessions = servers.read(path, infos, lambda info: server_version(info) >= SESSIONS)
            loading = [
                x.url for x in servers.live if full or x.needs_all or self._adapter_config is None
            ]
            if self._transport.traits.in_session:
                sessions += [url for url in loading if has_sessions[url]]
            pause = {"mode": self._settings.pause}
            servers.request_each("/pause_generation", dict.fromkeys(loading, pause))
            # A trainer that died during an update, or a lost connection, may have left a session
            # open.
            unsure = [x.url for x in servers.live if x.needs_all]
            servers.try_each("/end_weight_update", {}, [x for x in unsure if x in sessions])
            servers.request_each("/begin_weight_update", {url: {} for url in sessions})
            layouts = {x.url: self._layout(x, expert_parallel[x.url]) for x in servers.live}
            sliced: dict[str, frozenset[str]] = {}
            if self._transport.traits.slices:
                sliced = self._parameters.read(servers, infos, layouts, loading)
            live = servers.live
            attempt = SyncAttempt(
                tuple(live),
                layouts,
                tuple(x.url for x in live if full or x.needs_all),
                self._comparable(live),
                sliced,
                self._senders,
            )
            delivery = self._transport.open(servers, attempt)
        except WeightSyncError:
            self._resume(servers, sessions, everyone=True)
            raise
        shared = replace(attempt, rendezvous=delivery.rendezvous)
        return OpenAttempt(servers, loading, sessions, delivery, shared)

    def close(
        self,
        attempt: OpenAttempt,
        reports: Sequence[SendReport],
        version: str,
        adapters: NamedTensors,
        started: float,
    ) -> SyncReport:
        """Have the servers load the tensors that were sent, compare their checksums, and set the
        new version.

        reports: Reports of every sending rank. adapters: All LoRA pairs, if they are sent unmerged.
        started: `time.monotonic()` at the start of the update. Raises ServersFailed if servers
        failed while tensors were sent, or if no server is left.
        """
        try:
            _check_sent(attempt.servers, reports)
            report = self._finish(attempt, reports, version, adapters, started)
        except WeightSyncError:
            self._resume(attempt.servers, attempt.sessions, everyone=True)
            raise
        self._resume(attempt.servers, attempt.sessions, everyone=False)
        for receiver in attempt.servers.live:
            self._receivers.refitted(receiver.url, version)
        return report

    def unload(self) -> None:
        """Unload this run's adapter from the servers, because they may outlive the run."""
        if self._adapter is not None:
            servers, name = self._adapter
            servers.try_each("/unload_lora_adapter", {"lora_name": name})
            self._adapter = None

    def _finish(
        self,
        attempt: OpenAttempt,
        reports: Sequence[SendReport],
        version: str,
        adapters: NamedTensors,
        started: float,
    ) -> SyncReport:
        servers, shared, pause = attempt.servers, attempt.shared, self._settings.pause
        attempt.delivery.complete()
        servers.request_each("/end_weight_update", {url: {} for url in attempt.sessions})
        # On a CPU a cache flush runs Python's garbage collector over everything that a server has
        # loaded, and takes half a second, unless these objects are frozen. SGLang freezes at its
        # start, before the weights are loaded, which is too early.
        refitted = [url for url in shared.refitted if url not in servers.lost]
        servers.try_each("/freeze_gc", {}, refitted)
        if pause in FLUSH_PATHS:
            servers.request_each(FLUSH_PATHS[pause], {url: {} for url in attempt.loading})
        checked = verify.check_checksums(servers, _expected(shared, reports))
        num_bytes = sum(report.bytes for report in reports)
        if self._adapter_config is not None:
            name = adapter_name(version)
            num_bytes += load_adapter(servers, name, self._adapter_config, adapters)
            checked += len(adapters) * len(servers.live)
        body = {"new_version": version, "abort_all_requests": False}
        servers.request_each("/update_weight_version", dict.fromkeys(shared.urls, body))
        verify.check_version(servers, version)
        servers.request_each("/continue_generation", dict.fromkeys(attempt.loading, CONTINUE))
        if self._adapter_config is not None:
            self._adapter = servers, adapter_name(version)
            unload_adapters(servers, but=adapter_name(version))
        return SyncReport(
            seconds=time.monotonic() - started,
            bytes=num_bytes,
            tensors=sum(report.tensors for report in reports) + len(adapters),
            checked=checked,
            servers=len(servers.live),
        )

    def _comparable(self, receivers: Sequence[Receiver]) -> tuple[str, ...]:
        urls = tuple(
            receiver.url for receiver in receivers if verify.is_comparable(receiver.device)
        )
        if len(urls) < len(receivers) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "checksums of weights on GPU servers can be compared only if rank 0 has a GPU and "
                "SGLang is installed; here a weight update is verified by its version alone "
                "(sync_checked in metrics.jsonl counts compared tensors)"
            )
        return urls

    def _resume(self, servers: Servers, sessions: Sequence[str], *, everyone: bool) -> None:
        """Report lost servers to `receivers`, and let them generate again.

        everyone: If true, let the other servers generate again, too. Their weights may be a mix of
        two versions until the next update.
        """
        urls = [*servers.lost, *(x.url for x in servers.live if everyone)]
        servers.try_each("/end_weight_update", {}, [url for url in urls if url in sessions])
        servers.try_each("/continue_generation", CONTINUE, urls)
        for url, reason in servers.lost.items():
            if url in servers.mismatched:
                self._receivers.mismatched(url, reason)
            else:
                self._receivers.failed(url, reason)

    def _layout(self, receiver: Receiver, expert_parallel: int) -> ServerLayout:
        return ServerLayout(
            receiver.tensor_parallel,
            expert_parallel,
            self._settings.num_kv_heads,
            self._settings.tied_embeddings,
            self._settings.linear_rows,
            on_cpu=receiver.device == "cpu",
        )


def _check_sent(servers: Servers, reports: Sequence[SendReport]) -> None:
    """Mark the servers as lost that any rank has lost.

    Raises TrainerFault if a rank failed through no server's fault, and ServersFailed if the other
    servers did not get everything.
    """
    for report in reports:
        for url, reason in report.lost.items():
            servers.lose(url, reason)
    failed = [report for report in reports if report.error is not None]
    for report in failed:
        if report.is_own_fault:
            raise TrainerFault(report.error)
    if failed:
        if not servers.lost:  # it is not known which server caused the error
            for receiver in servers.live:
                servers.lose(receiver.url, str(failed[0].error))
        raise servers.failure()


def _expected(
    attempt: SyncAttempt, reports: Sequence[SendReport]
) -> dict[str, list[dict[str, str]]]:
    """Return the checksums of each rank of the servers that can be compared."""
    expected = {}
    for url in attempt.compared:
        parts = [report.changed for report in reports]
        parts += [report.rest for report in reports] if url in attempt.refitted else []
        expected[url] = verify.joined(parts, attempt.layouts[url])
    return expected
