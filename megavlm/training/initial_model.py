"""Initial model of a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from megavlm.checkpointing.adapter_settings import AdapterSettings, check_alpha, saved_adapter_keys
from megavlm.checkpointing.all_ranks import run_on_all_ranks
from megavlm.checkpointing.folder import locate_step
from megavlm.checkpointing.load import load_checkpoint
from megavlm.checkpointing.reader import StepReader, has_draft_head
from megavlm.config.lora import LoRA
from megavlm.config.schema import Config
from megavlm.families import family
from megavlm.models.build import build_model
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.loading import HFFolder, load_hf
from megavlm.models.common.lora import add_adapters
from megavlm.models.common.mapping import Entry
from megavlm.models.common.model import VisionLanguageModel
from megavlm.parallel.mesh import Mesh

DRAFT_HEAD = "draft_head."  # prefix of its Megatron tensors


def starting_step(config: Config) -> Path | None:
    """Return the checkpoint step in `model.checkpoint` that a run starts from; None if it starts
    from an HF folder. It is searched once, so that policy, critic and adapter settings come from
    the same step. Collective: only one rank searches, so that a warning appears once.
    """
    source = config.model.checkpoint
    if source is None:
        return None
    (step, *_) = run_on_all_ranks(
        "start", lambda: locate_step(Path(source), None) if dist.get_rank() == 0 else Path()
    )
    return step


def start_model(
    config: Config,
    step: Path | None,
    hf_config: Any,
    entries: Sequence[Entry],
    mesh: Mesh,
    head: Literal["tokens", "values", "both"],
) -> list[VisionLanguageModel]:
    """Build this rank's part of the model with the weights of `step`, or of `model.folder` if
    `step` is None. Adapters are newly initialized unless the step has them; a value head predicts
    0; a draft head that the step does not have is the one of `model.folder`, or of the folder that
    the servers draft with. Collective.
    """
    drafts = config.speculation.train and head != "values"  # a separate critic drafts nothing
    kind = family(hf_config.model_type).draft_head
    options = replace(ModelOptions.from_config(config), head=head, draft_head=drafts)
    model = build_model(hf_config, mesh, options)
    lora = config.lora
    goes_on = step is not None and lora.rank > 0 and _goes_on(step, lora.alpha)
    if goes_on:
        _add(model, lora, config.run.seed)
    if step is not None:
        has_head = drafts and _on_rank_0(lambda: has_draft_head(StepReader(step)))
        with _without_heads(model, draft=not has_head):
            load_checkpoint(step, chunks=model, model_type=hf_config.model_type)
    else:
        has_head = not drafts or kind == "mtp"
        own = [x for x in entries if kind == "mtp" or not x.megatron.startswith(DRAFT_HEAD)]
        with _without_heads(model, draft=not has_head):
            for chunk in model:
                load_hf(chunk, own, HFFolder(config.model.folder), mesh)
    if drafts and not has_head:
        folder = config.model.folder if kind == "mtp" else config.rollout.draft_folder
        assert folder is not None, "the recipe was checked"
        load_draft_head(model, entries, head_tensors(folder, kind), mesh)
    if not goes_on:
        _add(model, lora, config.run.seed)
    return model


def adapter_settings(config: Config, step: Path | None) -> AdapterSettings | None:
    """Return the settings of the LoRA adapters that a run trains, including their base model; None
    without adapters.
    """
    if config.lora.rank == 0:
        return None
    if step is None:
        base: str | None = config.model.folder
    else:
        known = AdapterSettings.read(step)
        base = known.base if known else None
    return AdapterSettings(config.lora.rank, config.lora.alpha, base)


def _goes_on(step: Path, alpha: float) -> bool:
    """Return True if the step has adapters, so that their training continues. Raises ValueError if
    their alpha differs. Collective.
    """

    def look() -> bool:
        if not saved_adapter_keys(step):
            return False
        check_alpha(step, alpha)
        return True

    return _on_rank_0(look)


def _on_rank_0(look: Callable[[], bool]) -> bool:
    """Return on every rank what rank 0 has found. Raises its ValueError on every rank.
    Collective.
    """
    (found, *_) = run_on_all_ranks("start", lambda: dist.get_rank() == 0 and look())
    return found


def head_tensors(folder: str | Path, kind: str | None) -> dict[str, Tensor]:
    """Return the tensors of a draft head by their names in the mapping: of a model folder, or of
    the folder that an EAGLE-3 head has for itself.
    """
    source = HFFolder(folder)
    if kind == "eagle3":
        return {f"mtp.{name}": source[name] for name in source}
    return {name: source[name] for name in source if name.startswith("mtp.")}


def load_draft_head(
    model: Sequence[VisionLanguageModel],
    entries: Sequence[Entry],
    tensors: Mapping[str, Tensor],
    mesh: Mesh,
) -> None:
    """Load the draft head, on the rank that has it. tensors: The result of `head_tensors`."""
    own = [
        replace(entry, megatron=entry.megatron.removeprefix(DRAFT_HEAD))
        for entry in entries
        if entry.megatron.startswith(DRAFT_HEAD)
    ]
    for chunk in model:
        if chunk.draft_head is not None:
            load_hf(chunk.draft_head, own, tensors, mesh)


def _add(model: Sequence[VisionLanguageModel], lora: LoRA, seed: int) -> None:
    if lora.rank:
        for chunk in model:
            add_adapters(chunk, lora, seed=seed)


@contextmanager
def _without_heads(model: Sequence[VisionLanguageModel], *, draft: bool) -> Iterator[None]:
    """Detach the value head, and with `draft` the draft head, within the context, because a
    checkpoint to start from need not have them.
    """
    heads = [(chunk.value_head, chunk.draft_head) for chunk in model]
    for chunk in model:
        chunk.value_head = None
        chunk.draft_head = None if draft else chunk.draft_head
    yield
    for chunk, (value_head, draft_head) in zip(model, heads, strict=True):
        chunk.value_head, chunk.draft_head = value_head, draft_head
