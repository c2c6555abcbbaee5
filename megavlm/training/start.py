"""A model as a run starts with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from megavlm import checkpointing
from megavlm.checkpointing.adapters import AdapterSettings, adapters, check_alpha
from megavlm.checkpointing.folder import locate
from megavlm.checkpointing.together import together
from megavlm.config.schema import Config
from megavlm.models.common.loading import HFFolder, load_hf
from megavlm.models.common.lora import LoRA, add_adapters
from megavlm.models.common.mapping import Entry
from megavlm.models.common.model import VisionLanguageModel
from megavlm.models.registry import build_model
from megavlm.parallel.mesh import Mesh
from megavlm.training.options import lora, model_options


def start_model(
    config: Config,
    hf_config: Any,
    entries: Sequence[Entry],
    mesh: Mesh,
    head: Literal["tokens", "values", "both"],
) -> list[VisionLanguageModel]:
    """This rank's part of it, with the weights of `model`, and adapters that are fresh unless they
    are in `model.checkpoint`; a value head says 0. Collective.
    """
    model = build_model(hf_config, mesh, replace(model_options(config), head=head))
    source, fresh = config.model.checkpoint, lora(config)
    step = None if source is None else _step(source)
    goes_on = step is not None and fresh is not None and _goes_on(step, config.lora.alpha)
    if goes_on:
        _add(model, fresh, config.run.seed)
    if step is not None:
        with _without_value_head(model):
            checkpointing.load(step, chunks=model)
    else:
        for chunk in model:
            load_hf(chunk, entries, HFFolder(config.model.folder), mesh)
    if not goes_on:
        _add(model, fresh, config.run.seed)
    return model


def adapter_settings(config: Config) -> AdapterSettings | None:
    """Of the adapters that a run trains. They belong to the weights that it started from, after
    `start_model`.
    """
    if config.lora.rank == 0:
        return None
    source, base = config.model.checkpoint, config.model.folder
    if source is not None:
        known = AdapterSettings.read(_step(source))
        return AdapterSettings(config.lora.rank, config.lora.alpha, known.base if known else None)
    return AdapterSettings(config.lora.rank, config.lora.alpha, base)


@cache
def _step(source: str) -> Path:
    """The step of `model.checkpoint` that the run starts from. Looked for once, by one rank, which
    warns if it has to: a critic and the adapters' settings are of the policy's step, whatever
    appears there meanwhile. Collective where it looks.
    """
    (step, *_) = together(
        "start", lambda: locate(Path(source), None) if dist.get_rank() == 0 else Path()
    )
    return step


def _goes_on(step: Path, alpha: float) -> bool:
    """Whether the step has adapters; ValueError where they had another alpha. Collective."""

    def look() -> bool:
        if dist.get_rank() != 0 or not adapters(step):
            return False
        check_alpha(step, alpha)
        return True

    (found, *_) = together("start", look)
    return found


def _add(model: Sequence[VisionLanguageModel], adapters: LoRA | None, seed: int) -> None:
    if adapters is not None:
        for chunk in model:
            add_adapters(chunk, adapters, seed=seed)


@contextmanager
def _without_value_head(model: Sequence[VisionLanguageModel]) -> Iterator[None]:
    """A checkpoint to start from need not have one."""
    heads = [chunk.value_head for chunk in model]
    for chunk in model:
        chunk.value_head = None
    yield
    for chunk, head in zip(model, heads, strict=True):
        chunk.value_head = head
