"""Rank 0's part of a weight update: it makes every control request to the servers."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from megavlm.inference.errors import WeightSyncError
from megavlm.inference.server_pool.receivers import Receiver, Receivers
from megavlm.inference.server_pool.requirements import SESSIONS, server_version
from megavlm.weight_sync import checksums as verify
from megavlm.weight_sync.gather import NamedTensors
from megavlm.weight_sync.lora import adapter_name, load_adapter, unload_adapters
from megavlm.weight_sync.server_api import Answers, Servers
from megavlm.weight_sync.server_parameters import ServerParameters
from megavlm.weight_sync.sglang_layout import ServerLayout
from megavlm.weight_sync.transports.base import Transport
from megavlm.weight_sync.update import SendReport, SyncAttempt, SyncReport, SyncSettings

CONTINUE = {"torch_empty_cache": False}
# Requests that flush the prefix cache of the old weights, by SGLang's pause mode. Aborted requests
# may take seconds to disappear, so the flush waits. Retracted requests stay queued, so waiting for
# them would never end. There is no flush for in_place: SGLang refuses one while requests continue.
FLUSH_PATHS = {"abort": "/flush_cache?timeout=20", "retract": "/flush_cache"}

logger = logging.getLogger(__name__)


class SyncCoordinator:
    """Opens and closes attempts to update the servers.

    A server that fails at any point is reported to `receivers`, and the update continues on the
    others. WeightSyncError is raised when none is left. With settings.pause=in_place, running
    requests continue and the prefixes of older weights stay in the servers' caches; a cache_key in
    each request keeps the prefixes of different versions apart.

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
        self._adapter: str | None = None  # name of the adapter that servers have loaded
        self._has_warned = False

    def open(self, failed: set[str], *, full: bool) -> SyncAttempt:
        """Pause the servers and prepare them to take tensors. Servers that have `failed` in this
        update are left out.

        full: If true, every server gets every tensor. Raises WeightSyncError if no server is left.
        """
        receivers = self._receivers.receivers(without=failed)
        if not receivers:
            raise WeightSyncError("there is no rollout server to update")
        self._sessions: list[str] = []  # servers that need begin_ and end_weight_update
        servers = self.servers = Servers(receivers, timeout=self._settings.timeout, http=self._http)
        path = "/server_info"
        try:
            unread = [x.url for x in receivers if x.needs_all or x.url not in self._infos]
            self._infos |= servers.request_each(path, dict.fromkeys(unread))
            infos = {receiver.url: self._infos[receiver.url] for receiver in servers.live}
            expert_parallel = servers.read(path, infos, lambda info: int(info.get("ep_size", 1)))
            has_sessions = servers.read(path, infos, lambda info: server_version(info) >= SESSIONS)
            self._loading = [
                receiver.url
                for receiver in servers.live
                if full or receiver.needs_all or self._adapter_config is None
            ]
            self._sessions = [
                url
                for url in self._loading
                if self._transport.traits.in_session and has_sessions[url]
            ]
            self._post("/pause_generation", {"mode": self._settings.pause})
            # A trainer that died during an update, or a lost connection, may have left a session
            # open.
            unsure = [receiver.url for receiver in servers.live if receiver.needs_all]
            servers.try_each("/end_weight_update", {}, [x for x in unsure if x in self._sessions])
            servers.request_each("/begin_weight_update", {url: {} for url in self._sessions})
            live = servers.live
            layouts = {x.url: self._layout(x, expert_parallel[x.url]) for x in live}
            sliced: dict[str, frozenset[str]] = {}
            if self._transport.traits.slices:
                sliced = self._parameters.read(servers, infos, layouts, self._loading)
            live = servers.live
            attempt = SyncAttempt(
                tuple(live),
                layouts,
                tuple(receiver.url for receiver in live if full or receiver.needs_all),
                self._comparable(live),
                sliced,
                self._senders,
            )
            attempt = replace(attempt, rendezvous=self._transport.open(servers, attempt))
        except WeightSyncError:
            self._resume(failed, everyone=True)
            raise
        return attempt

    def close(
        self,
        attempt: SyncAttempt,
        reports: Sequence[SendReport],
        version: str,
        failed: set[str],
        adapters: NamedTensors,
        started: float,
    ) -> SyncReport | None:
        """Have the servers load the tensors that were sent, compare their checksums, and set the
        new version.

        reports: Reports of every sending rank. adapters: All LoRA pairs, if they are sent unmerged.
        started: `time.monotonic()` at the start of the update. Returns None if some servers failed,
        so that everything must be sent again to the others; the failed servers are added to
        `failed`.
        """
        report = None
        try:
            if self._is_complete(reports):
                report = self._finish(attempt, reports, version, adapters, started)
        except WeightSyncError:
            self._resume(failed, everyone=True)
            raise
        self._resume(failed, everyone=report is None)
        if report is not None:
            for receiver in self.servers.live:
                self._receivers.refitted(receiver.url, version)
        return report

    def unload(self) -> None:
        """Unload this run's adapter from the servers, because they may outlive the run."""
        if self._adapter is not None:
            self.servers.try_each("/unload_lora_adapter", {"lora_name": self._adapter})
            self._adapter = None

    def _finish(
        self,
        attempt: SyncAttempt,
        reports: Sequence[SendReport],
        version: str,
        adapters: NamedTensors,
        started: float,
    ) -> SyncReport:
        servers, pause = self.servers, self._settings.pause
        self._transport.complete(attempt)
        servers.request_each("/end_weight_update", {url: {} for url in self._sessions})
        # On a CPU a cache flush runs Python's garbage collector over everything that a server has
        # loaded, and takes half a second, unless these objects are frozen. SGLang freezes at its
        # start, before the weights are loaded, which is too early.
        refitted = [url for url in attempt.refitted if url not in servers.lost]
        servers.try_each("/freeze_gc", {}, refitted)
        if pause in FLUSH_PATHS:
            self._post(FLUSH_PATHS[pause], {})
        checked = verify.check_checksums(servers, self._expected(attempt, reports))
        num_bytes = sum(report.bytes for report in reports)
        if self._adapter_config is not None:
            name = adapter_name(version)
            num_bytes += load_adapter(servers, name, self._adapter_config, adapters)
            checked += len(adapters) * len(servers.live)
        body = {"new_version": version, "abort_all_requests": False}
        servers.request_each("/update_weight_version", dict.fromkeys(attempt.urls, body))
        verify.check_version(servers, version)
        self._post("/continue_generation", CONTINUE)
        if self._adapter_config is not None:
            self._adapter = adapter_name(version)
            unload_adapters(servers, but=self._adapter)
        return SyncReport(
            seconds=time.monotonic() - started,
            bytes=num_bytes,
            tensors=sum(report.tensors for report in reports) + len(adapters),
            checked=checked,
            servers=len(servers.live),
        )

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        """POST to the servers that load weights."""
        self.servers.request_each(path, dict.fromkeys(self._loading, body))

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

    def _is_complete(self, reports: Sequence[SendReport]) -> bool:
        """Mark the servers as lost that any rank has lost. Returns True if the others got
        everything.

        Raises WeightSyncError if a rank failed through no server's fault.
        """
        for report in reports:
            for url, reason in report.lost.items():
                self.servers.lose(url, reason)
        errors = [report.error for report in reports if report.error]
        if own := [report.error for report in reports if report.error and report.is_own_fault]:
            raise WeightSyncError(own[0])
        if errors and not self.servers.lost:  # it is not known which server caused the error
            for receiver in self.servers.live:
                self.servers.lose(receiver.url, errors[0])
        return not errors

    def _resume(self, failed: set[str], *, everyone: bool) -> None:
        """Report lost servers to `receivers`, add them to `failed`, and let them generate again.

        everyone: If true, let the other servers generate again, too. Their weights may be a mix of
        two versions until the next update.
        """
        servers = self.servers
        urls = list(servers.lost)
        if everyone:
            urls += [receiver.url for receiver in servers.live]
        servers.try_each("/end_weight_update", {}, [url for url in urls if url in self._sessions])
        servers.try_each("/continue_generation", CONTINUE, urls)
        failed.update(servers.lost)
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

    def _expected(
        self, attempt: SyncAttempt, reports: Sequence[SendReport]
    ) -> dict[str, list[dict[str, str]]]:
        """Return the checksums of each rank of the servers that can be compared."""
        expected = {}
        for url in attempt.compared:
            parts = [report.changed for report in reports]
            parts += [report.rest for report in reports] if url in attempt.refitted else []
            expected[url] = verify.joined(parts, attempt.layouts[url])
        return expected
