"""Transport from rank 0 to servers on its machine: through shared memory on a CPU, through CUDA IPC
between GPUs. CPU servers that the trainer did not start may be on another machine, so they get
tensors by value.

Each rank of a server receives only its own slices, cut and fused as it stores them. They come as
one flat tensor that the megavlm loader in the server copies into place: no byte is sent twice, the
server cuts nothing, and all servers get a bucket at once, in one request each. Parameters that
cannot be loaded in slices (`server_parameters.loaded_in_slices`) are sent whole in the same
request. A server that was started without the megavlm loader takes whole tensors under HF names.

Between GPUs a server's rank reads its slices from rank 0's GPU, so servers must see that GPU.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from megavlm.config.transports import TRANSPORT_TRAITS
from megavlm.inference.server_main import LOADERS
from megavlm.parallel import platform
from megavlm.parallel.shared_file import shared_file
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.server_parameters import Flat, rank_slices
from megavlm.weight_sync.sglang_layout import ServerLayout, hub_tensors
from megavlm.weight_sync.transports.base import Delivery
from megavlm.weight_sync.transports.payload import flatten, payload
from megavlm.weight_sync.update import SyncAttempt, TensorBucket

UPDATE = "/update_weights_from_tensor"


class TensorTransport:
    traits = TRANSPORT_TRAITS["tensor"]

    def open(self, servers: Servers, attempt: SyncAttempt) -> Delivery:
        return TensorDelivery(servers, attempt)

    def close(self) -> None:
        pass


class TensorDelivery(Delivery):
    def __init__(self, servers: Servers, attempt: SyncAttempt) -> None:
        self._servers, self._attempt = servers, attempt

    def send(self, bucket: TensorBucket) -> int:
        attempt, bodies, num_bytes = self._attempt, dict[str, Mapping[str, Any]](), 0
        made: dict[tuple[ServerLayout, frozenset[str]], list[Flat]] = {}
        whole: tuple[Tensor, Any] | None = None
        local = {receiver.url for receiver in attempt.receivers if receiver.node == 0}
        with _Texts() as texts:  # tensors and files live until all servers have answered
            for url in bucket.urls:
                layout, names = attempt.layouts[url], attempt.parameters.get(url)
                if names is not None:
                    if (layout, names) not in made:
                        made[layout, names] = rank_slices(bucket.tensors, layout, names)
                    flats = made[layout, names]
                    contents = [texts.of_slices(flat, is_local=url in local) for flat in flats]
                    num_bytes += sum(flat.tensor.nbytes for flat in flats)
                    bodies[url] = _body(LOADERS[0], contents)
                else:
                    whole = whole or flatten([*hub_tensors(bucket.tensors)])
                    content = {"flattened_tensor": whole[0], "metadata": whole[1]}
                    contents = [texts.of(whole[0], content) for _ in range(layout.tensor_parallel)]
                    num_bytes += whole[0].nbytes * layout.tensor_parallel
                    bodies[url] = _body("flattened_bucket", contents)
            platform.synchronize()  # servers may read the tensors as soon as they have the request
            self._servers.request_each(UPDATE, bodies)
        return num_bytes


class _Texts(ExitStack):
    """Serialized tensors of a bucket. CPU tensors are serialized only once; shared files are
    deleted when it is closed.

    Each rank of a server needs its own CUDA IPC handle of a GPU tensor: a handle counts a single
    receiver, so a shared handle would count as released while some receivers still read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[tuple[int, bool], str] = {}  # (id of a tensor, True for a file) -> text

    def of(self, tensor: Tensor, content: Any) -> str:
        """Serialize `content`, which contains the tensor by value or by handle."""
        if tensor.is_cuda:
            return payload(content)
        key = id(tensor), False
        if key not in self._made:
            self._made[key] = payload(content)
        return self._made[key]

    def of_slices(self, flat: Flat, *, is_local: bool) -> str:
        """Serialize one rank's slices for the megavlm loader in the server. is_local: True if the
        server can map this process's memory.
        """
        if not is_local or flat.tensor.is_cuda:
            return self.of(flat.tensor, [(json.dumps(flat.described()), flat.tensor)])
        key = id(flat.tensor), True
        if key not in self._made:
            path = self.enter_context(shared_file(flat.tensor.view(torch.uint8).numpy().data))
            described = flat.described() | {"file": path}
            self._made[key] = payload([(json.dumps(described), torch.empty(0))])
        return self._made[key]


def _body(load_format: str, contents: list[str]) -> dict[str, Any]:
    return {
        "serialized_named_tensors": contents,
        "load_format": load_format,
        "flush_cache": False,
    }
