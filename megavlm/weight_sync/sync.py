"""Weight updates of rollout servers with the trainer's weights, versioned and verified."""

import os
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from megavlm.config.schema import Config
from megavlm.families import family
from megavlm.inference.errors import RolloutServerError, WeightSyncError
from megavlm.inference.server_pool.receivers import Receivers
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.mapping import Entry
from megavlm.models.common.model import VisionLanguageModel
from megavlm.parallel import platform
from megavlm.parallel.mesh import Mesh
from megavlm.weight_sync.coordinator import OpenAttempt, SyncCoordinator
from megavlm.weight_sync.gather import local_shards
from megavlm.weight_sync.lora import AdapterWeights
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks
from megavlm.weight_sync.server_api import control_client
from megavlm.weight_sync.sglang_layout import audio_head_dim, linear_rows, vision_head_dim
from megavlm.weight_sync.trainable import trained_entries
from megavlm.weight_sync.transports import TRANSPORTS
from megavlm.weight_sync.transports.base import Sending, Transport
from megavlm.weight_sync.update import (
    CPU_PORTION,
    GPU_PORTION,
    SendReport,
    SyncAttempt,
    SyncReport,
    SyncSettings,
)

T = TypeVar("T")


class WeightSync:
    """Updates the servers' weights. Every trainer rank has one, and all take part in each update.

    chunks: This rank's part of the model. receivers: The servers, on global rank 0; None on other
    ranks. adapters: LoRA adapters that are sent unmerged. Training changes no entry of `plan` then,
    and requests must name `adapter_name(version)`. group: Gloo process group of all ranks; None
    takes the default group.

    version: Version of the last successful update; None before the first.
    """

    def __init__(
        self,
        plan: SyncPlan,
        chunks: Sequence[MegatronModule],
        transport: Transport,
        settings: SyncSettings,
        *,
        receivers: Receivers | None,
        adapters: AdapterWeights | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.version: int | None = None
        self._plan, self._shards = plan, local_shards(plan, chunks, merged=adapters is None)
        self._transport, self._settings = transport, settings
        self._adapters, self._group = adapters, group
        self._http = control_client()
        self._coordinator = None
        if receivers is not None:
            self._coordinator = SyncCoordinator(
                receivers,
                transport,
                settings,
                http=self._http,
                adapter_config=None if adapters is None else adapters.config,
            )

    @classmethod
    def from_config(
        cls,
        config: Config,
        mesh: Mesh,
        hf_config: Any,
        entries: Sequence[Entry],
        model: Sequence[VisionLanguageModel],
        receivers: Receivers | None,
    ) -> "WeightSync":
        """Build the weight sync of a run."""
        text = hf_config.text_config
        options, adapted = ModelOptions.from_config(config), config.lora
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        trainer = TrainerRanks.of(hf_config, mesh.layout, mesh.world_size, options, per_node)
        changed = trained_entries(entries, options, adapted.targets if adapted.rank else None)
        adapters = None
        if adapted.rank and config.rollout.lora == "adapter":
            changed = frozenset()  # the base weights do not change; only adapters are sent
            heads = text.num_key_value_heads
            adapters = AdapterWeights.of(entries, adapted, trainer, model, heads)
        settings = SyncSettings(
            dtype=options.dtype,
            num_kv_heads=text.num_key_value_heads,
            tied_embeddings=bool(hf_config.tie_word_embeddings),
            linear_rows=linear_rows(text),
            vision_head_dim=vision_head_dim(hf_config.vision_config),
            audio_head_dim=audio_head_dim(hf_config),
            server_names=family(hf_config.model_type).server_names(),
            pause_mode=config.rollout.pause_mode,
            flush_aborted=config.rollout.pause_mode == "abort" and config.rollout.is_stale,
            timeout=config.rollout.request_timeout,
            bucket_bytes=GPU_PORTION if platform.has_gpu() else CPU_PORTION,
            fp8=config.rollout.quantization == "fp8",
            delta=config.rollout.sync_delta,
        )
        sync = cls(
            SyncPlan(entries, trainer, changed),
            model,
            TRANSPORTS[config.rollout.sync](config),
            settings,
            receivers=receivers,
            adapters=adapters,
            group=mesh.objects,
        )
        if receivers is not None and config.rollout.sync == "store":
            assert sync._coordinator is not None
            receivers.catch_up_by(sync._coordinator.catch_up)
        return sync

    def update_weights(
        self, version: int, *, full: bool = False, without: Container[str] = ()
    ) -> SyncReport:
        """Attempt once to send the tensors that training can change to the servers, as weights
        `version`. Collective.

        Servers that need every tensor get all tensors; with `full` every server does. A server that
        fails is reported to `receivers`.

        without: URLs of servers to leave out; used on rank 0. Raises on every rank: ServersFailed
        if servers failed while tensors were sent, or if no server is left; TrainerFault if no
        server is at fault; RolloutServerError if `receivers` does. The version has not advanced
        then, and the next successful update repairs servers with mixed weights.
        """
        started = time.monotonic()
        opened: OpenAttempt | None = None

        def open_attempt(coordinator: SyncCoordinator) -> SyncAttempt:
            nonlocal opened
            opened = coordinator.open(str(version), without, full=full)
            return opened.shared

        attempt = self._decide(version, open_attempt)
        servers = opened.servers if opened is not None else None
        sending = Sending(self._plan, self._shards, self._settings, attempt, servers)
        reports = self._gather_reports(self._transport.send(sending))
        pairs = [] if self._adapters is None else self._adapters.gather(self._settings.dtype)

        def close_attempt(coordinator: SyncCoordinator) -> SyncReport:
            return coordinator.close(sending, reports, pairs, started)

        report = self._decide(version, close_attempt)
        self.version = version
        return report

    def close(self) -> None:
        """Release the transport, and unload this run's adapter from the servers. Collective."""
        if self._coordinator is not None:
            self._coordinator.unload()
        self._transport.close()
        self._http.close()

    def _decide(self, version: int, work: Callable[[SyncCoordinator], T]) -> T:
        """Call `work` with the coordinator on rank 0, and broadcast its result or error. Every rank
        returns the result or raises the error. Collective.
        """
        decided: list[Any] = [None]
        if self._coordinator is not None:
            try:
                decided[0] = work(self._coordinator)
            except WeightSyncError as error:
                error.args = (f"weight update to version {version} failed: {error}",)
                decided[0] = error
            except RolloutServerError as error:
                decided[0] = error
        dist.broadcast_object_list(decided, src=0, group=self._group)
        if isinstance(decided[0], Exception):
            raise decided[0]
        result: T = decided[0]
        return result

    def _gather_reports(self, mine: SendReport) -> list[SendReport]:
        """Return the reports of all ranks on rank 0, and [] on other ranks. Collective."""
        reports: list[SendReport | None] | None = None
        if dist.get_rank() == 0:
            reports = [None] * dist.get_world_size()
        dist.gather_object(mine, reports, group=self._group)
        return [report for report in reports or () if report is not None]
