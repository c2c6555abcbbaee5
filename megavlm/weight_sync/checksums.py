"""Verification of a weight update by the servers' weight version and the checksum of every tensor.

A server with several ranks reports the checksums of each rank's slices.
"""

import hashlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megavlm.parallel import platform
from megavlm.weight_sync.server_api import Answers, Servers
from megavlm.weight_sync.sglang_layout import (
    ServerLayout,
    is_expert,
    parameter_name,
    server_tensors,
)

WEIGHTS_CHECKER, CHECKSUM = "/weights_checker", {"action": "checksum"}
# Server layout -> for each rank of such a server, parameter name -> checksum.
Expected = dict[ServerLayout, list[dict[str, str]]]


def check_version(servers: Servers, version: str) -> None:
    """Mark servers as lost that do not report `version` as their weight version."""
    path = "/model_info"
    reported = servers.read(path, servers.request_each(path), lambda info: info["weight_version"])
    for url, found in reported.items():
        if found != version:
            servers.lose(
                url, f"{url} reports weight version {found!r} after an update to {version!r}"
            )


def is_comparable(device: str) -> bool:
    """Return True if the checksums of a server on `device` can be computed here.

    SGLang hashes tensors on a CPU with SHA-256, and tensors on a GPU with its own kernel. That
    kernel can run here if this machine has a GPU and SGLang is installed.
    """
    if device == "cpu":
        return True
    return platform.has_gpu() and importlib.util.find_spec("sglang") is not None


class Checksums:
    """Checksums that servers must report, computed from any number of buckets.

    Experts of GPU servers are left out, because MoE kernels may store them in another order.
    """

    def __init__(self) -> None:
        self._hashes: Expected = {}
        self._stacks: dict[tuple[ServerLayout, int, str], Any] = {}  # of experts, piece by piece

    def add(
        self, tensors: Sequence[tuple[str, Tensor]], devices: Mapping[ServerLayout, str]
    ) -> None:
        """Add the checksums that each rank of a server must report once it has loaded these HF
        tensors.

        devices: Device on which the servers of each layout hash. Parts of one fused parameter must
        come together, as one mapping entry sends them; pieces of a stack of experts must come in
        order.
        """
        others = [(name, x) for name, x in tensors if not is_expert(parameter_name(name))]
        for layout, device in devices.items():
            ranks = self._hashes.setdefault(layout, [{} for _ in range(layout.tensor_parallel)])
            for rank, hashes in enumerate(ranks):
                hashed = tensors if device == "cpu" else others
                for stored, tensor in server_tensors(dict(hashed), layout, rank):
                    name, piece, _ = stored.partition("[")
                    if not piece:
                        hashes[name] = tensor_hash(tensor, device)
                    else:
                        stack = self._stacks.setdefault((layout, rank, name), hashlib.sha256())
                        stack.update(_content(tensor))

    def result(self) -> Expected:
        """Return all checksums."""
        for (layout, rank, name), stack in self._stacks.items():
            self._hashes[layout][rank][name] = stack.digest()[:8].hex()
        return self._hashes


def tensor_hash(tensor: Tensor, device: str) -> str:
    """Compute the hash that SGLang's weights_checker reports for a tensor on `device`."""
    if device == "cpu":
        return hashlib.sha256(_content(tensor)).digest()[:8].hex()
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

    return f"{gpu_tensor_hash(tensor.detach().to(platform.device()).contiguous()):016x}"


def _content(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def joined(parts: Iterable[Expected], layout: ServerLayout) -> list[dict[str, str]]:
    """Merge the checksums from all sending ranks, for each rank of a server with this layout."""
    together: list[dict[str, str]] = [{} for _ in range(layout.tensor_parallel)]
    for part in parts:
        for mine, theirs in zip(together, part.get(layout, ()), strict=False):
            mine |= theirs
    return together


def check_checksums(servers: Servers, expected: Mapping[str, Sequence[Mapping[str, str]]]) -> int:
    """Mark servers as lost that hold a different tensor than expected. Returns the number of
    tensors compared.

    expected: Checksums of each rank, by URL. The reason names the first tensor that differs.
    """
    urls = [url for url, ranks in expected.items() if any(map(len, ranks))]
    answers = servers.request_each(WEIGHTS_CHECKER, dict.fromkeys(urls, CHECKSUM))
    count = 0
    for url, ranks in read_checksums(servers, answers).items():
        count += sum(map(len, expected[url]))
        if difference := _first_difference(ranks, expected[url]):
            servers.mismatched.add(url)
            servers.lose(url, f"{url} holds {difference}")
    return count


def read_checksums(servers: Servers, answers: Answers) -> dict[str, list[dict[str, str]]]:
    """Return the checksums, by parameter name, that each rank of each server reports.

    answers: The servers' answers to a `CHECKSUM` request. Servers that do not answer for all of
    their ranks are marked as lost.
    """
    sizes = {receiver.url: receiver.tensor_parallel for receiver in servers.live}
    held = servers.read(
        WEIGHTS_CHECKER,
        answers,
        lambda answer: [
            {draft_name(name): x for name, x in rank["checksums"].items()}
            for rank in answer["ranks"]
        ],
    )
    for url in [url for url, ranks in held.items() if len(ranks) != sizes[url]]:
        servers.lose(
            url,
            f"{url}{WEIGHTS_CHECKER} answered for {len(held.pop(url))} of {sizes[url]} ranks",
        )
    return held


def draft_name(name: str) -> str:
    """Return HF's name of a draft model's parameter (draft.model.norm.weight is mtp.norm.weight),
    and other names as they are.
    """
    prefix = "draft."
    if not name.startswith(prefix):
        return name
    return "mtp." + name.removeprefix(prefix).removeprefix("model.")


def _first_difference(
    ranks: Sequence[Mapping[str, str]], expected: Sequence[Mapping[str, str]]
) -> str | None:
    for rank, (held, wanted) in enumerate(zip(ranks, expected, strict=True)):
        for name, checksum in wanted.items():
            if held.get(name) != checksum:
                where = f" on its rank {rank}" if len(ranks) > 1 else ""
                return f"{name}{where} with checksum {held.get(name)} instead of {checksum}"
    return None
