"""A small training run for checkpoint tests: the real model and optimizer, made-up gradients.

A gradient depends on the tensor's name and the step alone and is cut as the tensor is, so that runs
under different layouts make the same updates, bit by bit.
"""

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from megavlm import checkpointing
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.models.common.loading import HFFolder, load_hf, local_tensors
from megavlm.models.common.mapping import Entry, shard_tensor
from megavlm.models.common.model import VisionLanguageModel
from megavlm.models.registry import build_model, family
from megavlm.parallel.mesh import Mesh, build_mesh
from megavlm.training.optimizer import Updater, build_updater

SETTINGS = SimpleNamespace(
    lr=1e-2,
    min_lr=1e-4,
    schedule="cosine",
    warmup_steps=2,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.01,
    clip_grad=1e9,  # a norm is summed in another order under another layout; do not scale by it
)


def make_hf(folder: Path, *, seed: int = 0, **sizes: Any) -> Path:
    sizes = {"num_layers": 2, "vision_depth": 1} | sizes
    make_tiny_model(folder, ["red"], seed=seed, randomise_norms_and_biases=True, **sizes)
    return folder


@dataclass
class Run:
    mesh: Mesh
    model: VisionLanguageModel
    updater: Updater
    table: dict[str, Entry]

    def train(self, steps: range) -> None:
        for step in steps:
            self.updater.zero_gradients()
            for target in local_tensors(self.model):
                if target.data.requires_grad:
                    gradient = made_up(f"{target.key} {step}", self.table[target.key])
                    target.data.main_grad.copy_(self.cut(target.key, gradient))
            self.updater.step()

    def cut(self, key: str, full: torch.Tensor) -> torch.Tensor:
        return shard_tensor(self.table[key], full, self.mesh.tensor_rank, self.mesh.tensor_size)

    def save(self, folder: Path, step: int, extra: dict[str, Any] | None = None) -> None:
        checkpointing.save(
            folder,
            step,
            model=self.model,
            optimizer=self.updater.optimizer,
            scheduler=self.updater.scheduler,
            extra=extra or {},
        )

    def load(self, folder: Path, step: int | None = None) -> dict[str, Any]:
        return checkpointing.load(
            folder,
            step=step,
            model=self.model,
            optimizer=self.updater.optimizer,
            scheduler=self.updater.scheduler,
        )

    def weights(self) -> dict[str, torch.Tensor]:
        return {target.key: target.data.detach().clone() for target in local_tensors(self.model)}

    def fingerprint(self) -> list[str]:
        """Weights, learning rate and the next random numbers of every generator, exactly."""
        digest = hashlib.sha256()
        for key, tensor in sorted(self.weights().items()):
            digest.update(key.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            megatron = torch.rand(1).item()
        numbers = (random.random(), np.random.random(), torch.rand(1).item(), megatron)
        return [digest.hexdigest(), *map(str, (self.updater.learning_rate, *numbers))]


def start(
    hf: Path,
    tensor: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    freeze: bool = True,
) -> Run:
    """A run at step 0 with the folder's weights."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    mesh = build_mesh(tensor=tensor, seed=seed)
    config = AutoConfig.from_pretrained(hf)
    model = build_model(config, mesh, dtype=dtype, freeze_tower=freeze, freeze_merger=freeze)
    entries = family(config.model_type).mapping(config)
    load_hf(model, entries, HFFolder(hf), mesh.tensor_rank, mesh.tensor_size)
    updater = build_updater(model, SETTINGS, num_steps=10)
    return Run(mesh, model, updater, {entry.megatron: entry for entry in entries})


def made_up(name: str, entry: Entry) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return torch.randn(entry.megatron_shape, generator=torch.Generator().manual_seed(seed))
