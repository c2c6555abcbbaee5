"""Rank 0's part of a weight update: it makes every control request to the servers."""

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from megavlm.inference.errors import ServersFailed, TrainerFault, WeightSyncError
from megavlm.inference.protocol import adapter_name
from megavlm.inference.server_main import LOADER
from megavlm.inference.server_pool.receivers import Receiver, Receivers
from megavlm.weight_sync import checksums as verify
from megavlm.weight_sync.gather import NamedTensors
from megavlm.weight_sync.lora import load_adapter, unload_adapters
from megavlm.weight_sync.server_api import Answers, Servers
from megavlm.weight_sync.sglang_layout import ServerLayout
from megavlm.weight_sync.transports.base import Sending, Transport
from megavlm.weight_sync.transports.chain import ChainTransport
from megavlm.weight_sync.update import SendReport, SyncAttempt, SyncReport, SyncSettings

CONTINUE = {"torch_empty_cache": False}
FLUSH = "/flush_cache?timeout=20"  # waits for aborted requests, which may take seconds to disappear
# SGLang's MoE kernels on GPUs that store experts as they are loaded, without shuffling them.
PLAIN_KERNELS = ("auto", "triton")


@dataclass(frozen=True)
class OpenAttempt:
    """Attempt whose servers are paused, on rank 0. shared: The attempt as every rank knows it."""

    servers: Servers
    shared: SyncAttempt


