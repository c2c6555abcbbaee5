"""Models on the ranks of a test, for what the matrix does not ask."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from checkpoint_tools.draft_head import FOLDER
from megavlm.data.packs.packing import Pack
from megavlm.data.processor import ProcessedImage
from megavlm.families import family, family_of
from megavlm.models.build import build_model
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.hf_source import HFFolder
from megavlm.models.common.loading import Form, HubTensors, load_hf, local_tensors
from megavlm.models.common.logprobs import Scoring, TokenScores
from megavlm.models.common.mapping import Entry, shard_tensor
from megavlm.models.common.model import VisionLanguageModel
from megavlm.parallel.mesh import Mesh, build_mesh
from megavlm.training.forward_backward import forward_backward, logits
from megavlm.training.gradient_buffers import wrap
from megavlm.training.initial_model import DRAFT_HEAD, head_tensors, load_draft_head
from megavlm.training.step.vision_features import VisionFeatures
from tests.parity.table import Ranks

Name = tuple[str, int | None]  # of a tensor: its key, and the expert's number


def build(
    folder: Path, config: Any, ranks: Ranks, options: ModelOptions
) -> tuple[Mesh, list[Entry], list[VisionLanguageModel]]:
    """This rank's chunks of a folder's model, with their weights, and the mapping table."""
    mesh = build_mesh(ranks.mesh)
    chunks = build_model(config, mesh, replace(options, sequence=ranks.sequence))
    entries = family(config.model_type).mapping(config, draft_head=options.draft_head)
    load_with_head(chunks, entries, folder, mesh)
    return mesh, entries, chunks


def load_with_head(
    chunks: Sequence[VisionLanguageModel], entries: Sequence[Entry], folder: Path, mesh: Mesh
) -> None:
    """Load a model and its draft head, if it has one."""
    heads = [chunk.draft_head for chunk in chunks]
    own = [x for x in entries if not x.megatron.startswith(DRAFT_HEAD)]
    for chunk in chunks:
        chunk.draft_head = None
        load_hf(chunk, own, HFFolder(folder), mesh)
    for chunk, head in zip(chunks, heads, strict=True):
        chunk.draft_head = head
    if len(own) < len(entries):
        kind = family_of(folder).draft_head
        head_folder = folder / FOLDER if kind == "eagle3" else folder
        load_draft_head(chunks, entries, head_tensors(head_folder, kind), mesh)


@dataclass
class Run:
    """A model on this rank; the images that its packs show."""

    mesh: Mesh
    entries: list[Entry]
    chunks: list[VisionLanguageModel]
    wrapped: list[DistributedDataParallel]
    images: Mapping[str, ProcessedImage]

    @classmethod
    def start(
        cls,
        folder: Path,
        config: Any,
        ranks: Ranks,
        options: ModelOptions,
        images: Mapping[str, ProcessedImage],
    ) -> Self:
        mesh, entries, chunks = build(folder, config, ranks, options)
        # whole gradients, to compare
        return cls(mesh, entries, chunks, wrap(chunks, shard_optimizer=False), images)

    def features(self) -> VisionFeatures:
        return VisionFeatures.everywhere(self.wrapped, self.images)

    def logits(self, packs: Sequence[Pack]) -> list[Tensor]:
        """Of all of each pack's targets, fp32 [N, V], on every rank; without a data axis."""
        parts = self._parts(packs)
        mine = logits(self.wrapped, parts, self.features())
        held = [(part.target_index, x.float()) for part, x in zip(parts, mine, strict=False)]
        by_rank: list[list[tuple[Tensor, Tensor]]] = [[]] * self.mesh.world_size
        dist.all_gather_object(by_rank, held)
        whole = []
        for pieces in zip(*filter(None, by_rank), strict=True):  # only the last stage has any
            index, values = map(torch.cat, zip(*pieces, strict=True))
            whole.append(values.new_empty(int(index.max()) + 1, values.size(1)))
            whole[-1][index] = values
        return whole

    def backward(self, packs: Sequence[Pack]) -> dict[Name, Tensor]:
        """Gradients of this rank's trained tensors, of the sum of all targets' log-probabilities,
        each times its `weight`.
        """
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        forward_backward(self.wrapped, self._parts(packs), self.features(), Scoring(), weighted)
        return {name: x.main_grad.clone().view(x.shape) for name, x in self.trained()}

    def shards(self, hf: Mapping[str, Tensor], form: Form) -> dict[Name, tuple[Tensor, Tensor]]:
        """Of HF tensors what this rank has of them, and the whole."""
        hub = HubTensors(self.entries, hf, form)
        table = {(entry.megatron, entry.expert): entry for entry in self.entries}
        found = {}
        for name, _ in self.trained():
            entry = table[name]
            full = hub.read(entry)
            found[name] = shard_tensor(entry, full, *self.mesh.place(entry.shard.axis)), full
        return found

    def _parts(self, packs: Sequence[Pack]) -> list[Pack]:
        return [pack.part(self.mesh.context_rank) for pack in packs]

    def trained(self) -> Iterator[tuple[Name, Any]]:
        for chunk in self.chunks:
            parameters = {parameter.data_ptr(): parameter for parameter in chunk.parameters()}
            for target in local_tensors(chunk):
                parameter = parameters.get(target.data.data_ptr())  # None for a buffer
                if parameter is not None and parameter.requires_grad:
                    yield (target.key, target.expert), parameter


def weighted(pack: Pack, scores: TokenScores) -> tuple[Tensor, dict[str, Tensor]]:
    assert pack.columns is not None
    return (scores.logprobs * pack.columns.loss_weights).sum(), {}


def difference(ours: Tensor, theirs: Tensor, scale: Tensor | None = None) -> float:
    """The largest, over the largest entry of `scale`, or of `theirs`."""
    largest = (theirs if scale is None else scale).abs().max().item()
    return (ours - theirs).abs().max().item() / max(largest, 1e-8)
