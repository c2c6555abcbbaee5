"""From rank 0 to servers on its own machine: by value on a CPU, by CUDA IPC between GPUs.

A server of one rank takes a bucket as one flat tensor under HF names. A server of several gets
`direct` loads: each of its ranks finds its own slices alone, cut and fused as it stores them, so
that no byte is sent twice and nothing is cut there. Not all tensors can be loaded so: what an
engine keeps under another name, or a second time (a tied head of its own, on CPUs with AMX), and
on a GPU the experts, whose rows its kernels may store in another order, go under their HF names,
and the server's own loader cuts them. It reads its slices alone where they come by CUDA IPC.

Between GPUs a server's rank reads its slices out of rank 0's GPU, so servers must see that GPU.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from megavlm.parallel import platform
from megavlm.weight_sync import checksums as verify
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.sglang_layout import Engine, engine_tensors, is_expert, stored_name
from megavlm.weight_sync.transports.base import Load
from megavlm.weight_sync.transports.payload import flatten, payload

UPDATE = "/update_weights_from_tensor"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class TensorTransport:
    by_stage = False
    in_session = True
    together = False

    def prepare(self) -> None:
        pass

    def open(self, servers: Servers, engines: Mapping[str, Engine]) -> None:
        self._servers, self._engines = servers, engines
        self._devices = {target.url: target.device for target in servers.live}
        self._names: dict[str, set[str]] = {}
        several = [url for url, engine in engines.items() if engine.tensor_parallel > 1]
        for url, ranks in verify.held_checksums(servers, several).items():
            self._names[url] = set(ranks[0])

    def send(self, load: Load) -> int:
        sent = 0
        whole = [url for url in load.urls if url not in self._names]
        if whole:
            sent += self._send_whole(load.tensors, whole)
        for url in load.urls:
            if url in self._names:
                sent += self._send_direct(load.tensors, url)
        return sent

    def commit(self, servers: Servers, refitted: Sequence[str]) -> None:
        pass

    def abort(self, servers: Servers) -> None:
        pass

    def close(self) -> None:
        pass

    def _send_whole(self, tensors: Sequence[tuple[str, Tensor]], urls: Sequence[str]) -> int:
        flat, places = flatten(tensors)
        content = payload({"flattened_tensor": flat, "metadata": places})
        platform.synchronize()  # what the handles lead to must be there
        ranks = {url: self._engines[url].tensor_parallel for url in urls}
        self._servers.post_each(
            UPDATE,
            {
                url: {
                    "serialized_named_tensors": [content] * count,
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                for url, count in ranks.items()
            },
        )
        return flat.nbytes * sum(ranks.values())

    def _send_direct(self, tensors: Sequence[tuple[str, Tensor]], url: str) -> int:
        engine, names, device = self._engines[url], self._names[url], self._devices[url]
        direct = {name: x for name, x in tensors if loads_directly(name, names, engine, device)}
        others = [(name, x) for name, x in tensors if name not in direct]
        sent = self._send_whole(others, [url]) if others else 0
        if not direct:
            return sent
        slices = [
            [(name, _alone(x)) for name, x in engine_tensors(direct, engine, rank)]
            for rank in range(engine.tensor_parallel)
        ]
        contents = [payload(mine) for mine in slices]
        platform.synchronize()
        body = {
            "serialized_named_tensors": contents,
            "load_format": "direct",
            "flush_cache": False,
        }
        self._servers.post_each(UPDATE, {url: body})
        return sent + sum(tensor.nbytes for mine in slices for _, tensor in mine)


def loads_directly(hub_name: str, names: AbstractSet[str], engine: Engine, device: str) -> bool:
    """Whether an engine with parameters `names` holds the tensor as `engine_tensors` makes it."""
    name = stored_name(hub_name)
    if device == "cuda" and is_expert(name):
        return False
    is_copied = name == EMBEDDING and engine.tied_embeddings and HEAD in names
    return name in names and not is_copied


def _alone(tensor: Tensor) -> Tensor:
    """With a storage of its own: by value a whole storage travels."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
