"""Routed experts of a response in one byte an expert, where SGLang has four: it is a quarter of the
bytes that cross the server's processes and the network, and of the time to read them.

SGLang loads this module as a plugin (megavlm_plugins.dist-info).
"""

from typing import Any

import torch
from torch import Tensor


def narrow(routed_experts: Tensor) -> Tensor:
    """Return routed experts as bytes: the size of a number, then the numbers. SGLang's own are a
    multiple of four bytes, and these are not.
    """
    is_small = not routed_experts.numel() or int(routed_experts.max()) < 256
    numbers = routed_experts.to(torch.uint8 if is_small else torch.int16).flatten()
    size = torch.tensor([numbers.itemsize], dtype=torch.uint8)
    return torch.cat([size, numbers.view(torch.uint8)])


def install() -> None:
    """Make SGLang's schedulers narrow the routed experts of finished requests."""
    from sglang.srt.managers.scheduler_components import batch_result_processor

    processor = batch_result_processor.SchedulerBatchResultProcessor
    collect = processor._maybe_collect_routed_experts

    def collect_narrow(self: Any, request: Any) -> None:
        collect(self, request)
        if request.routed_experts is not None:
            request.routed_experts = narrow(request.routed_experts)

    processor._maybe_collect_routed_experts = collect_narrow
