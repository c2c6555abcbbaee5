"""A model as a run starts with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from megavlm import checkpointing
from megavlm.checkpointing.adapters import AdapterSettings, check_alpha, has_adapters
from megavlm.checkpointing.folder import locate
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
    source, adapters = config.model.checkpoint, lora(config)
    goes_on = source is not None and adapters is not None and has_adapters(source)
    if source is not None and goes_on:
        check_alpha(source, config.lora.alpha)
        _add(model, adapters, config.run.seed)
    if source is not None:
        with _without_value_head(model):
            checkpointing.load(source, chunks=model)
    else:
        for chunk in model:
            load_hf(chunk, entries, HFFolder(config.model.folder), mesh)
    if not goes_on:
        _add(model, adapters, config.run.seed)
    return model


def adapter_settings(config: Config) -> AdapterSettings | None:
    """Of the adapters that a run trains. They belong to the weights that it started from."""
    if config.lora.rank == 0:
        return None
    source, base = config.model.checkpoint, config.model.folder
    if source is not None:
        known = AdapterSettings.read(locate(Path(source), None))
        return AdapterSettings(config.lora.rank, config.lora.alpha, known.base if known else None)
    return AdapterSettings(config.lora.rank, config.lora.alpha, base)


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
