"""Transport through a folder that the trainer ranks and all servers share. The first rank of each
pipeline stage gathers whole tensors and writes them, and SGLang's own loader reads them, so that
servers need no loader of megavlm.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from megavlm.config.transports import TRANSPORT_TRAITS
from megavlm.inference.errors import TrainerFault
from megavlm.weight_sync import checksums as verify
from megavlm.weight_sync.gather import NamedTensors, gather
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.sglang_layout import begins_tensor, hub_tensors
from megavlm.weight_sync.transports.base import Sending
from megavlm.weight_sync.update import SendReport, SyncAttempt

PARTIAL, READY = "partial", "ready"
CHANGED, REST = "changed", "rest"
BUCKET = 2**28  # bytes of whole tensors that a rank gathers at a time


class DiskTransport:
    """Writes safetensors to `folder` and has the servers load them.

    The folder gets the name that servers read only when it is complete. It holds the tensors of one
    attempt and is kept until the next attempt, because SGLang 0.5.23 answers when its first rank
    has loaded, while other ranks may still be reading.
    """

    traits = TRANSPORT_TRAITS["disk"]

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._owns_folder = False  # True on rank 0, because it creates and removes the folder

    def prepare(self, servers: Servers, attempt: SyncAttempt) -> Any:
        self._owns_folder = True
        self._remove()
        with _writing(self.folder):
            for name in (CHANGED, REST):
                (self.folder / PARTIAL / name).mkdir(parents=True)
        return None

    def send(self, sending: Sending) -> SendReport:
        """Write the tensors of this rank's stage. After an error the other buckets are still
        gathered, because gathering is collective and other ranks would hang.
        """
        plan, attempt, settings = sending.plan, sending.attempt, sending.settings
        rank, files = dist.get_rank(), 0
        changed, rest = verify.Checksums(), verify.Checksums()
        num_bytes = num_tensors = 0
        fault: TrainerFault | None = None
        for bucket in plan.buckets(
            full=bool(attempt.refitted),
            itemsize=settings.dtype.itemsize,
            max_bytes=min(settings.bucket_bytes, BUCKET),
        ):
            to = plan.trainer.first_of(bucket.stage)
            tensors = gather(plan, bucket.entries, sending.shards, settings.dtype, to=to)
            if rank != to or fault is not None:
                continue
            name = f"model-{rank:04d}-{files:05d}.safetensors"
            try:
                num_bytes += self._write(tensors, bucket.changed, name)
            except TrainerFault as failure:
                fault = failure
                continue
            files += 1
            num_tensors += sum(begins_tensor(name) for name, _ in tensors)
            urls = attempt.loading if bucket.changed else attempt.refitted
            devices = {
                attempt.layouts[x.url]: x.device
                for x in attempt.receivers
                if x.url in urls and verify.is_comparable(x.device)
            }
            (changed if bucket.changed else rest).add(tensors, devices)
        return SendReport(
            num_bytes,
            num_tensors,
            (changed.result(), rest.result()),
            {},
            None if fault is None else str(fault),
            is_own_fault=fault is not None,
        )

    def complete(self, sending: Sending, reports: Sequence[SendReport]) -> int:
        attempt, servers = sending.attempt, sending.servers
        assert servers is not None
        ready = self.folder / READY
        with _writing(self.folder):
            os.rename(self.folder / PARTIAL, ready)
            filled = {name: any((ready / name).iterdir()) for name in (CHANGED, REST)}
        for name, urls in ((CHANGED, attempt.loading), (REST, attempt.refitted)):
            if filled[name]:
                body = {
                    "model_path": str((ready / name).resolve()),
                    "load_format": "safetensors",
                    "flush_cache": sending.settings.pause_mode == "retract",
                }
                servers.request_each("/update_weights_from_disk", dict.fromkeys(urls, body))
        expected = {}
        for receiver in attempt.receivers:
            url = receiver.url
            if url in attempt.loading and verify.is_comparable(receiver.device):
                parts = [report.sums[0] for report in reports]
                parts += [report.sums[1] for report in reports] if url in attempt.refitted else []
                expected[url] = verify.joined(parts, attempt.layouts[url])
        return verify.check_checksums(servers, expected)

    def close(self) -> None:
        if self._owns_folder:
            self._remove()

    def _write(self, tensors: NamedTensors, changed: bool, name: str) -> int:
        folder = self.folder / PARTIAL / (CHANGED if changed else REST)
        held = {name: tensor.contiguous().cpu() for name, tensor in hub_tensors(tensors)}
        with _writing(self.folder):
            save_file(held, folder / name)
        return sum(tensor.nbytes for tensor in held.values())

    def _remove(self) -> None:
        for name in (PARTIAL, READY):
            shutil.rmtree(self.folder / name, ignore_errors=True)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        # The attempt has failed, and its files may be the ones that fill the disk.
        shutil.rmtree(folder / PARTIAL, ignore_errors=True)
        raise TrainerFault(f"{folder} cannot be written: {error}") from error
