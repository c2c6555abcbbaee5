"""Our model and transformers' in one process, with the same random weights, on its device."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megavlm.data.processor import Prompt
from megavlm.models.build import build_model
from megavlm.models.common import language
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.loading import MEMORY, load_hf
from megavlm.models.registry import family
from megavlm.parallel import platform
from megavlm.parallel.mesh import Mesh
from megavlm.parallel.torchvision_ops import define_torchvision_operators
from megavlm.training.optimizer import wrap


def has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


@contextmanager
def layers_of(engine: bool) -> Iterator[None]:
    """Build Transformer Engine's layers within the context, or megatron-core's own."""
    with mock.patch.object(language, "platform", SimpleNamespace(has_gpu=lambda: engine)):
        yield


def ours(
    config: Any, mesh: Mesh, weights: dict[str, Tensor], options: ModelOptions, *, engine: bool
) -> list[Any]:
    """Return our chunks with gradient buffers. engine: of Transformer Engine's layers."""
    options = replace(options, fusions=engine)  # Transformer Engine has the kernels
    with layers_of(engine):
        chunks = build_model(config, mesh, options)
    load_hf(chunks[0], family(config.model_type).mapping(config), weights, mesh, MEMORY)
    return wrap(chunks, shard_optimizer=False)


def theirs(config: Any) -> Any:
    """Return transformers' model with weights that bf16 holds exactly, in fp32."""
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    with torch.device(platform.device()):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.model.visual.requires_grad_(False)
    return model.train()


def their_logprobs(
    model: Any, config: Any, prompt: Prompt, answers: list[list[int]]
) -> tuple[Tensor, float]:
    """Return log-probs of all answers' tokens, and the norm of the gradient of their sum."""
    found = []
    model.zero_grad()
    (image,) = prompt.images
    for answer in answers:  # one by one: their logits are whole
        ids = torch.cat([prompt.token_ids, torch.tensor(answer)])[None].to(platform.device())
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == config.image_token_id).long(),
            pixel_values=image.patches(ids.device).to(model.dtype),
            image_grid_thw=torch.tensor([image.grid], device=ids.device),
            use_cache=False,
            logits_to_keep=len(answer) + 1,
        ).logits[0, :-1]
        targets = ids[0, -len(answer) :, None]
        logprobs = logits.float().log_softmax(-1).gather(1, targets)[:, 0]
        logprobs.sum().backward()
        found.append(logprobs.detach())
    squares = sum(
        float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None
    )
    return torch.cat(found), squares**0.5
