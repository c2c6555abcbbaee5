"""A push as the trainer does it, from ranks of a layout to a real server; and what those ranks say
of the server's responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from megavlm.data.packing import make_pack, prompt_tree
from megavlm.data.processor import Prompt
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.logprobs import Scoring
from megavlm.models.common.mapping import Entry
from megavlm.models.common.model import VisionLanguageModel
from megavlm.parallel.mesh import Mesh
from megavlm.rollout.fleet.targets import Target, Targets
from megavlm.rollout.messages import Response, Sampling
from megavlm.rollout.weights.fixed_targets import FixedTargets
from megavlm.rollout.weights.plan import Plan, TrainerRanks
from megavlm.rollout.weights.sync import SyncReport, WeightSync
from megavlm.rollout.weights.trained import trained_entries
from megavlm.rollout.weights.transports.base import Transport
from megavlm.rollout.weights.transports.disk import DiskTransport
from megavlm.rollout.weights.transports.distributed import DistributedTransport
from megavlm.rollout.weights.transports.tensor import TensorTransport
from megavlm.training.optimizer import wrap
from megavlm.training.passes import VisionFeatures, score
from tests.distributed.merged import add_pairs
from tests.parity.runs import build
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS, Ranks


@dataclass(frozen=True)
class Trainer:
    """`weights`: a folder. `targets`: of adapters on it, with the pairs of `lora_reference`."""

    weights: Path
    layout: str = "TP2"
    freeze_tower: bool = True
    targets: tuple[str, ...] = ()

    @property
    def ranks(self) -> Ranks:
        return (LAYOUTS | EXPERT_LAYOUTS)[self.layout]

    @property
    def options(self) -> ModelOptions:
        return ModelOptions(freeze_tower=self.freeze_tower, freeze_merger=self.freeze_tower)

    def start(self) -> tuple[Mesh, list[Entry], list[VisionLanguageModel]]:
        """On each rank."""
        config = AutoConfig.from_pretrained(self.weights)
        mesh, entries, chunks = build(self.weights, config, self.ranks, self.options)
        if self.targets:
            add_pairs(chunks, self.targets)
        return mesh, entries, chunks


def transport(kind: str, folder: Path) -> Transport:
    if kind == "disk":
        return DiskTransport(folder)
    if kind == "tensor":
        return TensorTransport()
    return DistributedTransport(backend="gloo", address="127.0.0.1", timeout=60)


def push(
    targets: Sequence[Target], kind: str, trainer: Trainer, scratch: Path, version: int
) -> SyncReport:
    """On each rank. Small buckets, so that there are several."""
    mesh, entries, chunks = trainer.start()
    sync = make_sync(
        trainer, mesh, entries, chunks, FixedTargets(targets), transport(kind, scratch)
    )
    report = sync.push(version)
    assert sync.version == version
    sync.close()
    return report


def make_sync(
    trainer: Trainer,
    mesh: Mesh,
    entries: list[Entry],
    chunks: list[VisionLanguageModel],
    targets: Targets,
    way: Transport,
) -> WeightSync:
    config = AutoConfig.from_pretrained(trainer.weights)
    ranks = TrainerRanks.of(config, mesh.layout, mesh.world_size, trainer.options)
    changed = trained_entries(entries, trainer.options, trainer.targets or None)
    return WeightSync(
        Plan(entries, ranks, changed),
        chunks,
        targets=targets if mesh.is_driver else None,
        transport=way,
        dtype=torch.float32,
        num_kv_heads=config.text_config.num_key_value_heads,
        tied_embeddings=config.tie_word_embeddings,
        timeout=60,
        objects=mesh.objects,
        bucket_bytes=2**19,
    )


def trainer_logprobs(
    trainer: Trainer,
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Response]],
    sampling: Sampling,
) -> list[Tensor]:
    """On each rank: log-probs of each prompt's responses, in their order; none on early stages."""
    mesh, _, chunks = trainer.start()
    config = AutoConfig.from_pretrained(trainer.weights)
    packs = [
        make_pack(
            [prompt_tree(prompt, [list(response.token_ids) for response in responses])],
            vision_token_ids=(config.image_token_id, config.video_token_id),
        )
        for prompt, responses in zip(prompts, groups, strict=True)
    ]
    wrapped = wrap(chunks)
    pictures = {picture.key: picture for prompt in prompts for picture in prompt.pictures}
    scoring = Scoring(sampling.temperature, tuple(sampling.suppressed_ids))
    scores = score(wrapped, packs, VisionFeatures(wrapped, pictures), scoring)
    assert bool(scores) == mesh.is_last_stage
    return [pack_scores.logprobs for pack_scores in scores]


def changed(folder: Path, to: Path, *, tower: bool, seed: int) -> Path:
    """The folder with noise on its language model, and on its tower if asked."""
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name in sorted(tensors):
        if tower or "visual" not in name:
            tensors[name] += 0.02 * torch.randn(tensors[name].shape, generator=generator)
    return with_tensors(folder, to, tensors)


def with_tensors(folder: Path, to: Path, tensors: dict[str, Tensor]) -> Path:
    """The folder's files with other weights."""
    to.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (to / path.name).write_bytes(path.read_bytes())
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to
