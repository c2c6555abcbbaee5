"""A plan for people: what a sync sends, of which tensors, from which ranks, and what it must send.

Pure, on the meta device: no rank is started, and no memory taken.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megavlm.models.common.components import model_part
from megavlm.models.common.mapping import Entry
from megavlm.weight_sync.lora import adapter_bytes
from megavlm.weight_sync.plan import Plan, numel
from megavlm.weight_sync.sglang_layout import Engine, engine_tensors
from megavlm.weight_sync.trainable import adapted_entries


@dataclass(frozen=True)
class Serving:
    """The servers: how many, and each one's layout."""

    count: int
    engine: Engine


@dataclass
class Row:
    """Bytes of one class of tensors: all of them, those that training can change, and the pairs of
    adapters on them; `stored`: of what can change, by the server's rank that stores the most.
    `givers`: ranks that give what can change.
    """

    tensors: int = 0
    full: int = 0
    changed: int = 0
    adapters: int = 0
    stored: int = 0
    source_ranks: set[int] = field(default_factory=set)


def table(
    plan: Plan, serving: Serving, *, itemsize: int, lora: tuple[int, Sequence[str]]
) -> dict[str, Row]:
    """By class, in the model's order. `lora`: rank and targets of adapters, of a run that has some
    or of one that could.
    """
    rows: dict[str, Row] = {}
    adapted = adapted_entries(plan.entries, lora[1])
    names: dict[str, set[str]] = {}
    for index, entry in enumerate(plan.entries):
        row = rows.setdefault(model_part(entry.megatron), Row())
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
            plan.entries[i] for i in plan.changed if model_part(plan.entries[i].megatron) == name
        ]
        row.stored = max(stored_bytes(changed, serving.engine, itemsize))
    return rows


def stored_bytes(entries: Iterable[Entry], engine: Engine, itemsize: int) -> list[int]:
    """What each rank of a server stores of them: the least that it must be sent."""
    shapes = {name: shape for x in entries for name, shape in zip(x.hf, x.hf_shapes, strict=True)}
    tensors: Mapping[str, Tensor] = {
        name: torch.empty(shape, device="meta") for name, shape in shapes.items()
    }
    return [
        itemsize * sum(tensor.numel() for _, tensor in engine_tensors(tensors, engine, rank))
        for rank in range(engine.tensor_parallel)
    ]


def received(rows: Mapping[str, Row], serving: Serving) -> dict[str, int]:
    """Bytes that one rank of a server receives in a sync, by transport."""
    changed = sum(row.changed for row in rows.values())
    stored = sum(row.stored for row in rows.values())
    cut = serving.engine.tensor_parallel > 1  # then `tensor` sends each rank its own slices
    return {"tensor": stored if cut else changed, "distributed": changed, "disk": changed}


def render(
    rows: Mapping[str, Row], plan: Plan, serving: Serving, lora: tuple[int, Sequence[str]]
) -> str:
    """The table as text."""
    trainer, engine = plan.trainer, serving.engine
    layout = trainer.layout
    axes = [
        f"{a} {n}"
        for a in ("tensor", "context", "pipeline", "expert", "expert_tensor")
        if (n := getattr(layout, a)) > 1
    ]
    spread = f" (experts over {engine.expert_parallel})" if engine.expert_parallel > 1 else ""
    lines = [
        f"trainer: {trainer.world_size} ranks ({', '.join(axes) or 'one copy each'}); servers: "
        f"{serving.count} x {engine.tensor_parallel} ranks{spread}",
        "",
        f"{'':12}{'tensors':>9}{'all':>10}{'changed':>10}{'adapters':>10}{'stored':>10}   given by",
    ]
    total = Row()
    for name, row in rows.items():
        lines.append(_line(name, row))
        for part in ("tensors", "full", "changed", "adapters", "stored"):
            setattr(total, part, getattr(total, part) + getattr(row, part))
        total.source_ranks |= row.source_ranks
    lines += [_line("sum", total), ""]
    senders = [trainer.first_of(stage) for stage in range(layout.pipeline)]
    bound = total.stored
    lines.append(
        f"stored: what one rank of a server stores of what changes, and so the least that it "
        f"must be sent: {size(bound)} a sync."
    )
    for way, num_bytes in received(rows, serving).items():
        sent_by = "rank 0" if way == "tensor" else _ranks(senders)
        ratio = f", {num_bytes / bound:.2f} x the least" if bound else ""
        lines.append(f"  {way:12} each receives {size(num_bytes)}{ratio}; sent by {sent_by}")
    lines.append("At the start, and to a restarted server, everything goes: the column `all`.")
    lines.append(
        f"adapters: pairs of rank {lora[0]} on {', '.join(lora[1])}, which rollout.lora=adapter "
        "sends alone."
    )
    return "\n".join(lines)


def size(num_bytes: float) -> str:
    """In GB, MB or kB of a thousand."""
    for unit, count in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= count:
            return f"{num_bytes / count:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB" if num_bytes else "-"


def _line(name: str, row: Row) -> str:
    sizes = (row.full, row.changed, row.adapters, row.stored)
    cells = "".join(f"{size(num_bytes):>10}" for num_bytes in sizes)
    return f"{name:12}{row.tensors:>9}{cells}   {_ranks(row.source_ranks)}"


def _ranks(ranks: Iterable[int]) -> str:
    """Runs of neighbours: "0-3, 64"; of many, the first and how many."""
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
    return ("ranks " if len(ordered) > 1 else "rank ") + ", ".join(texts) if texts else "nobody"
