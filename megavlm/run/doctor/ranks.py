"""The part of `megavlm doctor` that runs on ranks under torchrun: a collective, a tiny model's
forward and backward with each attention backend, and the real server with one weight update.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from megavlm.config.schema import Config
from megavlm.data.packs.packing import Pack, make_pack
from megavlm.data.packs.trees import prompt_tree
from megavlm.data.processor import Prompt
from megavlm.data.rows import Row
from megavlm.families import family
from megavlm.inference.connect import Connection, connect
from megavlm.inference.errors import RolloutServerError, WeightSyncError
from megavlm.inference.server_pool.memory import TAGS
from megavlm.model_config import model_config
from megavlm.models.build import build_model
from megavlm.models.common.attention_backends import BACKENDS, choose_backend
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.hf_source import HFFolder
from megavlm.models.common.loading import load_hf
from megavlm.models.common.logprobs import Scoring
from megavlm.models.common.model import VisionLanguageModel
from megavlm.observability.progress import Progress
from megavlm.parallel import platform
from megavlm.parallel.collectives import broadcast_object
from megavlm.parallel.mesh import Layout, Mesh, build_mesh, init_distributed, shutdown
from megavlm.run.doctor.findings import Finding, check_attention, check_sum, check_sync
from megavlm.training.forward_backward import forward_backward
from megavlm.training.gradient_buffers import wrap
from megavlm.training.step.vision_features import VisionFeatures
from megavlm.weight_sync.sync import WeightSync

BOUND = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # bound of log-prob differences
NUMBERS = 2**24  # elements of the collective's tensor


def run(config: Config) -> bool:
    """Print the findings on rank 0. Returns True if none failed. Collective.

    config: Recipe of the tiny model, with its layout and server.
    """
    init_distributed()
    mesh = build_mesh(Layout.from_config(config.parallel))
    findings = []
    for finding in _findings(config, mesh):
        findings.append(finding)
        if mesh.is_driver:
            print(finding.line, flush=True)
    shutdown()
    return all(finding.level != "FAIL" for finding in findings)


def _findings(config: Config, mesh: Mesh) -> Iterator[Finding]:
    yield _collective(mesh)
    hf_config = model_config(config.model.folder)
    options = ModelOptions.from_config(config)
    chunks, ours = _measure(config, hf_config, mesh, "sdpa")
    for name in BACKENDS if platform.has_gpu() else (options.attention,):
        yield _attention(config, hf_config, mesh, name, ours, is_used=name == options.attention)
    yield from _server(config, hf_config, mesh, chunks)


def _collective(mesh: Mesh) -> Finding:
    numbers = torch.full((NUMBERS,), mesh.rank + 1.0, device=platform.device())
    dist.all_reduce(numbers.clone())  # warm-up that opens the connections
    platform.synchronize()
    started = time.perf_counter()
    dist.all_reduce(numbers)
    platform.synchronize()
    seconds = time.perf_counter() - started
    return check_sum(
        numbers.mean().item(), mesh.world_size, platform.backend(), seconds, numbers.nbytes
    )


def _attention(
    config: Config, hf_config: Any, mesh: Mesh, name: str, ours: tuple[torch.Tensor, float],
    *, is_used: bool,
) -> Finding:  # fmt: skip
    dtype = getattr(torch, config.model.dtype)
    try:
        choose_backend(name, dtype)
    except ValueError as error:  # the backend cannot run here; the error says why
        return Finding("FAIL" if is_used else "OK", f"attention {name}", f"not used: {error}")
    _, (logprobs, gradient) = _measure(config, hf_config, mesh, name)
    difference = (logprobs - ours[0]).abs().max().item()
    return check_attention(name, difference, gradient / ours[1], BOUND[dtype], is_used=is_used)


def _measure(
    config: Config, hf_config: Any, mesh: Mesh, attention: str
) -> tuple[list[VisionLanguageModel], tuple[torch.Tensor, float]]:
    """Build the model with an attention backend. Returns it, its log-probs, and the norm of its
    gradients.
    """
    options = ModelOptions(
        dtype=getattr(torch, config.model.dtype),
        sequence=config.parallel.sequence,
        attention=attention,
    )
    chunks = build_model(hf_config, mesh, options)
    entries = family(hf_config.model_type).mapping(hf_config)
    load_hf(chunks[0], entries, HFFolder(config.model.folder), mesh)
    wrapped = wrap(chunks, shard_optimizer=False)
    found: list[torch.Tensor] = []

    def loss(pack: Pack, scores: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        found.append(scores.logprobs.detach())
        return -scores.logprobs.sum(), {}

    packs = [_pack(mesh).to(platform.device())]
    no_images = VisionFeatures.everywhere(wrapped, {})
    forward_backward(wrapped, packs, no_images, Scoring(), loss)
    squares = sum(
        buffer.grad_data.double().square().sum() for chunk in wrapped for buffer in chunk.buffers
    )
    return chunks, (found[0], float(squares) ** 0.5)


def _pack(mesh: Mesh) -> Pack:
    """Return a pack of a 120-token prompt with two answers that share it, as in training."""
    ids = torch.arange(120) % 50 + 20
    positions = torch.arange(120).expand(3, -1)
    prompt = Prompt(Row(0, "", "", (), "", ""), ids, (), positions, 120, ())
    answers = [list(range(20, 52)), list(range(40, 60))]
    return make_pack(
        [prompt_tree(prompt, answers)], vision_token_ids=set(), multiple=mesh.tensor_size
    )


def _server(
    config: Config, hf_config: Any, mesh: Mesh, chunks: list[VisionLanguageModel]
) -> Iterator[Finding]:
    with ExitStack() as stack:
        connection: Connection | None = None
        error = None
        started = time.perf_counter()
        if mesh.is_driver:
            try:
                progress = stack.enter_context(Progress(is_quiet=True))
                connection = stack.enter_context(connect(config, config.model.folder, progress))
                connection.server_pool.wait_for_receivers()
            except RolloutServerError as failure:
                error = str(failure)
        error = broadcast_object(error, mesh)
        if error is not None:
            yield Finding("FAIL", "server", error)
            return
        yield Finding("OK", "server", f"started in {time.perf_counter() - started:.0f} s")
        yield _sync(config, hf_config, mesh, chunks, connection)


def _sync(
    config: Config,
    hf_config: Any,
    mesh: Mesh,
    chunks: list[VisionLanguageModel],
    connection: Connection | None,
) -> Finding:
    entries = family(hf_config.model_type).mapping(hf_config)
    memory = None if connection is None else connection.memory
    pool = None if connection is None else connection.server_pool
    sync = WeightSync.from_config(config, mesh, hf_config, entries, chunks, pool)
    try:
        if memory is not None:
            memory.resume(["weights"], starts=False)
        report = sync.update_weights(1, full=True)
        if memory is not None:
            memory.resume(TAGS, starts=True)
    except (WeightSyncError, RolloutServerError) as error:
        return Finding("FAIL", "sync", str(error))
    finally:
        sync.close()
    return check_sync(report.seconds, report.bytes, report.tensors, report.checked)
