"""LoRA adapters that are sent unmerged: their names in PEFT, their layout over ranks, and this
rank's shards.

Only the linears that SGLang can adapt are covered: the language model's. The experts of a layer are
sent as stacks [E, rank, columns] and [E, rows, rank] for each projection, which SGLang reads as it
reads one pair for each expert (PEFT's form, with E times as many tensors).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megavlm.config.lora import LoRA
from megavlm.inference.protocol import ADAPTER_PREFIX
from megavlm.models.common.loading import MEMORY, stack_shape
from megavlm.models.common.lora import adapters
from megavlm.models.common.mapping import (
    COLUMNS,
    EXPERT_COLUMNS,
    REPLICATED,
    ROWS,
    Entry,
    ShardRule,
    keeps_order,
    same,
)
from megavlm.parallel.mesh import Layout
from megavlm.weight_sync.gather import LocalShard, NamedTensors, gather
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.sglang_layout import PIECE
from megavlm.weight_sync.trainable import adapted_entries, linear_name
from megavlm.weight_sync.transports.payload import flatten, payload

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterWeights:
    """The LoRA adapters of a run: the plan of their tensors, PEFT's configuration, and this rank's
    shards.
    """

    plan: SyncPlan
    config: dict[str, Any]
    shards: Mapping[int, LocalShard]

    @classmethod
    def of(
        cls,
        entries: Sequence[Entry],
        settings: LoRA,
        trainer: TrainerRanks,
        chunks: Iterable[MegatronModule],
        num_kv_heads: int,
    ) -> "AdapterWeights":
        """Collect the adapters of a model's chunks. Collective."""
        table = adapter_entries(entries, settings, trainer.layout, num_kv_heads)
        plan = SyncPlan(table, trainer, frozenset(range(len(table))))
        shards = adapter_shards(table, chunks)
        missing = plan.sent_from(dist.get_rank()) - shards.keys()
        assert not missing, f"no adapter {table[min(missing)].megatron} on this rank"
        return cls(plan, adapter_config(settings, entries), shards)

    def gather(self, dtype: torch.dtype) -> NamedTensors:
        """Gather all LoRA pairs on rank 0 under PEFT's names; other ranks return []. Collective."""
        every, pairs = range(len(self.plan.entries)), []
        for name, tensor in gather(self.plan, every, self.shards, dtype, to=0):
            stack = PIECE.fullmatch(name)
            pairs.append((stack[1], tensor.transpose(1, 2)) if stack else (name, tensor))
        return pairs


def load_adapter(servers: Servers, name: str, config: dict[str, Any], tensors: NamedTensors) -> int:
    """Load a new adapter on every server. The server checks the SHA-256 of its tensors itself.

    Adapters that a server already has stay loaded. Returns the bytes of tensors that were sent.
    """
    flat, places = flatten(tensors)
    content = payload({"flattened_tensor": flat, "metadata": places})
    body = {
        "lora_name": name,
        "config_dict": config,
        "load_format": "flattened_bucket",
        "expected_checksums": {
            place.name: hashlib.sha256(
                flat[place.start_idx : place.end_idx].cpu().numpy().data
            ).hexdigest()
            for place in places
        },
    }
    ranks = {target.url: target.tensor_parallel for target in servers.live}
    # A failed update to the same version may have left the adapter there.
    servers.try_each("/unload_lora_adapter", {"lora_name": name}, ranks)
    servers.request_each(
        "/load_lora_adapter_from_tensors",
        {url: body | {"serialized_named_tensors": [content] * n} for url, n in ranks.items()},
    )
    return flat.nbytes * sum(ranks.values())


def unload_adapters(servers: Servers, *, but: str) -> None:
    """Unload every adapter except `but`, including adapters that earlier runs left on the
    servers.
    """
    path = "/v1/models"
    loaded = servers.read(
        path,
        servers.request_each(path),
        lambda answer: [str(model["id"]) for model in answer["data"]],
    )
    for url, names in loaded.items():
        for name in names:
            if name.startswith(ADAPTER_PREFIX) and name != but:
                servers.request_each("/unload_lora_adapter", {url: {"lora_name": name}})


