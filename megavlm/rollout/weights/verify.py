"""Whether servers hold what was sent: their version, and where it can be compared, checksums."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megavlm.rollout.errors import WeightSyncError
from megavlm.rollout.weights.servers import Servers

VOCAB_MULTIPLE = 64  # SGLang pads embedding and head to it with zero rows
# SGLang's fused parameters by the HF parts they are made of, in order.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# And its stacks of experts by those of the hub.
EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}


def check_version(servers: Servers, version: str) -> None:
    """WeightSyncError if a server does not say that its weights are `version`."""
    for url, info in zip(servers.urls, servers.get("/model_info"), strict=True):
        if info["weight_version"] != version:
            raise WeightSyncError(
                f"{url} says its weights are version {info['weight_version']!r} after a push of "
                f"version {version!r}"
            )


def comparable(servers: Servers) -> bool:
    """Whether the servers' checksums can be computed here.

    They can for servers of one rank on a CPU. SGLang hashes GPU tensors with a kernel of its own,
    and a rank of several hashes its slices.
    """
    infos = servers.get("/server_info")
    return all(info["device"] == "cpu" and int(info["tp_size"]) == 1 for info in infos)


def checksums(tensors: Sequence[tuple[str, Tensor]]) -> dict[str, str]:
    """Checksum by engine name of what a server must hold after it has loaded these HF tensors.

    Parts of one fused parameter must come together, as one mapping entry sends them.
    """
    return {
        name: hashlib.sha256(_bytes(tensor)).digest()[:8].hex()
        for name, tensor in engine_tensors(dict(tensors))
    }


def engine_tensors(hub_tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A one-rank engine's parameters, as SGLang's Qwen-VL models make them of HF tensors."""
    tensors = {_engine_name(name): tensor for name, tensor in hub_tensors.items()}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            padding = -tensor.shape[0] % VOCAB_MULTIPLE
            yield name, torch.nn.functional.pad(tensor, (0, 0, 0, padding))
        elif leaf == "experts":  # stacks, each expert's linear transposed
            yield f"{module}.{EXPERTS[kind]}", tensor.transpose(1, 2)
        elif leaf == "qkv":  # the tower's, already fused
            yield f"{parent}.qkv_proj.{kind}", tensor
        elif fused := next((fused for fused, parts in FUSED.items() if leaf in parts), None):
            if leaf == FUSED[fused][0]:
                parts = [tensors[f"{parent}.{part}.{kind}"] for part in FUSED[fused]]
                yield f"{parent}.{fused}.{kind}", torch.cat(parts)
        else:
            yield name, tensor


def _engine_name(name: str) -> str:
    """Without what Qwen3-VL's hub files add to the names of the older families."""
    for long, short in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def check_checksums(servers: Servers, expected: Mapping[str, str]) -> None:
    """WeightSyncError that names the first tensor whose checksum on a server is another."""
    answers = servers.post("/weights_checker", {"action": "checksum"})
    for url, answer in zip(servers.urls, answers, strict=True):
        held = answer["ranks"][0]["checksums"]
        for name, checksum in expected.items():
            if held.get(name) != checksum:
                raise WeightSyncError(
                    f"{url} holds {name} with checksum {held.get(name)} instead of {checksum}"
                )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
