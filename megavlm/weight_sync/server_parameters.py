"""Parameters that servers take in slices, and the slices of a bucket for each rank of a server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megavlm.inference.server_main import LOADERS
from megavlm.models.common.loading import EMBEDDING, HEAD
from megavlm.weight_sync import checksums as verify
from megavlm.weight_sync.server_api import Answers, Servers
from megavlm.weight_sync.sglang_layout import (
    ServerLayout,
    hub_tensors,
    is_expert,
    parameter_name,
    server_tensors,
)

# SGLang's MoE kernels on GPUs that store experts as they are loaded, without shuffling them.
PLAIN_KERNELS = ("auto", "triton")
NamedTensors = Sequence[tuple[str, Tensor]]


class ServerParameters:
    """Names of the parameters that servers take in slices, read once per server process."""

    def __init__(self) -> None:
        self._known: dict[str, frozenset[str]] = {}

    def read(
        self,
        servers: Servers,
        infos: Answers,
        layouts: Mapping[str, ServerLayout],
        urls: Sequence[str],
    ) -> dict[str, frozenset[str]]:
        """Return the names by URL. Servers without the megavlm loaders are left out.

        infos: Each server's /server_info. urls: Servers that will load weights. Servers that do not
        answer are marked as lost.
        """
        able = [
            receiver
            for receiver in servers.live
            if receiver.url in urls
            and {*LOADERS} <= {*(infos[receiver.url].get("custom_weight_loader") or ())}
        ]
        for receiver in able:
            if receiver.needs_all:  # it may be a new process
                self._known.pop(receiver.url, None)
        unknown = [receiver.url for receiver in able if receiver.url not in self._known]
        answers = servers.request_each(
            verify.WEIGHTS_CHECKER, dict.fromkeys(unknown, verify.CHECKSUM)
        )
        devices = {receiver.url: receiver.device for receiver in able}
        for url, ranks in verify.read_checksums(servers, answers).items():
            plain = devices[url] == "cpu" or infos[url].get("moe_runner_backend") in PLAIN_KERNELS
            names = loaded_in_slices(set(ranks[0]), layouts[url], with_experts=plain)
            # Servers of one kind share one set object, so that pickle sends it to the other ranks
            # only once.
            self._known[url] = next((x for x in self._known.values() if x == names), names)
        return {x.url: self._known[x.url] for x in able if x.url in self._known}


def loaded_in_slices(
    names: set[str], layout: ServerLayout, *, with_experts: bool
) -> frozenset[str]:
    """Return the names of a server's parameters that it stores exactly as `server_tensors` computes
    them.

    with_experts: True if the server's MoE kernels leave experts in order.
    """
    left_out = {name for name in names if is_expert(name) and not with_experts}
    if layout.tied_embeddings and HEAD in names:
        left_out.add(EMBEDDING)  # the server's own loader must copy it to its separate output head
    return frozenset(names - left_out)


@dataclass(frozen=True)
class Flat:
    """Tensors of a bucket, for one rank or a whole server, joined to one flat tensor.

    slices: Names (as in `server_tensors`) and shapes of the parts of parameters that come first.
    whole: Names and shapes of the HF tensors that follow.
    """

    slices: Sequence[tuple[str, list[int]]]
    whole: Sequence[tuple[str, list[int]]]
    tensor: Tensor

    @classmethod
    def of(
        cls, slices: Sequence[tuple[str, Tensor]], whole: Sequence[tuple[str, Tensor]]
    ) -> "Flat":
        tensors = [tensor for _, tensor in (*slices, *whole)]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)
        return cls(_shapes(slices), _shapes(whole), flat)

    def described(self) -> dict[str, Any]:
        """Return the description that the megavlm loaders in the server read."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return {"dtype": dtype, "slices": self.slices, "whole": self.whole}


def rank_slices(
    tensors: NamedTensors, layout: ServerLayout, parameters: frozenset[str]
) -> list[Flat]:
    """Return the flat tensor for each rank of a server: the rank's slices of these HF tensors,
    followed by whole tensors that cannot be loaded in slices.
    """
    sliced = {name: x for name, x in tensors if parameter_name(name, layout) in parameters}
    whole = [*hub_tensors((name, x) for name, x in tensors if name not in sliced)]
    return [
        Flat.of([*server_tensors(sliced, layout, rank)], whole)
        for rank in range(layout.tensor_parallel)
    ]


def _shapes(tensors: NamedTensors) -> list[tuple[str, list[int]]]:
    return [(name, [*tensor.shape]) for name, tensor in tensors]
