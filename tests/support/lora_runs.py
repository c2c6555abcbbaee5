"""Whole models with adapters on the ranks of a test, on the packs of a parity case."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megavlm.config.lora import LoRA
from megavlm.data.packs.packing import Pack
from megavlm.data.processor import ProcessedImage
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family
from megavlm.models.build import build_model
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.hf_source import HFFolder
from megavlm.models.common.loading import load_hf
from megavlm.models.common.logprobs import Scoring, TokenScores
from megavlm.models.common.lora import adapters, add_adapters
from megavlm.models.common.lora_grouped import ExpertAdapter
from megavlm.models.common.lora_linear import Adapter, LoRALinear
from megavlm.models.common.model import VisionLanguageModel
from megavlm.parallel.mesh import Mesh, build_mesh
from megavlm.training.forward_backward import forward_backward, logits
from megavlm.training.gradient_buffers import wrap
from megavlm.training.step.vision_features import VisionFeatures
from tests.parity.cases import TREES_PER_PACK, packs_of
from tests.parity.inputs import QUESTION, inputs_of
from tests.parity.reference import distinct_images
from tests.parity.table import Ranks
from tests.support.cache import cached_folder
from tests.support.families import model_type
from tests.support.fork import launch
from tests.support.lora_reference import Name, heard, pair

DENSE = ("language.attention", "language.mlp")
TOWER = ("vision.attention", "vision.mlp", "vision.merger")
LINEAR = ("language.attention", "language.linear_attention", "language.mlp")
EXPERTS = ("language.attention", "language.experts")


def lora_folder(model: str) -> Path:
    """Return the folder of a family's model, which all tests share."""
    # Of Gated DeltaNet's layers two: of more, rounding in fp32 alone exceeds the bounds.
    sizes: dict[str, Any] = {
        "num_layers": 2 if model in ("qwen3_vl_moe", "qwen3_5", "minicpmv4_6") else 4
    }

    if model == "internvl_moe":
        sizes["num_experts"] = 4

    def make(folder: Path) -> None:
        make_tiny_model(
            folder,
            [QUESTION] * 10,
            seed=3,
            family=model_type(model),
            # well conditioned: see parity.models
            init_std=0.02 if model.startswith(("qwen3_5", "minicpmv")) else 0.05,
            randomise_norms_and_biases=True,
            **sizes,
        )

    folder = cached_folder(f"lora-{model}", sizes, lambda folder: launch(1, make, folder))
    inputs_of(folder).sequences(heard(inputs_of(folder).config))
    return folder


@dataclass
class Run:
    """`groups`: which sequences of the parity case each pack of this rank holds; `copies`: on how
    many data ranks each sequence is.
    """

    mesh: Mesh
    chunks: list[VisionLanguageModel]
    packs: list[Pack]
    groups: list[list[int]]
    copies: int
    images: Mapping[str, ProcessedImage]
    wrapped: list[DistributedDataParallel] = field(default_factory=list)

    @property
    def whole(self) -> torch.nn.ModuleList:
        return torch.nn.ModuleList(self.chunks)

    def add(self, settings: LoRA) -> None:
        for chunk in self.chunks:
            add_adapters(chunk, settings)
        self.wrapped = wrap(self.chunks, shard_optimizer=False)  # whole gradients, to compare
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()

    def logits(self, *, by_pack: bool = False) -> list[Tensor]:
        """Return the logits of this rank's packs. by_pack: a frozen tower encodes the images of a
        pack by themselves, as a trained one does, and not all in one batch: the last bits of a row
        depend on the number of rows in some kernels of a CPU.
        """
        features = self._features()
        if by_pack and self.chunks[0].visual is not None:
            features.tower_trained = True
        return logits(self.wrapped, self.packs, features)

    def backward(self) -> None:
        def loss(pack: Pack, scores: TokenScores) -> tuple[Tensor, dict[str, Tensor]]:
            assert pack.columns is not None
            return (scores.logprobs * pack.columns.loss_weights).sum() / self.copies, {}

        forward_backward(self.wrapped, self.packs, self._features(), Scoring(), loss)

    def _features(self) -> VisionFeatures:
        return VisionFeatures.everywhere(self.wrapped, self.images)


def start(folder: Path, ranks: Ranks, **options: Any) -> Run:
    """The model without adapters."""
    inputs = inputs_of(folder)
    config = inputs.config
    mesh = build_mesh(ranks.mesh)
    model = ModelOptions(sequence=ranks.sequence, **options)
    chunks = build_model(config, mesh, model)
    entries = family(config.model_type).mapping(config)
    for chunk in chunks:
        load_hf(chunk, entries, HFFolder(folder), mesh)
    cases = inputs.sequences(heard(inputs.config))
    # gloo gathers tokens over the expert tensor axis only where its ranks have equally many.
    copies = mesh.data_size if ranks.mesh.expert_tensor > 1 else 1
    shares = mesh.data_size // copies
    mine = list(range(len(cases)))[mesh.data_rank % shares :: shares]
    groups = [mine[i : i + TREES_PER_PACK] for i in range(0, len(mine), TREES_PER_PACK)]
    packs = packs_of([[cases[i] for i in group] for group in groups], config, ranks)
    parts = [pack.part(mesh.context_rank) for pack in packs]
    return Run(mesh, chunks, parts, groups, copies, distinct_images(cases), wrap(chunks))


def main_gradients(adapter: Adapter) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the gradients of A and B by part, from the gradient buffers."""
    layer, own = adapter, slice(None)
    if isinstance(adapter, ExpertAdapter):
        layer, own = adapter.layer, adapter.index
    assert isinstance(layer, LoRALinear)
    a = layer.lora_A.main_grad[own].split([part.rank for part in layer.parts])
    return {
        part.name: (gradient, layer.lora_B[part.name].main_grad[own])
        for part, gradient in zip(layer.parts, a, strict=True)
    }


def cut(layer: Adapter, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's pieces of a whole pair."""
    group = layer.placement.group
    if layer.placement.cut == "columns":
        a = a.chunk(group.size(), 1)[group.rank()]
    if layer.placement.cut == "rows":
        b = b.chunk(group.size(), 0)[group.rank()]
    return a, b


@torch.no_grad()
def set_pairs(run: Run) -> None:
    """The pairs that `lora_reference` has."""
    for name, layer in adapters(run.whole):
        for part, a, b in layer.pairs():
            rows, columns = whole_sizes(layer, a, b)
            my_a, my_b = cut(layer, *pair((name, part.name), rows, columns))
            a.copy_(my_a), b.copy_(my_b)


def whole_sizes(layer: Adapter, a: Tensor, b: Tensor) -> tuple[int, int]:
    size, how = layer.placement.group.size(), layer.placement.cut
    return b.size(0) * (size if how == "rows" else 1), a.size(1) * (size if how == "columns" else 1)


@torch.no_grad()
def whole_pairs(run: Run) -> dict[Name, tuple[Tensor, Tensor]]:
    """Of the layers that this rank has a part of, put together over its group."""
    found = {}
    for name, layer in adapters(run.whole):
        for part, a, b in layer.pairs():
            rows, columns = whole_sizes(layer, a, b)
            found[name, part.name] = (_joined(layer, a, 1, columns), _joined(layer, b, 0, rows))
    return found


def _joined(layer: Adapter, mine: Tensor, dim: int, size: int) -> Tensor:
    if mine.size(dim) == size:
        return mine.clone()
    parts = [torch.empty_like(mine) for _ in range(layer.placement.group.size())]
    dist.all_gather(parts, mine.contiguous(), group=layer.placement.group)
    return torch.cat(parts, dim)
