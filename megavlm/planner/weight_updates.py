"""`megavlm plan --sync`: shows the bytes that weight updates will send, and the ranks that send
them. Tensors are on the meta device and take no memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from megavlm.config.parallel import check_world
from megavlm.config.schema import Config
from megavlm.config.transports import TRANSPORT_TRAITS
from megavlm.families import family
from megavlm.model_config import model_config
from megavlm.models.common.components import model_part
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.layout_rules import check_model_layout
from megavlm.models.common.mapping import Entry, Shape
from megavlm.parallel.mesh import Layout
from megavlm.planner.rates import NODE
from megavlm.weight_sync.block_fp8 import VALUES
from megavlm.weight_sync.lora import adapter_bytes
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks, numel
from megavlm.weight_sync.sglang_layout import (
    ServerLayout,
    audio_head_dim,
    linear_rows,
    server_tensors,
    vision_head_dim,
)
from megavlm.weight_sync.trainable import adapted_entries, trained_entries

# LoRA adapters that are assumed for the table's column if the run has none.
ASSUMED_RANK, ASSUMED_TARGETS = 16, ("language.attention",)


def weight_update_table(config: Config, world_size: int) -> str:
    """Return the table of a run's weight updates as text.

    Raises ValueError if the layout does not fit the model or the world size.
    """
    hf_config = model_config(config.model.folder)
    text, options, axes = (
        hf_config.text_config,
        ModelOptions.from_config(config),
        Layout.from_config(config.parallel),
    )
    parts = family(hf_config.model_type)
    check_world(axes, world_size)
    check_model_layout(
        parts.architecture(hf_config), axes, options, vocab_size=text.vocab_size, recompute_layers=1
    )
    entries = parts.mapping(hf_config, draft_head=config.speculation.train)
    lora = config.lora
    trainer = TrainerRanks.of(hf_config, axes, world_size, options)
    changed = trained_entries(entries, options, lora.targets if lora.rank else None)
    plan = SyncPlan(entries, trainer, changed)
    servers = server_layout(config, hf_config)
    adapters = (lora.rank, lora.targets) if lora.rank else (ASSUMED_RANK, ASSUMED_TARGETS)
    rows = tensor_rows(plan, servers, itemsize=options.dtype.itemsize, lora=adapters)
    return _render(rows, plan, num_servers(config, world_size), servers, adapters)


def num_servers(config: Config, world_size: int) -> int:
    """Return the number of a recipe's servers, with `world_size` trainer GPUs."""
    rollout = config.rollout
    nodes = -(-world_size // NODE) if rollout.colocate else 1
    return len(rollout.urls) or rollout.servers * nodes


def server_layout(config: Config, hf_config: Any) -> ServerLayout:
    """Return the layout of a recipe's servers: how each shards the model."""
    rollout = config.rollout
    return ServerLayout(
        rollout.tensor_parallel,
        int(rollout.server_args.get("ep_size") or 1),
        hf_config.text_config.num_key_value_heads,
        bool(hf_config.tie_word_embeddings),
        linear_rows(hf_config.text_config),
        fp8=rollout.quantization == "fp8",
        vision_head_dim=vision_head_dim(hf_config.vision_config),
        audio_head_dim=audio_head_dim(hf_config),
        names=family(hf_config.model_type).server_names(),
    )


@dataclass
class TensorRow:
    """Bytes of one class of tensors.

    tensors: Number of HF tensors. full: Bytes of all tensors. changed: Bytes of the tensors that
    training can change. adapters: Bytes of LoRA pairs on these tensors. stored: Bytes of the
    changed tensors on the server rank that stores most of them. source_ranks: Trainer ranks that
    send changed tensors.
    """

    tensors: int = 0
    full: int = 0
    changed: int = 0
    adapters: int = 0
    stored: int = 0
    source_ranks: set[int] = field(default_factory=set)


def tensor_rows(
    plan: SyncPlan, servers: ServerLayout, *, itemsize: int, lora: tuple[int, Sequence[str]]
) -> dict[str, TensorRow]:
    """Return class of tensors -> row, in the model's order.

    itemsize: Bytes per number. lora: Rank and targets of the adapters.
    """
    rows: dict[str, TensorRow] = {}
    adapted = adapted_entries(plan.entries, lora[1])
    names: dict[str, set[str]] = {}
    for index, entry in enumerate(plan.entries):
        row = rows.setdefault(model_part(entry.megatron), TensorRow())
        num_bytes = numel(entry) * itemsize
        row.full += num_bytes
        names.setdefault(model_part(entry.megatron), set()).update(entry.hf)
        if index in plan.changed:
            row.changed += num_bytes
            row.source_ranks.update(plan.source_ranks[index])
        if index in adapted:
            row.adapters += adapter_bytes(plan.entries, [index], lora[0], itemsize)
    for name, row in rows.items():
        row.tensors = len(names[name])
        changed = [
            entry
            for entry in (plan.entries[i] for i in plan.changed)
            if model_part(entry.megatron) == name
        ]
        row.stored = max(stored_bytes(changed, servers, itemsize))
    return rows


def stored_bytes(entries: Iterable[Entry], servers: ServerLayout, itemsize: int) -> tuple[int, ...]:
    """Return the bytes of these entries that each rank of a server stores, without scales of block
    FP8. At least these must be sent.
    """
    shapes = {name: shape for x in entries for name, shape in zip(x.hf, x.hf_shapes, strict=True)}
    return _stored_bytes(tuple(shapes.items()), servers, itemsize)


@lru_cache  # the layouts of a search have the same servers
def _stored_bytes(
    shapes: tuple[tuple[str, Shape], ...], servers: ServerLayout, itemsize: int
) -> tuple[int, ...]:
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes}
    return tuple(
        sum(
            tensor.numel() * (VALUES.itemsize if servers.is_fp8(name) else itemsize)
            for name, tensor in server_tensors(tensors, servers, rank)
        )
        for rank in range(servers.tensor_parallel)
    )


