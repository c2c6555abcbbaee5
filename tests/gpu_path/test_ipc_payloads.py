"""Weights that the `tensor` transport sends between GPUs, as SGLang's own code takes them apart. Of
the calls that need a GPU, those that share and map memory are replaced.
"""

import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.storage import TypedStorage

from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.inference.server_support import megavlm_weights
from megavlm.parallel import platform
from megavlm.weight_sync.server_api import Answers, Servers
from megavlm.weight_sync.server_parameters import loaded_in_slices
from megavlm.weight_sync.sglang_layout import ServerLayout, hub_tensors, server_tensors
from megavlm.weight_sync.transports.tensor import UPDATE, TensorTransport
from megavlm.weight_sync.update import SyncAttempt, TensorBucket
from tests.support.timeouts import scaled

pytestmark = pytest.mark.sglang

RECEIVER = Path(__file__).with_name("sglang_receiver.py")
SUPPORT = Path(megavlm_weights.__file__).parent
URLS, OFFSET = ("http://server", "http://other"), 512


class SenderMemory:
    """Memory of the sender's GPU. A shared storage lies at an offset of an allocation, which its
    handle names, and has a counter of receivers of its own.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocations: dict[bytes, bytes] = {}
        memory = self

        def share(storage: TypedStorage) -> tuple[Any, ...]:
            untyped = storage._untyped_storage
            handle = f"handle {len(memory.allocations)}".encode().ljust(66)
            content = torch.empty(0, dtype=torch.uint8).set_(untyped).numpy().tobytes()
            memory.allocations[handle] = bytes(OFFSET) + content
            counter = len(memory.allocations)
            return 0, handle, len(content), OFFSET, b"counters", counter, b"event", True

        monkeypatch.setattr(TypedStorage, "_share_cuda_", share)
        monkeypatch.setattr(
            torch.UntypedStorage, "device", property(lambda self: torch.device("cuda", 0))
        )
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
        monkeypatch.setattr(platform, "device_uuid", lambda index: "GPU-of-the-sender")


class Recorder(Servers):
    """Servers that record the updates."""

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        super().__init__(receivers, http=None)  # type: ignore[arg-type]
        self.bodies: dict[str, list[Mapping[str, Any]]] = {url: [] for url in URLS}

    def request_each(self, path: str, bodies: Any = None) -> Answers:
        assert path == UPDATE
        for url in URLS:
            self.bodies[url].append(bodies[url])
        return {}


def weights(dtype: torch.dtype) -> dict[str, Tensor]:
    """One layer, with an odd number of elements before others and a part of a larger storage."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    layer, stack = "model.language_model.layers.0", draw(4, 2, 6)
    return {
        "model.language_model.norm.weight": draw(7),
        f"{layer}.self_attn.q_proj.weight": draw(8, 6),
        f"{layer}.self_attn.k_proj.weight": draw(4, 6),
        f"{layer}.self_attn.v_proj.weight": draw(4, 6),
        f"{layer}.self_attn.o_proj.weight": draw(6, 8).t().contiguous().t(),
        f"{layer}.mlp.experts.gate_up_proj[1:4/8]": stack[:3, :, :4].contiguous(),
        f"{layer}.mlp.experts.down_proj[1:3/8]": stack[1:3],
        "lm_head.weight": draw(128, 6)[:126],
    }


def send(
    monkeypatch: pytest.MonkeyPatch, tensors: Mapping[str, Tensor], layout: ServerLayout
) -> tuple[SenderMemory, list[list[Mapping[str, Any]]], list[dict[str, Tensor]]]:
    """Send tensors in buckets of four to two servers, to those of one rank without our loaders.
    Returns the sender's memory, the request bodies of each server, and the parameters of each of a
    server's ranks.
    """
    ranks = [dict(server_tensors(tensors, layout, rank)) for rank in range(layout.tensor_parallel)]
    receivers = tuple(Receiver(url, layout.tensor_parallel, "cuda", True) for url in URLS)
    servers, layouts = Recorder(receivers), dict.fromkeys(URLS, layout)
    sliced = dict.fromkeys(URLS, loaded_in_slices({*ranks[0]}, layout, with_experts=False))
    if layout.tensor_parallel == 1:
        sliced = {}
    attempt = SyncAttempt(receivers, layouts, URLS, URLS, sliced)
    with monkeypatch.context() as patch:
        memory = SenderMemory(patch)
        delivery = TensorTransport().open(servers, attempt)
        items = list(tensors.items())
        for start in range(0, len(items), 4):
            delivery.send(TensorBucket(items[start : start + 4], URLS, True))
    return memory, list(servers.bodies.values()), ranks


@pytest.mark.slow
def test_every_rank_loads_what_was_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each receiver has a count of its own in the sender's counters: a count that several take
    down is at zero while some of them still read.
    """
    sizes = [(dtype, size) for dtype in (torch.bfloat16, torch.float32) for size in (1, 2)]
    cases, expected = [], []
    for dtype, size in sizes:
        layout, tensors = ServerLayout(size, num_kv_heads=2), weights(dtype)
        memory, bodies, ranks = send(monkeypatch, tensors, layout)
        shapes = [{name: (x.shape, x.dtype) for name, x in rank.items()} for rank in ranks]
        for its in bodies:
            cases.append({"memory": memory.allocations, "bodies": its, "parameters": shapes})
            expected.append([stored(tensors, layout, rank) for rank in range(size)])
    results = [*zip(cases, expected, received(cases, tmp_path), strict=True)]
    for servers in zip(results[::2], results[1::2], strict=True):
        opened: Counter[Any] = Counter()
        for _, of_ranks, loaded in servers:
            for wanted, (found, counters) in zip(of_ranks, loaded, strict=True):
                opened.update(counters)
                assert found.keys() == wanted.keys()
                for name, tensor in wanted.items():
                    assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name
        assert len(opened) == len(servers[0][0]["memory"]), "everything that was shared is read"
        assert set(opened.values()) == {1}


def stored(tensors: Mapping[str, Tensor], layout: ServerLayout, rank: int) -> dict[str, Tensor]:
    """What a rank is given to load: all tensors whole, or its slices and the experts whole."""
    if layout.tensor_parallel == 1:
        return dict(hub_tensors(tensors.items()))
    experts = {name: x for name, x in tensors.items() if ".experts." in name}
    others = {name: x for name, x in tensors.items() if name not in experts}
    return dict(hub_tensors(experts.items())) | dict(server_tensors(others, layout, rank))


def received(cases: list[Any], folder: Path) -> Any:
    sent, results = folder / "sent", folder / "results"
    sent.write_bytes(pickle.dumps(cases))
    environment = ServerOptions(Path("model"), dtype="bfloat16", device="cpu").environment()
    done = subprocess.run(
        [sys.executable, "-P", str(RECEIVER), str(sent), str(results), str(SUPPORT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=scaled(300),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads(results.read_bytes())  # noqa: S301  # of our own program
