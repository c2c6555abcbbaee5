"""`make bench`: bytes and seconds of weight syncs of a 0.3B Qwen2.5-VL in fp32, from two
tensor-parallel trainer ranks to the real SGLang server on this CPU, of one rank and of two.

Everything (what peers send), what training changes beside a frozen tower, adapters merged, and
adapters as such; by each transport. `least`: what the ranks of the server store of what changed.
Seconds are medians of three, and mean little across machines; most of them are the server's, which
loads and hashes on the trainer's cores.

`bench_deltas`: whole weights and changes of them. `bench_buckets`: seconds against the number of
buckets.
"""

import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from megavlm.config.lora import LoRA
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.lora import add_adapters
from megavlm.parallel.mesh import Layout
from megavlm.planner.weight_updates import stored_bytes
from megavlm.weight_sync.lora import AdapterWeights
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks
from megavlm.weight_sync.schedule import Server, make_schedule
from megavlm.weight_sync.sglang_layout import ServerLayout
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.trainable import trained_entries
from megavlm.weight_sync.transports.base import Transport
from megavlm.weight_sync.transports.disk import DiskTransport
from megavlm.weight_sync.transports.distributed import DistributedTransport
from megavlm.weight_sync.transports.tensor import TensorTransport
from megavlm.weight_sync.update import SyncReport, SyncSettings
from tests.benchmarks.bench_model import SIZES
from tests.fakes.engine import GlooEngine
from tests.fakes.receivers import FixedReceivers
from tests.parity.inputs import QUESTION
from tests.parity.runs import build
from tests.parity.table import Ranks
from tests.support.fork import launch
from tests.support.servers import run_server
from tests.unit.weight_sync.test_slices import SERVER, SHAPES, make_plan, pushes

REPEATS = 3
SETTINGS = LoRA(rank=16, alpha=32.0)
MODULES = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
TRANSPORTS = ("tensor", "distributed", "disk")


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
        with run_server(server):
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
        return WeightSync(
            plan,
            chunks,
            transport(kind, scratch),
            SyncSettings(torch.float32, num_kv_heads=heads),
            receivers=FixedReceivers([receiver]) if mesh.is_driver else None,
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
    """Bytes that all ranks of the server received (of files: once), and seconds."""
    reports = [sync.update_weights(version, full=full) for version in range(1 + REPEATS)][1:]
    return reports[0].bytes, statistics.median(report.seconds for report in reports)


def bench_deltas(tmp_path: Path) -> None:
    """Changes beside whole weights in one run, after steps of Adam at a learning rate of 1e-6, in
    bfloat16 to a server of two ranks.
    """
    folder = tmp_path / "model"
    make_tiny_model(folder, [QUESTION] * 10, seed=0, family="qwen2_5_vl", **SIZES["0.3B"])
    options = ServerOptions(folder, dtype="bfloat16", device="cpu", tensor_parallel=2)
    server = ManagedServer(options, log_path=tmp_path / "server.log", start_timeout=900.0)
    with run_server(server):
        keys = {"api_key": server.api_key, "admin_key": server.admin_key}
        receiver = Receiver(server.url, 2, "cpu", False, **keys, node=0)
        for kind in ("tensor", "distributed"):
            reports, _ = launch(2, deltas, folder, receiver, kind, timeout=1800)
            print(f"\n{kind}")
            for report in reports:
                print(
                    f"  {report.bytes / 1e6:7.1f} MB {report.seconds:5.2f} s, density "
                    f"{report.density:.4f}",
                    flush=True,
                )


def deltas(folder: Path, receiver: Receiver, kind: str) -> list[SyncReport]:
    """On each rank: the reports of three updates with whole weights, and of three with changes."""
    config, options = AutoConfig.from_pretrained(folder), ModelOptions(dtype=torch.bfloat16)
    mesh, entries, chunks = build(folder, config, Ranks(Layout(tensor=2)), options)
    trainer = TrainerRanks.of(config, mesh.layout, mesh.world_size, options)
    plan = SyncPlan(entries, trainer, trained_entries(entries, options, None))
    heads = config.text_config.num_key_value_heads
    trained = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    main = [p.detach().float().requires_grad_() for p in trained]
    adam = torch.optim.Adam(main, lr=1e-6, betas=(0.9, 0.95))
    generator, reports = torch.Generator().manual_seed(0), []
    for delta in (False, True):
        sync = WeightSync(
            plan,
            chunks,
            transport(kind, folder),
            SyncSettings(torch.bfloat16, num_kv_heads=heads, delta=delta),
            receivers=FixedReceivers([receiver]) if mesh.is_driver else None,
            group=mesh.objects,
        )
        for version in range(1 + REPEATS):
            for own in main:
                own.grad = torch.randn(own.shape, generator=generator)
            adam.step()
            for own, p in zip(main, trained, strict=True):
                p.data.copy_(own.data)
            report = sync.update_weights(version)
            reports += [report] if version else []
        sync.close()
    return reports


def bench_buckets(tmp_path: Path) -> None:
    """A fake server of two ranks in a process of its own, so that little but the messages counts:
    the same update from two stages in more and more buckets.
    """
    for kind in ("tensor", "distributed"):
        found = []
        for bucket in (2**14, 2**11, 2**9, 2**7):
            with GlooEngine(SHAPES) as engine:
                arguments = ([engine.url], range(1, 8), kind, bucket)
                result, _ = launch(2, pushes, *arguments, timeout=600)
            plan, servers = make_plan(2), [Server(engine.url, SERVER, True)]
            rounds = make_schedule(plan, servers, torch.float32, bucket).rounds
            found.append((rounds, statistics.median(x.seconds for x in result["reports"][1:])))
        (first, least), (last, most) = found[0], found[-1]
        print(f"\n{kind}: buckets and seconds", ", ".join(f"{n}: {s:.3f}" for n, s in found))
        print(f"  {1e3 * (most - least) / (last - first):.2f} ms a bucket")


def transport(kind: str, scratch: Path) -> Transport:
    if kind == "disk":
        return DiskTransport(scratch)
    if kind == "distributed":
        return DistributedTransport()
    return TensorTransport()