def received_bytes(transport: str, changed: int, stored: int) -> int:
    """Return the bytes that one rank of a server receives in a weight sync.

    changed: Bytes of all tensors that training can change. stored: Bytes of them on this rank.
    """
    return stored if TRANSPORT_TRAITS[transport].needs_loader else changed


def _render(
    rows: Mapping[str, TensorRow],
    plan: SyncPlan,
    num_servers: int,
    servers: ServerLayout,
    lora: tuple[int, Sequence[str]],
) -> str:
    trainer, mesh = plan.trainer, plan.trainer.layout
    axes = [
        f"{a} {n}"
        for a in ("tensor", "context", "pipeline", "expert", "expert_tensor")
        if (n := getattr(mesh, a)) > 1
    ]
    spread = f" (experts over {servers.expert_parallel})" if servers.expert_parallel > 1 else ""
    lines = [
        f"trainer: {trainer.world_size} ranks ({', '.join(axes) or 'one copy each'}); servers: "
        f"{num_servers} x {servers.tensor_parallel} ranks{spread}",
        "",
        f"{'':12}{'tensors':>9}{'all':>10}{'changed':>10}{'adapters':>10}{'stored':>10}   sent by",
    ]
    total = TensorRow()
    for name, row in rows.items():
        lines.append(_line(name, row))
        for part in ("tensors", "full", "changed", "adapters", "stored"):
            setattr(total, part, getattr(total, part) + getattr(row, part))
        total.source_ranks |= row.source_ranks
    lines += [_line("sum", total), ""]
    senders = [trainer.first_of(stage) for stage in range(mesh.pipeline)]
    bound = total.stored
    lines.append(
        f"stored: bytes of the changed tensors on one rank of a server, the least that it must be "
        f"sent: {_size(bound)} an update."
    )
    for transport, traits in TRANSPORT_TRAITS.items():
        num_bytes = received_bytes(transport, total.changed, total.stored)
        sent_by = "all ranks alike" if traits.needs_loader else _ranks(senders)
        ratio = f", {num_bytes / bound:.2f} x the least" if bound else ""
        lines.append(f"  {transport:12} each receives {_size(num_bytes)}{ratio}; sent by {sent_by}")
    lines.append("At the start, and to a restarted server, every tensor is sent: the column `all`.")
    lines.append(
        f"adapters: LoRA pairs of rank {lora[0]} on {', '.join(lora[1])}, which "
        "rollout.lora=adapter sends instead."
    )
    return "\n".join(lines)


def _size(num_bytes: float) -> str:
    for unit, count in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= count:
            return f"{num_bytes / count:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB" if num_bytes else "-"


def _line(name: str, row: TensorRow) -> str:
    sizes = (row.full, row.changed, row.adapters, row.stored)
    cells = "".join(f"{_size(num_bytes):>10}" for num_bytes in sizes)
    return f"{name:12}{row.tensors:>9}{cells}   {_ranks(row.source_ranks)}"


def _ranks(ranks: Iterable[int]) -> str:
    """Format ranks as ranges such as "0-3, 64". Long lists show the first ranges and the number of
    ranks.
    """
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    if len(texts) > 4:
        return f"{', '.join(texts[:3])}, ... ({len(ordered)} ranks)"
    return ("ranks " if len(ordered) > 1 else "rank ") + ", ".join(texts) if texts else "no rank"
