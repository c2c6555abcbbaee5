"""Whether servers hold what was sent: their version, and checksums of every tensor.

A server of several ranks says what each of them holds: its slices.
"""

import hashlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megavlm.parallel import platform
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.sglang_layout import Engine, engine_tensors, is_expert

# Checksums by engine name, of each rank of a server, by the server's layout.
Expected = dict[Engine, list[dict[str, str]]]


def check_version(servers: Servers, version: str) -> None:
    """Loses the servers that do not say that their weights are `version`."""
    path = "/model_info"
    said = servers.read(path, servers.get(path), lambda info: info["weight_version"])
    for url, found in said.items():
        if found != version:
            servers.lose(
                url,
                f"{url} says its weights are version {found!r} after a push of version {version!r}",
            )


def is_comparable(device: str) -> bool:
    """Whether the checksums of a server on `device` can be computed here.

    SGLang hashes a CPU's tensors with SHA-256, and a GPU's with a kernel of its own, which runs
    here too where this is a GPU machine with SGLang installed.
    """
    if device == "cpu":
        return True
    return platform.has_gpu() and importlib.util.find_spec("sglang") is not None


def checksums(tensors: Sequence[tuple[str, Tensor]], engines: Mapping[Engine, str]) -> Expected:
    """Of what each rank of servers must hold once it has loaded these HF tensors. `engines`: the
    servers' layouts, and the devices that they hash on.

    Parts of one fused parameter must come together, as one mapping entry sends them. A GPU's
    experts are left out.
    """
    return {
        engine: [
            {
                name: tensor_hash(tensor, device)
                for name, tensor in engine_tensors(dict(tensors), engine, rank)
                if device == "cpu" or not is_expert(name)
            }
            for rank in range(engine.tensor_parallel)
        ]
        for engine, device in engines.items()
    }


def tensor_hash(tensor: Tensor, device: str) -> str:
    """As SGLang's weights_checker writes it, of a tensor that it has on `device`."""
    if device == "cpu":
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return hashlib.sha256(content.data).digest()[:8].hex()
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

    return f"{gpu_tensor_hash(tensor.detach().to(platform.device()).contiguous()):016x}"


def add(expected: Expected, more: Expected) -> None:
    for engine, ranks in more.items():
        held = expected.setdefault(engine, [{} for _ in ranks])
        for mine, its in zip(held, ranks, strict=True):
            mine |= its


def joined(parts: Iterable[Expected], engine: Engine) -> list[dict[str, str]]:
    """What each rank of a server of this layout must hold."""
    together: Expected = {engine: [{} for _ in range(engine.tensor_parallel)]}
    for part in parts:
        add(together, {engine: part[engine]} if engine in part else {})
    return together[engine]


def check_checksums(servers: Servers, expected: Mapping[str, Sequence[Mapping[str, str]]]) -> int:
    """Loses the servers that hold another tensor than expected, with the name of the first.
    `expected`: of each rank, by server. Returns how many tensors were compared.
    """
    asked = [url for url, ranks in expected.items() if any(map(len, ranks))]
    count = 0
    for url, ranks in held_checksums(servers, asked).items():
        count += sum(map(len, expected[url]))
        if difference := _first_difference(ranks, expected[url]):
            servers.mismatched.add(url)
            servers.lose(url, f"{url} holds {difference}")
    return count


def held_checksums(servers: Servers, urls: Iterable[str]) -> dict[str, list[dict[str, str]]]:
    """What each rank of some servers says it holds: checksums by engine name."""
    sizes = {target.url: target.tensor_parallel for target in servers.live}
    path = "/weights_checker"
    body = {"action": "checksum"}
    answers = servers.post_each(path, dict.fromkeys(urls, body))
    held = servers.read(
        path, answers, lambda answer: [dict(rank["checksums"]) for rank in answer["ranks"]]
    )
    for url in [url for url, ranks in held.items() if len(ranks) != sizes[url]]:
        servers.lose(url, f"{url}{path} answers for {len(held.pop(url))} of {sizes[url]} ranks")
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
