"""Verification of a weight update: the servers' weight version, and checksums of every tensor.

A server of several ranks reports the checksums of each rank's slices.
"""

import hashlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megavlm.parallel import platform
from megavlm.weight_sync.server_api import Answers, Servers
from megavlm.weight_sync.sglang_layout import ServerLayout, is_expert, server_tensors

WEIGHTS_CHECKER, CHECKSUM = "/weights_checker", {"action": "checksum"}
# Checksums by parameter name of each rank of a server, by the server's layout.
Expected = dict[ServerLayout, list[dict[str, str]]]


def check_version(servers: Servers, version: str) -> None:
    """Lose the servers that do not report `version` as their weight version."""
    path = "/model_info"
    reported = servers.read(path, servers.request_each(path), lambda info: info["weight_version"])
    for url, found in reported.items():
        if found != version:
            servers.lose(
                url, f"{url} reports weight version {found!r} after an update to {version!r}"
            )


def is_comparable(device: str) -> bool:
    """Return True if the checksums of a server on `device` can be computed here.

    SGLang hashes a CPU's tensors with SHA-256, and a GPU's with a kernel of its own, which runs
    here too if this machine has a GPU and SGLang is installed.
    """
    if device == "cpu":
        return True
    return platform.has_gpu() and importlib.util.find_spec("sglang") is not None


def checksums(
    tensors: Sequence[tuple[str, Tensor]], devices: Mapping[ServerLayout, str]
) -> Expected:
    """Return the checksums that each rank of servers must have once it has loaded these HF tensors.

    devices: the device on which servers of each layout hash. Parts of one fused parameter must come
    together, as one mapping entry sends them. A GPU's experts are left out.
    """
    return {
        layout: [
            {
                name: tensor_hash(tensor, device)
                for name, tensor in server_tensors(dict(tensors), layout, rank)
                if device == "cpu" or not is_expert(name)
            }
            for rank in range(layout.tensor_parallel)
        ]
        for layout, device in devices.items()
    }


def tensor_hash(tensor: Tensor, device: str) -> str:
    """Compute the hash that SGLang's weights_checker reports for a tensor on `device`."""
    if device == "cpu":
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return hashlib.sha256(content.data).digest()[:8].hex()
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

    return f"{gpu_tensor_hash(tensor.detach().to(platform.device()).contiguous()):016x}"


def add_checksums(expected: Expected, more: Expected) -> None:
    """Add checksums of further tensors to `expected`."""
    for layout, ranks in more.items():
        held = expected.setdefault(layout, [{} for _ in ranks])
        for mine, theirs in zip(held, ranks, strict=True):
            mine |= theirs


def joined(parts: Iterable[Expected], layout: ServerLayout) -> list[dict[str, str]]:
    """Return the checksums of each rank of a server of this layout, from those of all senders."""
    together: Expected = {layout: [{} for _ in range(layout.tensor_parallel)]}
    for part in parts:
        add_checksums(together, {layout: part[layout]} if layout in part else {})
    return together[layout]


def check_checksums(servers: Servers, expected: Mapping[str, Sequence[Mapping[str, str]]]) -> int:
    """Lose the servers that hold another tensor than expected. Returns the number compared.

    expected: checksums of each rank by URL. The reason names the first tensor that differs.
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
    """Return the checksums by parameter name that each rank of each server reports.

    answers: to `CHECKSUM`. Servers that do not answer for all of their ranks are lost.
    """
    sizes = {target.url: target.tensor_parallel for target in servers.live}
    held = servers.read(
        WEIGHTS_CHECKER,
        answers,
        lambda answer: [dict(rank["checksums"]) for rank in answer["ranks"]],
    )
    for url in [url for url, ranks in held.items() if len(ranks) != sizes[url]]:
        servers.lose(
            url,
            f"{url}{WEIGHTS_CHECKER} answered for {len(held.pop(url))} of {sizes[url]} ranks",
        )
    return held


def _first_difference(
    ranks: Sequence[Mapping[str, str]], expected: Sequence[Mapping[str, str]]
) -> str | None:
    for rank, (held, wanted) in enumerate(zip(ranks, expected, strict=True)):
        for name, checksum in wanted.items():
            if held.get(name) != checksum:
                where = f" on its rank {rank}" if len(ranks) > 1 else ""
                return f"{name}{where} with checksum {held.get(name)} instead of {checksum}"
    return None
