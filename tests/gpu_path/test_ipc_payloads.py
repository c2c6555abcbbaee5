"""GPU memory that a trainer rank hands to servers: the buffers of the `tensor` transport, as the
loader in the server opens them, and adapters, as SGLang's own code takes them apart. Of the calls
that need a GPU, those that share and map memory are replaced.
"""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.storage import TypedStorage

from megavlm.inference.server_args import ServerOptions
from megavlm.inference.server_support import megavlm_weights
from megavlm.parallel import platform
from megavlm.weight_sync.transports import tensor
from megavlm.weight_sync.transports.payload import flatten, payload
from tests.support.forked_servers import forking_servers
from tests.support.timeouts import scaled

pytestmark = pytest.mark.sglang

RECEIVER = Path(__file__).with_name("sglang_receiver.py")
SUPPORT = Path(megavlm_weights.__file__).parent
OFFSET = 512


class SenderMemory:
    """Memory of the sender's GPU. A shared storage lies at an offset of an allocation, which its
    handle names, and has a counter of receivers of its own.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocations: dict[bytes, bytes] = {}
        memory = self

        def share(storage: Any) -> tuple[Any, ...]:
            untyped = getattr(storage, "_untyped_storage", storage)
            handle = f"handle {len(memory.allocations)}".encode().ljust(66)
            content = torch.empty(0, dtype=torch.uint8).set_(untyped).numpy().tobytes()
            memory.allocations[handle] = bytes(OFFSET) + content
            counter = len(memory.allocations)
            return 0, handle, len(content), OFFSET, b"counters", counter, b"event", True

        for kind in (TypedStorage, torch.UntypedStorage):
            monkeypatch.setattr(kind, "_share_cuda_", share)
        monkeypatch.setattr(
            torch.UntypedStorage, "device", property(lambda self: torch.device("cuda", 0))
        )
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
        monkeypatch.setattr(platform, "device_uuid", lambda index: "GPU-of-the-sender")


def test_each_reader_opens_the_senders_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a handle of its own, whose count of readers is another; the reader's process numbers its
    GPUs in another order, or does not see the sender's.
    """
    buffers = torch.arange(96, dtype=torch.uint8).view(2, 48)
    with monkeypatch.context() as patch:
        memory = SenderMemory(patch)
        places = [json.loads(json.dumps(tensor._handle(buffers))) for _ in range(2)]
    counters = []

    def opened(device: int, handle: bytes, size: int, start: int, *rest: Any) -> Any:
        assert uuids[device] == "GPU-of-the-sender"
        counters.append(rest[:2])
        part = bytearray(memory.allocations[handle][start : start + size])
        return torch.frombuffer(part, dtype=torch.uint8).untyped_storage()

    uuids = ["GPU-of-the-server", "GPU-of-the-sender"]
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(opened))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index])
    )
    device = torch.device("cuda", 0)
    assert all(torch.equal(megavlm_weights._opened(place, device), buffers) for place in places)
    assert len({*counters}) == 2
    del uuids[1]
    with pytest.raises(OSError, match="cannot see the trainer's GPU GPU-of-the-sender"):
        megavlm_weights._opened(places[0], device)


@pytest.mark.slow
def test_sglang_takes_adapters_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With an odd number of elements before others, and a part of a larger storage."""
    cases, expected = [], []
    for dtype in (torch.bfloat16, torch.float32):
        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: torch.randn(shape, generator=generator).to(dtype)
            for name, shape in (("a", (7,)), ("b", (8, 6)), ("c", (128, 6)))
        }
        tensors["d"] = tensors["c"][:126]
        with monkeypatch.context() as patch:
            memory = SenderMemory(patch)
            flat, places = flatten([*tensors.items()])
            content = payload({"flattened_tensor": flat, "metadata": places})
        body = {"serialized_named_tensors": [content], "load_format": "flattened_bucket"}
        case = {"memory": memory.allocations, "bodies": [body], "parameters": [{}]}
        cases.append(case)
        expected.append(tensors)
    for wanted, ((found, _),) in zip(expected, received(cases, tmp_path), strict=True):
        assert found.keys() == wanted.keys()
        assert all(found[name].equal(tensor) for name, tensor in wanted.items())


def received(cases: list[Any], folder: Path) -> Any:
    sent, results = folder / "sent", folder / "results"
    sent.write_bytes(pickle.dumps(cases))
    environment = ServerOptions(Path("model"), dtype="bfloat16", device="cpu").environment()
    with forking_servers():
        done = subprocess.run(
            [sys.executable, "-P", str(RECEIVER), str(sent), str(results), str(SUPPORT)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=scaled(300),
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads(results.read_bytes())  # noqa: S301  # of our own program
