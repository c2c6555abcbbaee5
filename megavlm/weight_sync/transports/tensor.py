"""Transport from rank 0 to servers on its machine: by value on a CPU, by CUDA IPC between GPUs.

Each rank of a server receives only its own slices, cut and fused as it stores them, as one flat
tensor that our loader in the server copies into place: no byte is sent twice, the server cuts
nothing, and all servers get a bucket at once, in one request each. What cannot be loaded so
(`server_parameters.loaded_in_slices`) comes whole in the same request. A server that was started
without our loader takes whole tensors under HF names.

Between GPUs a server's rank reads its slices out of rank 0's GPU, so servers must see that GPU.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megavlm.inference.server_main import LOADERS
from megavlm.parallel import platform
from megavlm.weight_sync.attempt import SyncAttempt, TensorBucket
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.server_parameters import Flat, rank_slices
from megavlm.weight_sync.sglang_layout import ServerLayout, hub_tensors
from megavlm.weight_sync.transports.payload import flatten, payload

UPDATE = "/update_weights_from_tensor"


class TensorTransport:
    by_stage = False
    in_session = True
    slices = True

    def open(self, servers: Servers, attempt: SyncAttempt) -> None:
        self._servers, self._attempt = servers, attempt

    def send(self, bucket: TensorBucket) -> int:
        attempt, bodies, num_bytes = self._attempt, dict[str, Mapping[str, Any]](), 0
        # Servers of one kind get the same tensors, but each rank a handle of its own: a handle
        # counts one receiver down. Shared by several, it would count as released while some of
        # them still read. By value all get the same text. The tensors live until all have answered.
        made: dict[tuple[ServerLayout, frozenset[str]], list[Flat]] = {}
        texts: dict[int, str] = {}
        whole: tuple[Tensor, Any] | None = None

        def once(content: Any, flat: Tensor) -> str:
            if flat.is_cuda:
                return payload(content)
            if id(flat) not in texts:
                texts[id(flat)] = payload(content)
            return texts[id(flat)]

        for url in bucket.urls:
            layout, names = attempt.layouts[url], attempt.parameters.get(url)
            if names is not None:
                if (layout, names) not in made:
                    made[layout, names] = rank_slices(bucket.tensors, layout, names)
                flats = made[layout, names]
                contents = [once([(flat.text(), flat.tensor)], flat.tensor) for flat in flats]
                num_bytes += sum(flat.tensor.nbytes for flat in flats)
                bodies[url] = _body(LOADERS[0], contents)
            else:
                whole = whole or flatten([*hub_tensors(bucket.tensors)])
                content = {"flattened_tensor": whole[0], "metadata": whole[1]}
                contents = [once(content, whole[0]) for _ in range(layout.tensor_parallel)]
                num_bytes += whole[0].nbytes * layout.tensor_parallel
                bodies[url] = _body("flattened_bucket", contents)
        platform.synchronize()  # servers may read the tensors as soon as they have the request
        self._servers.request_each(UPDATE, bodies)
        return num_bytes

    def finish(self) -> None:
        pass

    def close(self, attempt: SyncAttempt | None = None) -> None:
        pass


def _body(load_format: str, contents: list[str]) -> dict[str, Any]:
    return {
        "serialized_named_tensors": contents,
        "load_format": load_format,
        "flush_cache": False,
    }
