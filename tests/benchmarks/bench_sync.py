"""`make bench`: bytes and seconds of weight syncs of a 0.3B Qwen2.5-VL in fp32, from two
tensor-parallel trainer ranks to the real SGLang server on this CPU, of one rank and of two.

Everything (what peers send), what training changes beside a frozen tower, adapters merged, and
adapters as such; by each transport. `least`: what the ranks of the server store of what changed.
Seconds are medians of three, and mean little across machines; most of them are the server's, which
loads and hashes on the trainer's cores.

`bench_stages`: a sync of everything by `distributed` from two pipeline stages, in slices and as a
server without our loaders takes it, whole tensors and a request a stage, in turn in one run.
`bench_buckets`: the largest bucket of a 235B model, by its plan.
"""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from megavlm.config.lora import LoRA
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.lora import add_adapters
from megavlm.parallel.mesh import Layout
from megavlm.run.capacity.weight_updates import stored_bytes
from megavlm.weight_sync.lora import AdapterWeights
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks, numel
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.sglang_layout import ServerLayout
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.trainable import trained_entries
from megavlm.weight_sync.transports.base import Transport
from megavlm.weight_sync.transports.disk import DiskTransport
from megavlm.weight_sync.transports.distributed import DistributedTransport
from megavlm.weight_sync.transports.tensor import TensorTransport
from megavlm.weight_sync.update import SyncSettings
from tests.benchmarks.bench_model import SIZES
from tests.fakes.receivers import FixedReceivers
from tests.parity.inputs import QUESTION
from tests.parity.runs import build
from tests.parity.table import Ranks
from tests.support.fork import launch
from tests.support.releases import released_config

REPEATS = 3
SETTINGS = LoRA(rank=16, alpha=32.0)
MODULES = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
TRANSPORTS = ("tensor", "value", "distributed", "disk")  # value: tensor to a server elsewhere


