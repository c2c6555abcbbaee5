"""Runs one case of the matrix on its ranks, and compares it with what transformers computed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from torch import Tensor

from megavlm.data.packs.packing import Pack, make_pack
from megavlm.data.packs.trees import prompt_tree
from megavlm.families import family
from megavlm.models.build import build_model
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.hf_source import HFFolder
from megavlm.models.common.loading import MEMORY, HubTensors, load_hf, local_tensors
from megavlm.models.common.logprobs import Scoring, TokenScores
from megavlm.models.common.mapping import Entry, shard_tensor
from megavlm.models.common.model import VisionLanguageModel
from megavlm.parallel.mesh import Mesh, build_mesh
from megavlm.training.forward_backward import compute_logprobs, forward_backward, logits
from megavlm.training.gradient_buffers import wrap
from megavlm.training.step.vision_features import VisionFeatures
from tests.parity.inputs import Inputs
from tests.parity.reference import (
    Reference,
    Sequences,
    distinct_images,
    token_weights,
    value_parameters,
    weighted_loss,
)
from tests.parity.table import OPTIONS, Case, Ranks
from tests.support.cache import cached_value
from tests.support.columns import columns
from tests.support.families import vision_tokens
from tests.support.fork import launch
from tests.support.trees import empty_pack

TREES_PER_PACK = 2


Expected = dict[str, Any]  # see `expect`; arrays, as they come from another process

MERGERS = (
    "visual.merger.",
    "visual.deepstack_merger_list.",
    "visual.window_merger.",
    "visual.audio_merger.",
)


@dataclass(frozen=True)
class Differences:
    """Largest differences on one rank, relative to the largest entry of the tensor; and which
    parameter it is. `norm`: of the whole gradient's norm.
    """

    logits: float
    gradients: float
    parameter: str
    norm: float


def expected_of(inputs: Inputs, case: Case) -> Expected:
    """Return what `expect` gives for a case, made once for all tests."""
    sequences, head = inputs.sequences(case.inputs), OPTIONS[case.options].head
    return cached_value(
        f"expected-{inputs.folder.name}",
        (case.inputs, head),
        lambda: launch(1, expect, inputs.folder, sequences, head)[0],
    )


def expect(folder: Path, cases: Sequence[Sequences], head: str) -> Expected:
    """What transformers computes: logits and values by sequence and response, gradients by name."""
    reference = Reference(folder)
    with torch.no_grad():
        scores = [[reference.scores(case.prompt, r) for r in case.responses] for case in cases]
    return {
        "logits": [[response.logits for response in row] for row in scores],
        "values": [[response.values for response in row] for row in scores],
        "gradients": reference.gradients(cases, tokens=head != "values", values=head != "tokens"),
        "value_head": {"weight": reference.value_weight.grad, "bias": reference.value_bias.grad},
    }


Job = tuple[Case, Sequence[Sequences], Expected]


class Built:
    """This rank's part of a model, with whole gradients, to compare."""

    def __init__(self, folder: Path, config: Any, case: Case, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.options = replace(OPTIONS[case.options], sequence=case.ranks.sequence)
        self.entries = family(config.model_type).mapping(config)
        self.chunks = build_model(config, mesh, self.options)
        for chunk in self.chunks:
            load_hf(chunk, self.entries, HFFolder(folder), mesh)
            if chunk.value_head is not None:
                weight, bias = value_parameters(config.text_config.hidden_size)
                chunk.value_head.weight.data.copy_(weight[None])
                chunk.value_head.bias.data.fill_(bias)
        self.wrapped = wrap(self.chunks, shard_optimizer=False)


def compare_all(folder: Path, config: Any, jobs: Sequence[Job]) -> list[Differences]:
    """On each rank: cases of one model and layout, one after the other, in fp32."""
    mesh = build_mesh(jobs[0][0].ranks.mesh)
    built: dict[str, Built] = {}
    results = []
    for case, cases, expected in jobs:
        if case.options not in built:
            built = {case.options: Built(folder, config, case, mesh)}
        results.append(_compare(built[case.options], case, cases, expected))
    return results


def compare(
    folder: Path, config: Any, case: Case, cases: Sequence[Sequences], expected: Expected
) -> Differences:
    """On each rank: forward and every parameter's gradient, in fp32."""
    return compare_all(folder, config, [(case, cases, expected)])[0]


def _compare(
    built: Built, case: Case, cases: Sequence[Sequences], expected: Expected
) -> Differences:
    config, mesh, options = built.config, built.mesh, built.options
    chunks, wrapped, entries = built.chunks, built.wrapped, built.entries
    for chunk in wrapped:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.grad = None  # that the norm's optimizer left, of the case before
    mine = list(range(len(cases)))[mesh.data_rank :: mesh.data_size]
    groups = [mine[i : i + TREES_PER_PACK] for i in range(0, len(mine), TREES_PER_PACK)]
    packs = packs_of([[cases[i] for i in group] for group in groups], config, case.ranks)
    parts = [pack.part(mesh.context_rank) for pack in packs]
    features = VisionFeatures.everywhere(wrapped, distinct_images(cases))
    forward = _forward_difference(wrapped, parts, groups, features, expected, options.head)
    forward_backward(wrapped, parts, features, Scoring(), _loss)
    gradients = {name: torch.from_numpy(x) for name, x in expected["gradients"].items()}
    hub = HubTensors(entries, gradients, MEMORY)
    heads = {f"value_head.{x}": expected["value_head"][x] for x in ("weight", "bias")}
    trained_heads = {} if options.head == "tokens" else heads
    value_head = {name: torch.from_numpy(x) for name, x in trained_heads.items()}
    worst, parameter = _gradient_differences(chunks, entries, hub, value_head, mesh)
    norm = gradient_norm(wrapped)
    theirs = _expected_norm(entries, hub, value_head, options)
    return Differences(forward, worst, parameter, abs(norm - theirs) / theirs)


def packs_of(groups: Sequence[Sequence[Sequences]], config: Any, ranks: Ranks) -> list[Pack]:
    """A pack for each group, and packs of padding for what a layout needs more."""
    shape: dict[str, int] = {
        "multiple": ranks.mesh.tensor if ranks.sequence else 1,
        "context_size": ranks.mesh.context,
    }
    packs = []
    for group in groups:
        trees = []
        for case in group:
            weights = [token_weights(len(r), i) for i, r in enumerate(case.responses)]
            weighted = [columns(len(x), loss_weights=x) for x in weights]
            trees.append(prompt_tree(case.prompt, case.responses, weighted))
        vision = vision_tokens(config)
        packs.append(make_pack(trees, vision_token_ids=vision, **shape))
    count = ranks.mesh.pipeline if ranks.mesh.virtual > 1 else 1
    missing = -len(packs) % count
    return packs + [empty_pack(columns(0), **shape)] * missing


def _loss(pack: Pack, scores: TokenScores) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs = scores.logprobs if len(scores.logprobs) else None
    values = scores.values if len(scores.values) else None
    # zero, and with a graph, where this rank scores nothing
    nothing = scores.logprobs.sum() + scores.values.sum()
    assert pack.columns is not None
    loss = weighted_loss(logprobs, values, pack.columns.loss_weights) + 0 * nothing
    return loss, {"tokens": loss.new_ones(())}


def _forward_difference(
    wrapped: list[DistributedDataParallel],
    parts: Sequence[Pack],
    groups: Sequence[Sequence[int]],
    features: VisionFeatures,
    expected: Expected,
    head: str,
) -> float:
    """Of logits and values, on the last stage; 0 on the others."""
    results: list[tuple[str, list[Tensor]]] = []
    if head != "values":
        results.append(("logits", logits(wrapped, parts, features)))
    if head != "tokens":
        scores = compute_logprobs(wrapped, parts, features, Scoring())
        results.append(("values", [s.values for s in scores]))
    worst = 0.0
    for name, ours in results:
        for part, group, result in zip(parts, groups, ours, strict=False):  # padding comes last
            rows = [torch.from_numpy(x) for index in group for x in expected[name][index]]
            whole = torch.cat(rows)
            if len(result):
                worst = max(worst, _difference(result, whole[part.target_index], scale=whole))
    return worst


def _gradient_differences(
    chunks: Sequence[VisionLanguageModel],
    entries: Sequence[Entry],
    hub: HubTensors,
    value_head: dict[str, Tensor],
    mesh: Mesh,
) -> tuple[float, str]:
    """The largest relative difference over this rank's trained parameters, and its name."""
    table = {(entry.megatron, entry.expert): entry for entry in entries}
    worst, name = 0.0, ""
    for chunk in chunks:
        parameters = {parameter.data_ptr(): parameter for parameter in chunk.parameters()}
        for target in local_tensors(chunk):
            parameter = parameters.get(target.data.data_ptr())
            if parameter is None:
                assert table[target.key, target.expert].frozen
                continue
            if not parameter.requires_grad:
                continue
            if target.key in value_head:
                full = shard = value_head[target.key].reshape(parameter.shape)
            else:
                entry = table[target.key, target.expert]
                full = hub.read(entry)
                shard = shard_tensor(entry, full, *mesh.place(entry.shard.axis))
            difference = _difference(parameter.main_grad.view_as(shard), shard, scale=full)
            if difference > worst:
                worst, name = difference, target.key
    return worst, name


def gradient_norm(wrapped: list[DistributedDataParallel]) -> float:
    """Return that of the whole model, as megatron-core computes it for clipping, but each tensor's
    in fp64: torch's fp32 norm of a large tensor whose rows differ in size is off by 1e-6.
    Collective.
    """
    settings = OptimizerConfig(optimizer="adam", lr=1.0, min_lr=0.0, clip_grad=1.0)
    optimizer = get_megatron_optimizer(settings, wrapped, use_gloo_process_groups=True)
    optimizer.prepare_grads()
    with mock.patch.object(clip_grads, "l2_norm_impl", _exact_norm):
        return float(optimizer.get_grad_norm())


def _exact_norm(
    chunk_size: int, overflow: Tensor, tensors: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Replace megatron-core's `l2_norm_impl`."""
    norms = torch.stack([tensor.double().norm() for tensor in tensors[0]])
    return norms.norm().float(), None


def _expected_norm(
    entries: Sequence[Entry],
    hub: HubTensors,
    value_head: dict[str, Tensor],
    options: ModelOptions,
) -> float:
    """Over what the options train, each tensor once."""
    squared = sum(x.double().square().sum().item() for x in value_head.values())
    for entry in entries:
        if entry.megatron.startswith(MERGERS):
            frozen = options.freeze_merger
        else:
            frozen = entry.megatron.startswith("visual.") and options.freeze_tower
        if not (frozen or entry.frozen):
            squared += hub.read(entry).double().square().sum().item()
    return squared**0.5


def _difference(ours: Tensor, theirs: Tensor, scale: Tensor) -> float:
    """Largest absolute difference over the largest entry of `scale`."""
    return (ours - theirs).abs().max().item() / max(scale.abs().max().item(), 1e-8)