def adapter_config(settings: LoRA, entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the content of PEFT's adapter_config.json."""
    indices = adapted_entries(entries, settings.targets)
    adapted = [entries[index] for index in indices]
    modules = {_leaf(name) for entry in adapted if entry.expert is None for name in entry.hf}
    modules |= {
        part for entry in adapted if entry.expert is not None for part in _projections(entry.hf[0])
    }
    return {
        "peft_type": "LORA",
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": sorted(modules),
        "bias": "none",
    }


def adapter_entries(
    entries: Sequence[Entry], settings: LoRA, layout: Layout, num_kv_heads: int
) -> list[Entry]:
    """Return a mapping table of A [rank, columns] and B [rows, rank] of each HF projection.

    Every rank holds B whole in two cases: for queries, keys and values if there are more
    tensor-parallel ranks than key-value heads, and for a fused linear whose order of rows differs
    from HF's, on the ranks together.
    """
    table: list[Entry] = []
    adapted = [entries[i] for i in sorted(adapted_entries(entries, settings.targets))]
    for _, group in groupby(adapted, key=lambda entry: entry.megatron):
        experts = list(group)
        entry = experts[0]
        if entry.expert is not None:
            table += _expert_entries(experts, settings.rank)
            continue
        name = linear_name(entry)
        whole = (
            not keeps_order(entry)
            or (len(entry.hf) == 3 and layout.tensor > num_kv_heads)
            or (len(entry.hf) < entry.shard.parts and layout.tensor > 1)
        )
        rows_cut = entry.shard.dim == 0 and not whole
        for hf, (rows, columns) in zip(entry.hf, entry.hf_shapes, strict=True):
            part, peft = _leaf(hf), PEFT_PREFIX + hf.removesuffix(".weight")
            a, b = (settings.rank, columns), (rows, settings.rank)
            cut = COLUMNS if entry.shard == COLUMNS else REPLICATED
            table.append(same(f"{name}.lora_A.{part}", f"{peft}.lora_A.weight", a, cut))
            cut = ROWS if rows_cut else REPLICATED
            table.append(same(f"{name}.lora_B.{part}", f"{peft}.lora_B.weight", b, cut))
    return table


def adapter_shards(
    entries: Sequence[Entry], chunks: Iterable[MegatronModule]
) -> Mapping[int, LocalShard]:
    """Return this rank's shards, by index in `adapter_entries`."""
    table = {entry.megatron: index for index, entry in enumerate(entries)}
    return {table[key]: tensor.detach for chunk in chunks for key, tensor in _held(chunk)}


def adapter_bytes(entries: Sequence[Entry], indices: Iterable[int], rank: int, size: int) -> int:
    """Return the bytes of the LoRA pairs on some weights. indices: Entries of these weights. rank:
    LoRA rank. size: Bytes per number.
    """
    total = 0
    for index in indices:
        entry = entries[index]
        if entry.expert is None:
            total += sum(rank * (rows + columns) for rows, columns in entry.hf_shapes)
        else:  # gate and up are separate projections
            _, rows, columns = stack_shape(entry, entry.hf_shapes[0], MEMORY)
            parts = entry.shard.parts
            total += rank * (rows + parts * columns)
    return total * size


def _held(chunk: MegatronModule) -> Iterator[tuple[str, Tensor]]:
    for name, layer in adapters(chunk):
        for part, a, b in layer.pairs():
            yield f"{name}.lora_A.{part.name}", a
            yield f"{name}.lora_B.{part.name}", b


def _expert_entries(experts: Sequence[Entry], rank: int) -> Iterator[Entry]:
    """Yield the entries of the pairs on one linear of a layer's experts. The experts of a stack
    follow each other.
    """
    first = experts[0]
    (hf,), (count, rows, columns) = first.hf, stack_shape(first, first.hf_shapes[0], MEMORY)
    parts, name = _projections(hf), linear_name(first)
    assert name is not None
    down = first.shard == EXPERT_COLUMNS
    place, _, linear = name.rpartition(".")
    for part in parts:
        peft = f"{PEFT_PREFIX}{hf.rpartition('.')[0]}.{part}"
        for side, shape, dim in (
            ("lora_A", (count, rank, columns), 1 if down else None),
            ("lora_B", (count, rows // len(parts), rank), None if down else 0),
        ):
            cut = ShardRule(dim, axis="expert_tensor")
            for entry in experts:
                key = f"{place}.{entry.expert}.{linear}.{side}.{part}"
                stack = same(key, f"{peft}.{side}.weight", shape, cut)
                yield replace(stack, expert=entry.expert)


def _projections(hf: str) -> tuple[str, ...]:
    """Return the projections in a stack of experts."""
    leaf = _leaf(hf)
    return ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)


def _leaf(hf: str) -> str:
    """Return the name of a linear without its path."""
    return hf.removesuffix(".weight").rpartition(".")[2]
