"""Contents of a round of the distributed transport: the parts that stages broadcast, and the bodies
of rank 0's requests that let servers receive them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from megavlm.inference.server_main import LOADERS
from megavlm.parallel import platform
from megavlm.weight_sync.server_parameters import Flat, rank_slices
from megavlm.weight_sync.sglang_layout import ServerLayout, hub_tensors
from megavlm.weight_sync.transports.payload import payload
from megavlm.weight_sync.transports.rendezvous import Rendezvous
from megavlm.weight_sync.update import SyncAttempt, TensorBucket

Bodies = dict[str, dict[str, Any]]  # by URL


@dataclass(frozen=True)
class BroadcastPart:
    """One flat tensor of a bucket, broadcast by a stage in a group with ranks of servers.

    urls: The receiving servers. rank: Rank of each server that receives; None for all ranks. group:
    Name of the group. size: Number of ranks in the group, including the stage's sender. flat:
    Description by `Flat.described`.
    """

    urls: tuple[str, ...]
    rank: int | None
    group: str
    size: int
    flat: Mapping[str, Any]

    def values(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the part that `values` describes."""
        return cls(**{**values, "urls": tuple(values["urls"])})


def bucket_parts(
    bucket: TensorBucket, attempt: SyncAttempt, group: Callable[[tuple[str, ...], int | None], str]
) -> list[tuple[BroadcastPart, Tensor]]:
    """Split a bucket into non-empty broadcast parts, each with its tensor.

    group: Function that returns the group's name for some servers and a rank of them, or all ranks
    if None.
    """
    kinds: dict[tuple[ServerLayout, frozenset[str]] | None, list[str]] = {}
    for url in bucket.urls:
        names = attempt.parameters.get(url)
        kind = None if names is None else (attempt.layouts[url], names)
        kinds.setdefault(kind, []).append(url)
    parts = []
    for kind, members in kinds.items():
        urls, flats = tuple(members), dict[int | None, Flat]()
        if kind is None:
            flats[None] = Flat.of([], [*hub_tensors(bucket.tensors)])
            size = 1 + num_ranks(urls, attempt)
        else:
            flats.update(enumerate(rank_slices(bucket.tensors, *kind)))
            size = 1 + len(urls)
        for rank, flat in flats.items():
            if len(flat.tensor):
                part = BroadcastPart(urls, rank, group(urls, rank), size, flat.described())
                parts.append((part, flat.tensor))
    return parts


def slice_requests(
    parts: Sequence[BroadcastPart],
    attempt: SyncAttempt,
    rendezvous: Rendezvous,
    *,
    number: int,
    timeout: float,
) -> tuple[Bodies, dict[str, tuple[str, int]]]:
    """Build the requests to servers with the megavlm loaders, to receive the slices of all stages.
    Returns the bodies, and the keys in rank 0's store under which each (URL, rank) answers.

    number: Number of the round. timeout: Seconds for joining a group and receiving.
    """
    bodies, answers = Bodies(), dict[str, tuple[str, int]]()
    for place, url in enumerate(attempt.urls):
        mine = [part for part in parts if part.rank is not None and url in part.urls]
        if not mine:
            continue
        contents = []
        for rank in range(attempt.layouts[url].tensor_parallel):
            key = rendezvous.answer(number, place, rank)
            answers[key] = url, rank
            task = {
                "host": rendezvous.host,
                "port": rendezvous.port,
                "backend": platform.backend(),
                "timeout": timeout,
                "token": rendezvous.token,
                "fault": rendezvous.fault,
                "answer": key,
                "receive": [
                    (part.group, 1 + part.urls.index(url), part.size, part.flat)
                    for part in mine
                    if part.rank == rank
                ],
            }
            contents.append(payload([(json.dumps(task), torch.empty(0))]))
        bodies[url] = {
            "serialized_named_tensors": contents,
            "load_format": LOADERS[1],
            "flush_cache": False,
        }
    return bodies, answers


def invitations(part: BroadcastPart, attempt: SyncAttempt, rendezvous: Rendezvous) -> Bodies:
    """Build init_weights_update_group bodies, for servers without the megavlm loaders to join a
    part's group.
    """
    return {
        url: {
            "master_address": rendezvous.host,
            "master_port": rendezvous.port,
            "world_size": part.size,
            "group_name": part.group,
            "backend": platform.backend(),
            "rank_offset": 1 + num_ranks(part.urls[:place], attempt),
        }
        for place, url in enumerate(part.urls)
    }


def whole_requests(part: BroadcastPart) -> Bodies:
    """Build update_weights_from_distributed bodies, for servers without the megavlm loaders to
    receive a part.
    """
    names = [name for name, _ in part.flat["whole"]]
    body = {
        "names": names,
        "dtypes": [part.flat["dtype"]] * len(names),
        "shapes": [shape for _, shape in part.flat["whole"]],
        "group_name": part.group,
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }
    return dict.fromkeys(part.urls, body)


def num_ranks(urls: Sequence[str], attempt: SyncAttempt) -> int:
    """Return the total number of ranks of some servers."""
    return sum(attempt.layouts[url].tensor_parallel for url in urls)
