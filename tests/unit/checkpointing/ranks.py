"""A small training run for checkpoint tests: the real model and optimizer, made-up gradients.

A gradient depends on the tensor's name and the step alone and is cut as the tensor is, so that runs
under different layouts make the same updates, bit by bit.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from transformers import AutoConfig

from megavlm.checkpointing.folder import step_folder
from megavlm.checkpointing.load import load_checkpoint
from megavlm.checkpointing.reader import StepReader
from megavlm.checkpointing.save import SaveTarget, save_checkpoint
from megavlm.config.optimizer import MEGATRON_DEFAULTS, Optimizer
from megavlm.config.speculation import Speculation
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family
from megavlm.models.build import build_model
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.loading import LocalTensor, local_tensors
from megavlm.models.common.mapping import Entry, shard_tensor
from megavlm.models.common.model import VisionLanguageModel
from megavlm.parallel.mesh import Mesh, build_mesh
from megavlm.training import gradient_buffers
from megavlm.training.optimizer import Updater, build_updater
from tests.parity.runs import load_with_head
from tests.parity.table import LAYOUTS, Ranks
from tests.support.fork import launch

SETTINGS = Optimizer(
    lr=1e-2,
    min_lr=1e-4,
    schedule="cosine",
    warmup_steps=2,
    weight_decay=0.01,
    clip_grad=1e9,  # a norm is summed in another order under another layout; do not scale by it
)
ONE_RANK, TP2 = LAYOUTS["one rank"], LAYOUTS["TP2"]
Name = tuple[str, int | None]  # a tensor's key, and an expert's number


@dataclass
class SmallBuckets(DistributedDataParallelConfig):  # type: ignore[misc]
    """Gives a tiny model several buckets, which mix tower and layers."""

    bucket_size: int | None = 20_000  # parameters


def make_hf(folder: Path, *, seed: int = 0, **sizes: Any) -> Path:
    sizes = {"num_layers": 2, "vision_depth": 1} | sizes
    make_tiny_model(folder, ["red"], seed=seed, randomise_norms_and_biases=True, **sizes)
    return folder


@dataclass
class Run:
    mesh: Mesh
    chunks: list[VisionLanguageModel]
    updater: Updater
    table: dict[Name, Entry]

    def train(self, steps: range) -> None:
        for step in steps:
            self.updater.zero_gradients()
            for target in self.tensors():
                if target.data.requires_grad:
                    entry = self.table[target.key, target.expert]
                    full = made_up(f"{target.key} {target.expert} {step}", entry)
                    gradient = shard_tensor(entry, full, *self.mesh.place(entry.shard.axis))
                    target.data.main_grad.copy_(gradient)
            self.updater.step()

    def tensors(self) -> Iterator[LocalTensor]:
        for chunk in self.chunks:
            yield from local_tensors(chunk)

    def save(self, folder: Path, step: int, extra: dict[str, Any] | None = None) -> None:
        with self.updater.state_on_device():
            save_checkpoint(SaveTarget(folder), step, self.updater, extra=extra or {})

    def load(self, folder: Path, step: int | None = None) -> dict[str, Any]:
        with self.updater.state_on_device():
            return load_checkpoint(
                folder,
                step=step,
                chunks=self.chunks,
                optimizer=self.updater.optimizer,
                scheduler=self.updater.scheduler,
            )

    def weights(self) -> dict[Name, torch.Tensor]:
        return {(x.key, x.expert): x.data.detach().clone() for x in self.tensors()}

    def fingerprint(self) -> list[str]:
        """Weights, learning rate and the next random numbers of every generator, exactly."""
        digest = hashlib.sha256()
        weights = self.weights()
        for name in sorted(weights, key=str):
            data = weights[name].contiguous().view(torch.uint8).numpy().tobytes()
            digest.update(str(name).encode() + data)
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            megatron = torch.rand(1).item()
        numbers = (random.random(), np.random.random(), torch.rand(1).item(), megatron)
        return [digest.hexdigest(), *map(str, (self.updater.learning_rate, *numbers))]


def start(
    hf: Path,
    ranks: Ranks,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    freeze: bool = True,
    overlap: bool = False,
    optimizer: dict[str, Any] | None = None,
    updates_per_step: int = 1,
    draft_head: bool = False,
) -> Run:
    """A run at step 0 with the folder's weights. overlap: gradients are in several buckets.
    optimizer: keys of its section, and of its `megatron`. draft_head: it is trained, too.
    """
    if overlap:
        gradient_buffers.DistributedDataParallelConfig = SmallBuckets
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    mesh = build_mesh(ranks.mesh, seed=seed)
    config = AutoConfig.from_pretrained(hf)
    options = ModelOptions(
        dtype=dtype,
        sequence=ranks.sequence,
        freeze_tower=freeze,
        freeze_merger=freeze,
        draft_head=draft_head,
    )
    chunks = build_model(config, mesh, options)
    entries = family(config.model_type).mapping(config, draft_head=draft_head)
    load_with_head(chunks, entries, hf, mesh)
    given = {"overlap_grad_reduce": overlap} | (optimizer or {})
    megatron = {name: given.pop(name) for name in [*given] if name in MEGATRON_DEFAULTS}
    settings = replace(SETTINGS, **given, megatron=megatron)
    updater = build_updater(
        chunks,
        settings,
        mesh,
        num_steps=10,
        updates_per_step=updates_per_step,
        speculation=Speculation(train=True, lr=1e-3, clip_grad=1e9) if draft_head else None,
    )
    return Run(mesh, chunks, updater, {(entry.megatron, entry.expert): entry for entry in entries})


def train_and_save(
    hf: Path, ranks: Ranks, folder: Path, more: int, options: dict[str, Any] | None = None
) -> list[str]:
    """The state after three updates, which are saved, and `more`."""
    run = start(hf, ranks, **options or {})
    run.train(range(3))
    run.save(folder, 3, {"step": 3, "loader": {"epoch": 1, "seen": [1, 2]}})
    run.train(range(3, 3 + more))
    return run.fingerprint()


def load_and_save(
    hf: Path, ranks: Ranks, source: Path, target: Path, options: dict[str, Any]
) -> None:
    """As loaded, and after two more updates."""
    run = start(hf, ranks, seed=99, **options)
    run.load(source)
    run.save(target, 3)
    run.train(range(3, 5))
    run.save(target, 5)


def check_state(hf: Path, folder: Path, first: Ranks, second: Ranks, **options: Any) -> list[str]:
    """Check that a run of layout `first` goes on under `second` from the same weights and optimizer
    state, every tensor bit for bit. Returns the names of the tensors.
    """
    saved, same, other = (folder / name for name in ("saved", "same", "other"))
    launch(first.world_size, train_and_save, hf, first, saved, 0, options)
    launch(first.world_size, load_and_save, hf, first, saved, same, options)
    launch(second.world_size, load_and_save, hf, second, saved, other, options)
    assert_equal_tensors(saved, other, 3)
    return assert_equal_tensors(same, other, 5)


def assert_equal_tensors(first: Path, second: Path, step: int) -> list[str]:
    expected, found = (StepReader(step_folder(folder, step)) for folder in (first, second))
    assert found.tensors.keys() == expected.tensors.keys()
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in found.tensors)
    for key in found.tensors:
        assert torch.equal(found.read(key), expected.read(key)), key
    return list(found.tensors)


def made_up(name: str, entry: Entry) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return torch.randn(entry.megatron_shape, generator=torch.Generator().manual_seed(seed))
