"""A model as a run starts with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from megavlm import checkpointing
from megavlm.config.schema import Config
from megavlm.models.common.loading import HFFolder, load_hf
from megavlm.models.common.lora import add_adapters
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
    """This rank's part of it, with the weights of `model` and fresh adapters; a value head says 0.
    Collective.
    """
    model = build_model(hf_config, mesh, replace(model_options(config), head=head))
    if config.model.checkpoint is not None:
        with _without_value_head(model):
            checkpointing.load(config.model.checkpoint, chunks=model)
    else:
        for chunk in model:
            load_hf(chunk, entries, HFFolder(config.model.folder), mesh)
    if adapters := lora(config):
        for chunk in model:
            add_adapters(chunk, adapters, seed=config.run.seed)
    return model


@contextmanager
def _without_value_head(model: Sequence[VisionLanguageModel]) -> Iterator[None]:
    """A checkpoint to start from need not have one."""
    heads = [chunk.value_head for chunk in model]
    for chunk in model:
        chunk.value_head = None
    yield
    for chunk, head in zip(model, heads, strict=True):
        chunk.value_head = head
