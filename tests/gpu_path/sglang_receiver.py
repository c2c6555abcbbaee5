"""Program of the ranks of SGLang servers that receive adapters by CUDA IPC: SGLang's own code, but
for the calls that map another process's GPU memory, which read a file. Of megavlm it imports what
runs inside SGLang.

Arguments: a pickle with the cases, each the allocations of the sender's GPU, the request bodies and
the parameters of every rank; the file for what each rank of each case loaded and opened; the folder
of our weight loaders.
"""

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.common import normalize_serialized_named_tensor_payload
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from torch.storage import TypedStorage

# This process numbers its GPUs in another order than the sender.
UUIDS = ["GPU-of-the-server", "GPU-of-the-sender"]


class Model:
    """Records what it is given to load, by name."""

    def __init__(self, shapes: dict[str, Any]) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self._parameters = {
            name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
            for name, (shape, dtype) in shapes.items()
        }

    def modules(self) -> list[Any]:
        return []

    def load_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.loaded |= {name: tensor.clone() for name, tensor in tensors}

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self._parameters.items())

    def results(self) -> dict[str, torch.Tensor]:
        changed = {name: p.detach() for name, p in self._parameters.items() if p.any()}
        return self.loaded | changed


def receive(case: dict[str, Any], rank: int) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Return what a rank loads, and the counters of what it opens."""
    opened: list[tuple[bytes, int]] = []

    def open_handle(cls: Any, device: int, handle: bytes, size: int, start: int, *rest: Any) -> Any:
        assert UUIDS[device] == "GPU-of-the-sender"
        counter, offset, _, has_event = rest
        assert has_event, "the receiver waits for the sender's work"
        opened.append((counter, offset))
        part = bytearray(case["memory"][handle][start : start + size])
        storage = torch.frombuffer(part, dtype=torch.uint8).untyped_storage()
        return TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)

    def release(cls: Any, counter: bytes, offset: int, *, device: int) -> None:
        opened.append((counter, offset))

    TypedStorage._new_shared_cuda = classmethod(open_handle)
    TypedStorage._release_ipc_counter = classmethod(release)
    weight_updater.get_parallel = lambda: SimpleNamespace(tp_rank=rank)
    kind, model = weight_updater.WeightUpdater, Model(case["parameters"][rank])
    updater = SimpleNamespace(
        get_model=lambda: model,
        device="cuda",
        custom_weight_loaders=[],
        _assert_weight_cache_inactive=lambda name: None,
        _update_weights_from_flattened_bucket=lambda **bucket: (
            kind._update_weights_from_flattened_bucket(updater, **bucket)
        ),
    )
    for body in case["bodies"]:
        own = normalize_serialized_named_tensor_payload(body["serialized_named_tensors"][rank])
        tensors = MultiprocessingSerializer.deserialize(own)
        done, message = kind.update_weights_from_tensor(updater, tensors, body["load_format"])
        assert done, message
    return model.results(), opened


sys.path.append(sys.argv[3])
torch.cuda._lazy_init = lambda: None
torch.cuda.device_count = lambda: len(UUIDS)
torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=UUIDS[index])
torch.cuda.current_device = lambda: "cpu"
monkey_patch_torch_reductions()
cases = pickle.loads(Path(sys.argv[1]).read_bytes())  # noqa: S301  # of the test
results = [[receive(case, rank) for rank in range(len(case["parameters"]))] for case in cases]
Path(sys.argv[2]).write_bytes(pickle.dumps(results))
