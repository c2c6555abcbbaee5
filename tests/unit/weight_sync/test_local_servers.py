import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.inference.server_pool.receivers import Receiver
from megavlm.inference.server_support.megavlm_weights import load_slices
from megavlm.weight_sync.server_api import Servers, control_client
from megavlm.weight_sync.sglang_layout import ServerLayout
from megavlm.weight_sync.transports.tensor import TensorTransport
from megavlm.weight_sync.update import SyncAttempt, TensorBucket
from tests.fakes.engine import unpack
from tests.fakes.server import FakeServer

NAME = "model.norm.weight"
WEIGHT = torch.rand(2**18)


class Loading(FakeServer):
    """A server that loads what it is sent into `model`, and keeps the size of each request."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.model, self.sizes = torch.nn.Module(), list[int]()
        self.model.model = torch.nn.Module()
        self.model.model.norm = torch.nn.LayerNorm(len(WEIGHT), bias=False)

    def answer(self, path: str, body: Any) -> Any:
        if path == "/update_weights_from_tensor":
            self.sizes.append(len(json.dumps(body)))
            load_slices(self.model, unpack(body["serialized_named_tensors"][0]))
            return {"success": True}
        return super().answer(path, body)


def open_files() -> list[str]:
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return [os.readlink(path) for path in paths]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_local_server_maps_what_another_is_sent(dtype: torch.dtype) -> None:
    with Loading() as local, Loading() as other, control_client() as http:
        urls = (local.url, other.url)
        nodes = {local.url: 0, other.url: None}
        receivers = tuple(Receiver(url, 1, "cpu", False, node=nodes[url]) for url in urls)
        layouts = dict.fromkeys(urls, ServerLayout(1))
        names = dict.fromkeys(urls, frozenset({NAME}))
        attempt = SyncAttempt(receivers, layouts, (), urls, names)
        delivery = TensorTransport().open(Servers(receivers, http=http), attempt)
        sent = delivery.send(TensorBucket([(NAME, WEIGHT.to(dtype))], urls, changed=True))
    for server in (local, other):
        assert torch.equal(server.model.model.norm.weight.data, WEIGHT.to(dtype).float())
    num_bytes = len(WEIGHT) * dtype.itemsize
    assert sent == 2 * num_bytes, "what the ranks of servers receive"
    assert local.sizes[0] < 1000 and other.sizes[0] > num_bytes
    assert not [path for path in open_files() if "megavlm_weights" in path]