def bench_sync(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_tiny_model(folder, [QUESTION] * 10, seed=0, family="qwen2_5_vl", **SIZES["0.3B"])
    for ranks in (1, 2):
        server = ManagedServer(
            ServerOptions(
                folder,
                dtype="float32",
                device="cpu",
                tensor_parallel=ranks,
                server_args={
                    "enable_lora": True,
                    "max_lora_rank": SETTINGS.rank,
                    "lora_target_modules": MODULES,
                    "lora_backend": "torch_native",
                },
            ),
            log_path=tmp_path / f"server-{ranks}.log",
            start_timeout=900.0,
        )
        with server:
            keys = {"api_key": server.api_key, "admin_key": server.admin_key}
            receiver = Receiver(server.url, ranks, "cpu", False, **keys, node=0)
            print(f"\nserver of {ranks} rank{'s' if ranks > 1 else ''}")
            for adapted in (False, True):
                arguments = (folder, receiver, tmp_path / "sync", adapted)
                rows, _ = launch(2, measure, *arguments, timeout=1800)
                for what, way, num_bytes, least, seconds in rows:
                    print(
                        f"  {what:24}{way:13}{num_bytes / 1e6:9.1f} MB, {num_bytes / least:5.2f} x "
                        f"the least;  {seconds:6.2f} s",
                        flush=True,
                    )


def measure(folder: Path, receiver: Receiver, scratch: Path, adapted: bool) -> list[Any]:
    """On each rank: (what, transport, bytes, the least, seconds) of each kind of push."""
    config = AutoConfig.from_pretrained(folder)
    options = ModelOptions()
    mesh, entries, chunks = build(folder, config, Ranks(Layout(tensor=2)), options)
    trainer = TrainerRanks.of(config, mesh.layout, mesh.world_size, options)
    heads = config.text_config.num_key_value_heads
    if adapted:
        for chunk in chunks:
            add_adapters(chunk, SETTINGS)
    targets = SETTINGS.targets if adapted else None
    plan = SyncPlan(entries, trainer, trained_entries(entries, options, targets))
    pairs = AdapterWeights.of(entries, SETTINGS, trainer, chunks, heads) if adapted else None
    engine = ServerLayout(receiver.tensor_parallel, 1, heads)
    changed = sum(stored_bytes([entries[i] for i in plan.changed], engine, 4))
    everything = sum(stored_bytes(entries, engine, 4))

    def sync(kind: str, plan: SyncPlan, adapters: AdapterWeights | None = None) -> WeightSync:
        one = replace(receiver, node=None if kind == "value" else 0)
        return WeightSync(
            plan,
            chunks,
            transport(kind, scratch),
            SyncSettings(torch.float32, num_kv_heads=heads),
            receivers=FixedReceivers([one]) if mesh.is_driver else None,
            adapters=adapters,
            group=mesh.objects,
        )

    rows = []
    for kind in TRANSPORTS:
        one = sync(kind, plan)
        if adapted:
            rows.append(("adapters merged", kind, changed, timed(one)))
        else:
            rows.append(("everything", kind, everything, timed(one, full=True)))
            rows.append(("frozen tower left out", kind, changed, timed(one)))
        one.close()
    if pairs is not None:
        one = sync("tensor", SyncPlan(entries, trainer, frozenset()), pairs)
        least = receiver.tensor_parallel * sum(
            shape[0] * shape[1] * 4 for entry in pairs.plan.entries for shape in entry.hf_shapes
        )
        rows.append(("adapters as such", "http", least, timed(one)))
    return [(what, way, num_bytes, least, s) for what, way, least, (num_bytes, s) in rows]


def timed(sync: WeightSync, *, full: bool = False) -> tuple[int, float]:
    """Bytes that left the trainer for all ranks of the server (of files: once), and seconds."""
    reports = [sync.update_weights(version, full=full) for version in range(1 + REPEATS)][1:]
    return reports[0].bytes, statistics.median(report.seconds for report in reports)


def bench_stages(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_tiny_model(folder, [QUESTION] * 10, seed=0, family="qwen2_5_vl", **SIZES["0.3B"])
    for ranks in (1, 2):
        options = ServerOptions(folder, dtype="float32", device="cpu", tensor_parallel=ranks)
        log = tmp_path / f"server-{ranks}.log"
        with ManagedServer(options, log_path=log, start_timeout=900.0) as server:
            keys = {"api_key": server.api_key, "admin_key": server.admin_key}
            receiver = Receiver(server.url, ranks, "cpu", needs_all=False, **keys)
            (slices, whole), _ = launch(2, of_stages, folder, receiver, timeout=1800)
        print(f"\nserver of {ranks}: in slices, whole, ratio (median of {REPEATS})")
        for name, ours, theirs in zip(("seconds", "MB", "requests"), slices, whole, strict=True):
            print(f"  {name:10}{ours:9.1f}{theirs:9.1f}{theirs / ours:7.2f}", flush=True)


def of_stages(folder: Path, receiver: Receiver) -> list[list[float]]:
    """On each of two stages: seconds, MB that a rank of the server receives, requests with them."""
    config, options = AutoConfig.from_pretrained(folder), ModelOptions()
    mesh, entries, chunks = build(folder, config, Ranks(Layout(pipeline=2)), options)
    trainer = TrainerRanks.of(config, mesh.layout, mesh.world_size, options)
    plan = SyncPlan(entries, trainer, trained_entries(entries, options, None))
    heads, paths = config.text_config.num_key_value_heads, list[str]()
    request = Servers.request

    def counted(self: Servers, url: str, path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        paths.append(path)
        return request(self, url, path, *args, **kwargs)

    Servers.request = counted  # type: ignore[method-assign]
    syncs = []
    for slices in (True, False):
        way = DistributedTransport("127.0.0.1")
        way.traits = replace(way.traits, slices=slices)
        receivers = FixedReceivers([receiver]) if mesh.is_driver else None
        settings = SyncSettings(torch.float32, num_kv_heads=heads, bucket_bytes=2**26)
        syncs.append(
            WeightSync(plan, chunks, way, settings, receivers=receivers, group=mesh.objects)
        )
        syncs[-1].update_weights(0, full=True)
    seconds: list[list[float]] = [[], []]
    found = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    for version in range(1, 1 + REPEATS):
        for place, one in enumerate(syncs):
            paths.clear()
            report = one.update_weights(version, full=True)
            seconds[place].append(report.seconds)
            updates = sum("/update_weights_from" in path for path in paths)
            received = report.bytes / receiver.tensor_parallel / 1e6
            found[place] = [statistics.median(seconds[place]), received, updates]
    for one in syncs:
        one.close()
    return found


def bench_buckets(tmp_path: Path) -> None:
    config = released_config("Qwen3-VL-235B-A22B", tmp_path)
    entries = family(config.model_type).mapping(config)
    options = ModelOptions()
    trainer = TrainerRanks.of(config, Layout(tensor=4, pipeline=2, expert=8), 128, options)
    plan = SyncPlan(entries, trainer, trained_entries(entries, options, None))
    sizes: dict[bool, int] = {}
    for bucket in plan.buckets(full=False, itemsize=2, max_bytes=2**28):
        parts = [entries[index] for index in bucket.entries]
        kind = any(entry.expert is not None for entry in parts)
        sizes[kind] = max(sizes.get(kind, 0), 2 * sum(map(numel, parts)))
    stack = max(2 * math.prod(x.hf_shapes[0]) for x in entries if x.expert is not None)
    print(
        f"\n235B in bf16, buckets of 268 MB: the largest with experts {sizes[True] / 1e6:.0f} MB "
        f"(a whole stack: {stack / 1e6:.0f} MB), without {sizes[False] / 1e6:.0f} MB"
    )


def transport(kind: str, scratch: Path) -> Transport:
    if kind == "disk":
        return DiskTransport(scratch)
    if kind == "distributed":
        return DistributedTransport("127.0.0.1")
    return TensorTransport()
