"""Our model and transformers' in one process, with the same random weights, on its device."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megavlm.data.packs.packing import Pack, make_pack
from megavlm.data.packs.trees import Tree
from megavlm.data.processor import ProcessedImage, Prompt
from megavlm.demo.tiny_model import _slow_decay
from megavlm.families import family
from megavlm.models.build import build_model
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.loading import MEMORY, HubTensors, load_hf, local_tensors
from megavlm.models.common.logprobs import Scoring
from megavlm.models.linear_attention import chunked_rule, gated_delta_net
from megavlm.models.linear_attention.in_transformers import use_plain_torch
from megavlm.parallel import platform
from megavlm.parallel.mesh import Mesh, init_distributed
from megavlm.parallel.torchvision_ops import define_torchvision_operators
from megavlm.training.forward_backward import forward_backward
from megavlm.training.gradient_buffers import wrap
from megavlm.training.step.vision_features import VisionFeatures

has_transformer_engine = platform.has_transformer_engine


def prepare() -> None:
    """Make this process a run of one rank."""
    gc.enable()  # tests are collected without it
    platform.install()
    init_distributed()
    # torch's default for convolutions, of which transformers' towers have one.
    torch.backends.cudnn.allow_tf32 = False


@contextmanager
def layers_of(engine: bool) -> Iterator[None]:
    """Build Transformer Engine's layers within the context, or megatron-core's own."""
    with mock.patch.object(platform, "has_transformer_engine", lambda: engine):
        yield


@contextmanager
def delta_rule(name: str) -> Iterator[None]:
    """Run linear attention by `fla`'s kernels, where there is a GPU, or by `torch` operations."""
    chosen = gated_delta_net.choose_rule
    if name == "torch":
        chosen = lambda: chunked_rule.chunk_gated_delta_rule  # noqa: E731
    with mock.patch.object(gated_delta_net, "choose_rule", chosen):
        yield


def build(config: Any, mesh: Mesh, options: ModelOptions, *, engine: bool) -> list[Any]:
    """Return our chunks, randomly initialised. engine: with Transformer Engine's layers, which have
    the fused kernels and the experts in one kernel.
    """
    with layers_of(engine):
        return build_model(config, mesh, options)


def ours(
    config: Any, mesh: Mesh, weights: Mapping[str, Tensor], options: ModelOptions, *, engine: bool
) -> list[Any]:
    """Return our chunks with these weights and gradient buffers."""
    chunks = build(config, mesh, options, engine=engine)
    load_hf(chunks[0], family(config.model_type).mapping(config), dict(weights), mesh, MEMORY)
    return wrap(chunks, shard_optimizer=False)


def let_go(chunks: list[Any]) -> None:
    """Free the memory of chunks with gradient buffers, and of their main weights. It would stay in
    use after their last owner is gone: megatron-core's gradient hooks refer to them, and torch's
    autograd nodes hold the hooks, into which Python's collector cannot look.
    """
    for chunk in chunks:
        for parameter in chunk.parameters():
            for name in ("data", "main_grad", "main_param"):
                tensor = getattr(parameter, name, None)
                if tensor is not None:
                    tensor.untyped_storage().resize_(0)


def theirs(config: Any) -> Any:
    """Return transformers' model in fp32 with weights that bf16 holds exactly. Queries are four
    times as large as at random, so that attention tells positions apart.
    """
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    with torch.device(platform.device()):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    use_plain_torch(model)
    _slow_decay(model)
    has_norm = any(".q_norm." in name for name, _ in model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attn.qkv." in name:
                parameter[: len(parameter) // 3] *= 4
            elif (".q_norm." if has_norm else ".q_proj.") in name:
                parameter.add_(3) if _is_zero_centred(parameter) else parameter.mul_(4)
            parameter.copy_(parameter.bfloat16())
    return model.train()


def _is_zero_centred(norm: Tensor) -> bool:
    return not norm.any()  # Qwen3.5's norms multiply with 1 + weight


@dataclass(frozen=True)
class Outcome:
    """Log-probs of all answers' tokens [N], and gradients of their sum by name: transformers'
    names, or keys of this rank's tensors with the number of an expert.
    """

    logprobs: Tensor
    gradients: Mapping[Any, Tensor]


def their_outcome(
    model: Any, config: Any, prompt: Prompt, answers: list[list[int]], *, exact: bool
) -> Outcome:
    """Run transformers on each answer by itself. exact: attention by plain matrix products."""
    found = []
    model.zero_grad()
    backends = [SDPBackend.MATH] if exact else list(SDPBackend.__members__.values())[1:]
    with sdpa_kernel(backends):
        for answer in answers:  # one by one: their logits are whole
            ids, shown = _their_inputs(model, config, prompt, answer)
            logits = model(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **shown
            ).logits[0, -len(answer) - 1 : -1]
            targets = ids[0, -len(answer) :, None]
            logprobs = logits.float().log_softmax(-1).gather(1, targets)[:, 0]
            logprobs.sum().backward()
            found.append(logprobs.detach())
    gradients = {
        name: torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.float()
        for name, p in model.named_parameters()
    }
    return Outcome(torch.cat(found), gradients)


def _their_inputs(
    model: Any, config: Any, prompt: Prompt, answer: list[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return token ids [1, T] of a prompt with an answer, and the inputs for its image."""
    ids = torch.cat([prompt.token_ids, torch.tensor(answer)])
    given = family(config.model_type)
    positions, _ = given.positions(config)(ids, prompt.images)
    inputs = given.model_inputs(config, ids, positions, prompt.images)
    on_device = {
        name: x.to(platform.device(), model.dtype if x.is_floating_point() else x.dtype)
        for name, x in inputs.items()
    }
    return ids[None].to(platform.device()), on_device


def our_outcome(
    chunks: list[Any],
    trees: list[Tree],
    images: Mapping[str, ProcessedImage],
    vision_token_ids: set[int],
) -> Outcome:
    """Run our model on one pack of trees, forward and backward."""
    pack = make_pack(trees, vision_token_ids=vision_token_ids).to(platform.device())
    found: list[Tensor] = []

    def loss(pack: Pack, scored: Any) -> tuple[Tensor, dict[str, Tensor]]:
        found.append(scored.logprobs.detach())
        return scored.logprobs.sum(), {}

    for chunk in chunks:
        chunk.zero_grad_buffer()
    forward_backward(chunks, [pack], VisionFeatures.everywhere(chunks, images), Scoring(), loss)
    gradients = {}
    for chunk in chunks:
        parameters = {p.data_ptr(): p for p in chunk.parameters() if p.requires_grad}
        for target in local_tensors(chunk.module):
            parameter = parameters.get(target.data.data_ptr())
            if parameter is not None:
                gradient = parameter.main_grad.view(target.data.shape)
                gradients[target.key, target.expert] = gradient.float().clone()
    return Outcome(found[0], gradients)


def as_ours(config: Any, gradients: Mapping[str, Tensor]) -> dict[Any, Tensor]:
    """Return transformers' gradients by the keys of our tensors, in their form."""
    entries = [x for x in family(config.model_type).mapping(config) if not x.frozen]
    hub = HubTensors(entries, gradients, MEMORY)
    return {(entry.megatron, entry.expert): hub.read(entry) for entry in entries}
