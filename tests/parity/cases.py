"""Runs one layout of our model on the sequences of a parity case, and compares it with
transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megavlm.data.packing import Pack, make_pack, prompt_tree
from megavlm.models.common.loading import HFFolder, HubTensors, load_hf, local_tensors
from megavlm.models.common.logprobs import Scoring, TokenScores
from megavlm.models.common.mapping import Entry, shard_tensor
from megavlm.models.common.model import VisionLanguageModel
from megavlm.models.registry import build_model, family
from megavlm.parallel.mesh import build_mesh
from megavlm.training.optimizer import wrap
from megavlm.training.passes import VisionFeatures, forward_backward
from tests.parity.reference import Reference, Sequences, distinct_pictures, token_weights


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    sequence: bool = False
    data: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.data


@dataclass(frozen=True)
class Differences:
    """Largest differences on one rank, relative to the largest entry of the tensor; and which
    parameter it is.
    """

    logits: float
    gradients: float
    parameter: str
    norm: float


def compare(
    folder: Path, layout: Layout, cases: Sequence[Sequences], trees_per_pack: int = 2
) -> Differences:
    """On each rank: forward logits and every parameter's gradient against transformers, fp32, the
    tower trained too.
    """
    reference = Reference(folder)
    mesh = build_mesh(tensor=layout.tensor)
    assert mesh.data_size == layout.data
    model = build_model(
        reference.config,
        mesh,
        dtype=torch.float32,
        sequence=layout.sequence,
        freeze_tower=False,
        freeze_merger=False,
    )
    entries = family(reference.config.model_type).mapping(reference.config)
    load_hf(model, entries, HFFolder(folder), mesh.tensor_rank, mesh.tensor_size)
    wrapped = wrap(model, shard_optimizer=False)  # whole gradients, to compare
    wrapped.zero_grad_buffer()

    mine = cases[mesh.data_rank :: mesh.data_size]
    parts = [mine[i : i + trees_per_pack] for i in range(0, len(mine), trees_per_pack)]
    packs = [pack_of(part, reference.config.image_token_id, 2 * layout.tensor) for part in parts]
    features = VisionFeatures(wrapped, distinct_pictures(cases))
    logits = max(
        _difference(model.logits(pack, features.of(pack)), _expected_logits(reference, part))
        for pack, part in zip(packs, parts, strict=True)
    )
    forward_backward(wrapped, packs, features, Scoring(), _weighted_loss)
    expected = reference.gradients(cases)
    gradient, parameter, norm = _gradient_differences(
        model, entries, expected, layout, mesh.tensor_rank
    )
    return Differences(logits, gradient, parameter, norm)


def pack_of(part: Sequence[Sequences], image_token_id: int, multiple: int) -> Pack:
    trees = []
    for case in part:
        weights = [{"weight": token_weights(len(r), i)} for i, r in enumerate(case.responses)]
        trees.append(prompt_tree(case.prompt, case.responses, weights))
    return make_pack(trees, vision_token_ids={image_token_id}, multiple=multiple)


def _weighted_loss(pack: Pack, scores: TokenScores) -> tuple[Tensor, dict[str, Tensor]]:
    return (scores.logprobs * pack.values["weight"]).sum(), {"tokens": scores.logprobs.new_ones(())}


def _expected_logits(reference: Reference, part: Sequence[Sequences]) -> Tensor:
    with torch.no_grad():
        return torch.cat(
            [reference.logits(case.prompt, r) for case in part for r in case.responses]
        )


def _gradient_differences(
    model: VisionLanguageModel,
    entries: Sequence[Entry],
    expected: dict[str, Tensor],
    layout: Layout,
    tensor_rank: int,
) -> tuple[float, str, float]:
    """The largest relative difference over this rank's parameters, its name, and that of the total
    norm.
    """
    hf = HubTensors(entries, expected)
    table = {entry.megatron: entry for entry in entries}
    parameters = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    worst, name, ours_squared, theirs_squared = 0.0, "", 0.0, 0.0
    for target in local_tensors(model):
        gradient = parameters[target.data.data_ptr()].main_grad
        full = hf.read(table[target.key])
        shard = shard_tensor(table[target.key], full, tensor_rank, layout.tensor)
        difference = _difference(gradient, shard, scale=full)
        if difference > worst:
            worst, name = difference, target.key
        ours_squared += gradient.double().square().sum().item()
        theirs_squared += shard.double().square().sum().item()
    norm = abs(ours_squared**0.5 - theirs_squared**0.5) / theirs_squared**0.5
    return worst, name, norm


def _difference(ours: Tensor, theirs: Tensor, scale: Tensor | None = None) -> float:
    """Largest absolute difference over the largest entry of `scale` (default: `theirs`)."""
    largest = (theirs if scale is None else scale).abs().max().item()
    return (ours - theirs).abs().max().item() / max(largest, 1e-8)
