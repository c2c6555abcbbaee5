"""Transport from rank 0 to servers on its machine: by value on a CPU, by CUDA IPC between GPUs.

A server of one rank takes a bucket as one flat tensor under HF names. A server of several ranks
gets `direct` loads: each rank receives only its own slices, cut and fused as it stores them, so
that no byte is sent twice and the server cuts nothing. Some tensors cannot be loaded directly:
those that a server keeps under another name or a second time (a tied head of its own, on CPUs with
AMX), and on a GPU the experts, whose rows its kernels may store in another order. They are sent
under their HF names, and the server's own loader cuts them; it reads only its slices if they come
by CUDA IPC.

Between GPUs a server's rank reads its slices out of rank 0's GPU, so servers must see that GPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megavlm.parallel import platform
from megavlm.weight_sync import checksums as verify
from megavlm.weight_sync.attempt import SyncAttempt, TensorBucket
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.sglang_layout import (
    ServerLayout,
    is_expert,
    parameter_name,
    server_tensors,
)
from megavlm.weight_sync.transports.payload import flatten, payload

UPDATE = "/update_weights_from_tensor"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class UpdateRequest:
    """Request bodies by URL. tensors: must live while servers read them by their CUDA handles."""

    bodies: Mapping[str, Mapping[str, Any]]
    tensors: Sequence[Tensor]
    num_bytes: int


class TensorTransport:
    by_stage = False
    in_session = True
    collective = False

    def open(self, servers: Servers, attempt: SyncAttempt) -> None:
        self._servers, self._layouts = servers, attempt.layouts
        self._devices = {target.url: target.device for target in attempt.targets}
        several = [url for url, layout in attempt.layouts.items() if layout.tensor_parallel > 1]
        self._names: dict[str, set[str]] = {}
        if several:
            bodies = dict.fromkeys(several, verify.CHECKSUM)
            answers = servers.request_each(verify.WEIGHTS_CHECKER, bodies)
            held = verify.read_checksums(servers, answers)
            self._names = {url: set(ranks[0]) for url, ranks in held.items()}

    def send(self, bucket: TensorBucket) -> int:
        num_bytes = 0
        for request in self._requests(bucket):
            platform.synchronize()  # servers may read the tensors as soon as they have the request
            self._servers.request_each(UPDATE, request.bodies)
            num_bytes += request.num_bytes
        return num_bytes

    def close(self, attempt: SyncAttempt | None = None) -> None:
        pass

    def _requests(self, bucket: TensorBucket) -> Iterator[UpdateRequest]:
        if whole := [url for url in bucket.urls if url not in self._names]:
            yield self._whole(bucket.tensors, whole)
        for url in bucket.urls:
            if url in self._names:
                yield from self._sliced(bucket.tensors, url)

    def _whole(self, tensors: Sequence[tuple[str, Tensor]], urls: Sequence[str]) -> UpdateRequest:
        flat, places = flatten(tensors)
        content = {"flattened_tensor": flat, "metadata": places}
        ranks = {url: self._layouts[url].tensor_parallel for url in urls}
        # A handle counts one receiver down: shared by several, it would count as released while
        # some of them still read. By value all get the same text.
        text = None if flat.is_cuda else payload(content)
        bodies = {
            url: _body("flattened_bucket", [text or payload(content) for _ in range(count)])
            for url, count in ranks.items()
        }
        return UpdateRequest(bodies, [flat], flat.nbytes * sum(ranks.values()))

    def _sliced(self, tensors: Sequence[tuple[str, Tensor]], url: str) -> Iterator[UpdateRequest]:
        layout, names, device = self._layouts[url], self._names[url], self._devices[url]
        direct = {name: x for name, x in tensors if loads_directly(name, names, layout, device)}
        if others := [(name, x) for name, x in tensors if name not in direct]:
            yield self._whole(others, [url])
        if direct:
            slices = [
                [(name, _own_storage(x)) for name, x in server_tensors(direct, layout, rank)]
                for rank in range(layout.tensor_parallel)
            ]
            sent = [tensor for of_rank in slices for _, tensor in of_rank]
            body = _body("direct", [payload(of_rank) for of_rank in slices])
            yield UpdateRequest({url: body}, sent, sum(tensor.nbytes for tensor in sent))


def loads_directly(
    hf_name: str, names: AbstractSet[str], layout: ServerLayout, device: str
) -> bool:
    """Return True if a server with parameters `names` stores what `server_tensors` makes."""
    name = parameter_name(hf_name)
    if device == "cuda" and is_expert(name):
        return False
    is_copied = name == EMBEDDING and layout.tied_embeddings and HEAD in names
    return name in names and not is_copied


def _body(load_format: str, contents: Sequence[str]) -> dict[str, Any]:
    return {
        "serialized_named_tensors": contents,
        "load_format": load_format,
        "flush_cache": False,
    }


def _own_storage(tensor: Tensor) -> Tensor:
    """Copy a view, because pickling by value includes the whole storage."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
