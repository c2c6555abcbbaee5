"""Weights of a draft model while a server's memory is released.

SGLang releases a draft model's weights with those of the target, without a copy, and a trainer
sends only the target's unless `speculation.train` is true. Without this module every draft would
then be rejected, and only `accept_length` would show it.

SGLang loads this module as a plugin (megavlm_plugins.dist-info).
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

# Of this rank's draft model: tensors that it does not share with the target, and their copies in
# host memory. They are copied once: a trainer that changes them sends them after each resume.
_kept: list[tuple[torch.Tensor, torch.Tensor]] = []


def install() -> None:
    """Make SGLang's ranks copy their draft model before they release weights, and restore it after
    they resume them.
    """
    from sglang.srt.managers.scheduler_components import weight_updater

    manager = weight_updater.SchedulerWeightUpdaterManager
    release, resume = manager.release_memory_occupation, manager.resume_memory_occupation

    def release_memory_occupation(self: Any, request: Any) -> Any:
        if _has_weights(request) and self.draft_worker is not None and not _kept:
            shared = {x.data_ptr() for x in _tensors(self.tp_worker.model_runner.model)}
            for _, runner in self.draft_worker.weight_update_runners():
                own = (x for x in _tensors(runner.model) if x.data_ptr() not in shared)
                _kept.extend((x, x.cpu().clone()) for x in own)
        return release(self, request)

    def resume_memory_occupation(self: Any, request: Any) -> Any:
        answer = resume(self, request)
        if _has_weights(request):
            with torch.inference_mode():
                for tensor, copy in _kept:
                    tensor.copy_(copy)
        return answer

    manager.release_memory_occupation = release_memory_occupation
    manager.resume_memory_occupation = resume_memory_occupation


def _tensors(model: Any) -> Iterator[torch.Tensor]:
    return chain(model.parameters(), model.buffers())


def _has_weights(request: Any) -> bool:
    return not request.tags or "weights" in request.tags