class SyncCoordinator:
    """Opens and closes attempts to update the servers.

    A server that fails at any point is reported to `receivers`. The prefixes of older weights stay
    in the servers' caches; a cache_key in each request keeps the prefixes of different versions
    apart.

    http: HTTP client for all requests. adapter_config: PEFT's adapter_config, if LoRA adapters are
    sent unmerged. Only servers that need every tensor load weights then, and no other server is
    paused.
    """

    def __init__(
        self,
        receivers: Receivers,
        transport: Transport,
        settings: SyncSettings,
        *,
        http: httpx.Client,
        adapter_config: dict[str, Any] | None = None,
    ) -> None:
        self._receivers, self._transport, self._settings = receivers, transport, settings
        self._http, self._adapter_config = http, adapter_config
        self._infos: Answers = {}  # each server's /server_info, read once per server process
        self._adapter: tuple[Servers, str] | None = None  # servers that have loaded it, and name

    def open(self, version: str, without: Container[str], *, full: bool) -> OpenAttempt:
        """Pause the servers and prepare them to take tensors.

        version: The weight version that they get. without: URLs of servers to leave out. full: True
        to send every tensor to every server. Raises ServersFailed if no server is left.
        """
        receivers = self._receivers.receivers(without)
        if not receivers:
            raise ServersFailed("there is no rollout server to update")
        servers = Servers(receivers, timeout=self._settings.timeout, http=self._http)
        try:
            layouts = self._layouts(servers)
            refitted = [x.url for x in servers.live if full or x.needs_all]
            # Adapters are loaded while a server generates; only base weights need a pause.
            loading = refitted if self._adapter_config else [x.url for x in servers.live]
            pause = {"mode": self._settings.pause_mode}
            servers.request_each("/pause_generation", dict.fromkeys(loading, pause))
            if self._settings.flush_aborted:
                servers.request_each(FLUSH, {url: {} for url in loading})
            live = servers.live
            attempt = SyncAttempt(
                tuple(live),
                {x.url: layouts[x.url] for x in live},
                tuple(x.url for x in live if x.url in loading),
                tuple(x.url for x in live if x.url in refitted),
                version,
            )
            rendezvous = self._transport.prepare(servers, attempt)
        except WeightSyncError:
            self._resume(servers, everyone=True)
            raise
        return OpenAttempt(servers, replace(attempt, rendezvous=rendezvous))

    def close(
        self,
        sending: Sending,
        reports: Sequence[SendReport],
        adapters: NamedTensors,
        started: float,
    ) -> SyncReport:
        """Verify what the servers hold, set the new version and let them generate again.

        sending: Rank 0's part of the attempt. reports: Reports of every rank. adapters: All LoRA
        pairs, if they are sent unmerged. started: `time.monotonic()` at the start of the update.
        Raises ServersFailed if servers failed while tensors were sent, or if no server is left.
        """
        servers, version = sending.servers, sending.attempt.version
        assert servers is not None
        try:
            _check_sent(servers, reports)
            report = self._finish(servers, sending, reports, adapters, started)
        except WeightSyncError:
            self._resume(servers, everyone=True)
            raise
        self._resume(servers, everyone=False)
        for receiver in servers.live:
            self._receivers.refitted(receiver.url, version)
        return report

    def catch_up(self, receiver: Receiver) -> str | None:
        """Bring a server up to date without a push, from any thread. Returns the weight version
        that it has then; None if it must wait for a push. Raises ServersFailed if it fails.
        """
        assert isinstance(self._transport, ChainTransport)
        servers = Servers([receiver], timeout=self._settings.timeout, http=self._http)
        infos = servers.request_each("/server_info", {receiver.url: None})
        layouts = self._read_layouts(servers, infos)
        return self._transport.catch_up(servers, receiver.url, layouts[receiver.url])

    def unload(self) -> None:
        """Unload this run's adapter from the servers, because they may outlive the run."""
        if self._adapter is not None:
            servers, name = self._adapter
            servers.try_each("/unload_lora_adapter", {"lora_name": name})
            self._adapter = None

    def _finish(
        self,
        servers: Servers,
        sending: Sending,
        reports: Sequence[SendReport],
        adapters: NamedTensors,
        started: float,
    ) -> SyncReport:
        attempt, version, transport = sending.attempt, sending.attempt.version, self._transport
        checked = transport.complete(sending, reports)
        num_bytes = sum(report.bytes for report in reports)
        compared = sum(report.compared for report in reports)
        if self._adapter_config is not None:
            name = adapter_name(version)
            num_bytes += load_adapter(servers, name, self._adapter_config, adapters)
            checked += len(adapters) * len(servers.live)
        if self._adapter_config is not None or not self._transport.traits.needs_loader:
            body = {"new_version": version, "abort_all_requests": False}
            servers.request_each("/update_weight_version", dict.fromkeys(attempt.urls, body))
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
            density=sum(x.changed for x in reports) / compared if compared else 1.0,
            chain_bytes=transport.nbytes if isinstance(transport, ChainTransport) else 0,
        )

    def _resume(self, servers: Servers, *, everyone: bool) -> None:
        """Report lost servers to `receivers`, and let them generate again.

        everyone: If true, let the other servers generate again, too. Their weights may be a mix of
        two versions until the next update.
        """
        urls = [*servers.lost, *(x.url for x in servers.live if everyone)]
        servers.try_each("/continue_generation", CONTINUE, urls)
        for url, reason in servers.lost.items():
            if url in servers.mismatched:
                self._receivers.mismatched(url, reason)
            else:
                self._receivers.failed(url, reason)

    def _layouts(self, servers: Servers) -> dict[str, ServerLayout]:
        """Return the layout of each server. Servers that cannot load weights as the transport sends
        them are marked as lost.
        """
        path = "/server_info"
        # A server that needs all tensors may be a new process at a known URL.
        unread = [x.url for x in servers.live if x.needs_all or x.url not in self._infos]
        self._infos |= servers.request_each(path, dict.fromkeys(unread))
        return self._read_layouts(servers, {x.url: self._infos[x.url] for x in servers.live})

    def _read_layouts(self, servers: Servers, infos: Answers) -> dict[str, ServerLayout]:
        path, receivers = "/server_info", {x.url: x for x in servers.live}
        layouts = servers.read(
            path, infos, lambda info: (int(info.get("ep_size", 1)), info.get("moe_runner_backend"))
        )
        if self._transport.traits.needs_loader:
            loaders = servers.read(path, infos, lambda info: info.get("custom_weight_loader") or ())
            for url in [url for url, found in loaders.items() if LOADER not in found]:
                layouts.pop(url, None)
                servers.lose(
                    url,
                    f"{url} has no weight loader of this release: start it as `megavlm plan "
                    "--servers` prints, or set rollout.sync=disk",
                )
        if self._settings.fp8:
            for url, (_, kernel) in [*layouts.items()]:
                if not _is_plain(receivers[url], kernel):
                    del layouts[url]
                    servers.lose(
                        url,
                        f"{url} has moe_runner_backend={kernel}, which stores experts in another "
                        "order than rollout.quantization=fp8 sends them: start it with triton",
                    )
        return {
            url: self._layout(receivers[url], expert_parallel, kernel)
            for url, (expert_parallel, kernel) in layouts.items()
        }

    def _layout(self, receiver: Receiver, expert_parallel: int, kernel: str | None) -> ServerLayout:
        settings = self._settings
        return ServerLayout(
            receiver.tensor_parallel,
            expert_parallel,
            settings.num_kv_heads,
            settings.tied_embeddings,
            settings.linear_rows,
            on_cpu=receiver.device == "cpu",
            whole_experts=not _is_plain(receiver, kernel),
            fp8=settings.fp8,
            vision_head_dim=settings.vision_head_dim,
            audio_head_dim=settings.audio_head_dim,
            names=settings.server_names,
        )


def _is_plain(receiver: Receiver, kernel: str | None) -> bool:
    """Return True if a server stores experts as they are loaded."""
    return receiver.device == "cpu" or kernel in PLAIN_KERNELS


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
