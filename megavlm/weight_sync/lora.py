"""Adapters as tensors of their own: PEFT's names, how ranks hold them, and this rank's part.

Covered: linears of the language model but experts, which SGLang's servers can adapt.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megavlm.config.lora import LoRA
from megavlm.models.common.lora import adapters
from megavlm.models.common.mapping import COLUMNS, REPLICATED, ROWS, Entry, same
from megavlm.parallel.mesh import Layout
from megavlm.weight_sync.gather import NamedTensors, gather
from megavlm.weight_sync.plan import Plan, TrainerRanks
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.shards import Shard
from megavlm.weight_sync.trainable import adapted_entries, linear_name
from megavlm.weight_sync.transports.payload import flatten, payload

PREFIX = "base_model.model."  # PEFT's
OURS = "megavlm-"


@dataclass(frozen=True)
class Adapters:
    """How adapters are sent as such: their table as a plan, PEFT's configuration, and this rank's
    parts.
    """

    plan: Plan
    config: dict[str, Any]
    shards: Mapping[int, Shard]

    @classmethod
    def of(
        cls,
        entries: Sequence[Entry],
        settings: LoRA,
        trainer: TrainerRanks,
        chunks: Iterable[MegatronModule],
        num_kv_heads: int,
    ) -> "Adapters":
        table = adapter_entries(entries, settings, trainer.layout, num_kv_heads)
        plan = Plan(table, trainer, frozenset(range(len(table))))
        shards = adapter_shards(table, chunks)
        missing = plan.given_by(dist.get_rank()) - shards.keys()
        assert not missing, f"no adapter {table[min(missing)].megatron} on this rank"
        return cls(plan, adapter_config(settings, entries), shards)

    def gather(self, dtype: torch.dtype) -> NamedTensors:
        """All pairs on rank 0 under PEFT's names, in the servers' type; empty on the others."""
        return gather(self.plan, range(len(self.plan.entries)), self.shards, dtype, to=0)


def adapter_name(version: int | str) -> str:
    """What a request names to be answered with the adapters of a weight version."""
    return f"{OURS}{version}"


def load_adapter(servers: Servers, name: str, config: dict[str, Any], tensors: NamedTensors) -> int:
    """Has every server load a new adapter beside those that it has, and check its tensors' SHA-256
    itself. Returns the bytes of tensors that were sent.
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
    # Left there by a push of the same version that failed.
    servers.try_each("/unload_lora_adapter", {"lora_name": name}, ranks)
    servers.post_each(
        "/load_lora_adapter_from_tensors",
        {url: body | {"serialized_named_tensors": [content] * n} for url, n in ranks.items()},
    )
    return flat.nbytes * sum(ranks.values())


def unload_adapters(servers: Servers, *, but: str) -> None:
    """Of what runs have left on servers, a push that failed among them, every adapter but one."""
    path = "/v1/models"
    loaded = servers.read(
        path, servers.get(path), lambda answer: [str(model["id"]) for model in answer["data"]]
    )
    for url, names in loaded.items():
        for name in names:
            if name.startswith(OURS) and name != but:
                servers.post_each("/unload_lora_adapter", {url: {"lora_name": name}})


def adapter_config(settings: LoRA, entries: Sequence[Entry]) -> dict[str, Any]:
    """PEFT's adapter_config.json."""
    indices = adapted_entries(entries, settings.targets)
    modules = {_leaf(name) for index in indices for name in entries[index].hf}
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
    """A table like a mapping, of A [rank, columns] and B [rows, rank] of each HF projection.

    Where there are more tensor-parallel ranks than key-value heads, every rank holds the B's of
    queries, keys and values whole.
    """
    table = []
    for index in sorted(adapted_entries(entries, settings.targets)):
        entry = entries[index]
        assert entry.expert is None, "experts' adapters have no PEFT names"
        name = linear_name(entry)
        whole = len(entry.hf) == 3 and layout.tensor > num_kv_heads
        rows_cut = entry.shard.dim == 0 and not whole
        for hf, (rows, columns) in zip(entry.hf, entry.hf_shapes, strict=True):
            part, peft = _leaf(hf), PREFIX + hf.removesuffix(".weight")
            a, b = (settings.rank, columns), (rows, settings.rank)
            cut = COLUMNS if entry.shard == COLUMNS else REPLICATED
            table.append(same(f"{name}.lora_A.{part}", f"{peft}.lora_A.weight", a, cut))
            cut = ROWS if rows_cut else REPLICATED
            table.append(same(f"{name}.lora_B.{part}", f"{peft}.lora_B.weight", b, cut))
    return table


def adapter_shards(
    entries: Sequence[Entry], chunks: Iterable[MegatronModule]
) -> Mapping[int, Shard]:
    """This rank's parts, by index of `adapter_entries`."""
    table = {entry.megatron: index for index, entry in enumerate(entries)}
    return {table[key]: tensor.detach for chunk in chunks for key, tensor in _held(chunk)}


def adapter_bytes(entries: Sequence[Entry], indices: Iterable[int], rank: int, size: int) -> int:
    """Of the pairs of rank `rank` on these weights, in numbers of `size` bytes."""
    total = 0
    for index in indices:
        entry = entries[index]
        if entry.expert is None:
            total += sum(rank * (rows + columns) for rows, columns in entry.hf_shapes)
        else:  # the hub's stacks hold [columns, rows]; gate and up are projections of their own
            _, columns, rows = entry.hf_shapes[0]
            parts = entry.shard.parts
            total += rank * (rows + parts * columns)
    return total * size


def _held(chunk: MegatronModule) -> Iterator[tuple[str, Tensor]]:
    for name, layer in adapters(chunk):
        for part, a, b in layer.pairs():
            yield f"{name}.lora_A.{part.name}", a
            yield f"{name}.lora_B.{part.name}", b


def _leaf(hf: str) -> str:
    match = re.fullmatch(r".*\.(\w+)\.weight", hf)
    assert match is not None, f"{hf} is no linear's weight"
    return match[1]
