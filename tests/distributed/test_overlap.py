"""Gradients reduced during the backward and parameters gathered during the next forward: the same
updates, whatever the ranks' last packs use.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megavlm.config.lora import LoRA
from megavlm.config.optimizer import Optimizer
from megavlm.training import gradient_buffers
from megavlm.training.losses import supervised_loss
from tests.distributed.test_updates import SETTINGS, STEPS, start
from tests.parity.models import model_folder
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS
from tests.support.columns import columns
from tests.support.fork import launch
from tests.support.levels import slow
from tests.support.trees import empty_pack
from tests.unit.checkpointing.ranks import SmallBuckets

pytestmark = pytest.mark.distributed
ADAPTERS = LoRA(rank=4, targets=("language.attention", "language.mlp", "vision.attention"))
# The norm is summed in another order, so that clipping would change the last bits.
PLAIN = replace(SETTINGS, clip_grad=0.0)
GRADIENTS = replace(PLAIN, megatron={"overlap_grad_reduce": True})
BOTH = replace(PLAIN, megatron={"overlap_grad_reduce": True, "overlap_param_gather": True})


def updates(
    folder: Path, layout: str, settings: Optimizer, frozen: bool, lora: LoRA | None
) -> tuple[list[Any], list[Any], list[bool]]:
    """Return norm and loss of each update, the parameters afterwards, and of each bucket group of
    the last update whether its reduction began in the backward.
    """
    ranks = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    gradient_buffers.DistributedDataParallelConfig = SmallBuckets
    run = start(folder, ranks, frozen=frozen, lora=lora, settings=settings)
    chunks, begun = run.updater.chunks, list[bool]()
    finalize = chunks[0].config.finalize_model_grads_func
    visual = chunks[0].module.visual
    tower = set() if visual is None else {p for p in visual.parameters() if p.requires_grad}

    def watched(*args: Any, **kwargs: Any) -> None:
        groups = [group for chunk in chunks for group in gradient_buffers._groups(chunk)]
        begun[:] = [group.grad_reduce_handle is not None for group in groups]
        of_tower = [begun[i] for i, group in enumerate(groups) if tower & group.params]
        assert not any(of_tower), "ranks whose last pack has no images would begin it later"
        finalize(*args, **kwargs)

    chunks[0].config.finalize_model_grads_func = watched
    head = chunks[-1].module.language_model
    output_weight = head.output_weight

    def complete() -> torch.Tensor:
        group = chunks[-1].param_to_bucket_group.get(output_weight())
        assert group is None or group.param_gather_handle is None, "read before it is gathered"
        return output_weight()

    head.output_weight = complete
    # Padding alone, without images, comes last on some ranks and first on others.
    shape = {"multiple": ranks.mesh.tensor, "context_size": ranks.mesh.context}
    padding = [empty_pack(columns(0), **shape).part(run.mesh.context_rank)] * ranks.mesh.pipeline
    packs = run.packs + padding if run.mesh.data_rank else padding + run.packs
    assert bool(packs[-1].images) is (run.mesh.data_rank == 0)
    targets = sum(len(response) for case in run.cases for response in case.responses)
    history = []
    for step in range(STEPS):
        loss = supervised_loss(targets)
        more = padding * step + packs  # as many packs as a step happens to have
        report = run.updater.update(more, run.features(), loss, step=step)
        history.append([report["gradient_norm"], report["loss"]])
    logprobs = run.logprobs(run.features())  # a forward without gradients waits, too
    run.updater.finish()
    return history, [*run.parameters(), *logprobs], begun


def check(
    family: str, layout: str, settings: Optimizer, *, frozen: bool = False, lora: LoRA | None = None
) -> list[list[bool]]:
    """Return, by rank, which bucket groups were reduced during the backward. Sums of two ranks are
    the same in any order: every parameter is the same to the last bit.
    """
    folder, size = model_folder(family), (LAYOUTS | EXPERT_LAYOUTS)[layout].world_size
    plain = launch(size, updates, folder, layout, PLAIN, frozen, lora)
    overlapped = launch(size, updates, folder, layout, settings, frozen, lora)
    for (history, tensors, none), (its_history, its_tensors, _) in zip(
        plain, overlapped, strict=True
    ):
        assert not any(none)
        np.testing.assert_allclose(its_history, history, rtol=1e-6)
        for tensor, its_tensor in zip(tensors, its_tensors, strict=True):
            np.testing.assert_array_equal(its_tensor, tensor)
    return [begun for *_, begun in overlapped]


@pytest.mark.parametrize(
    ("family", "layout", "settings"),
    [
        ("qwen2_5_vl", "DP2", BOTH),
        *slow(
            ("qwen2_5_vl", "DP2", GRADIENTS),
            ("qwen2_5_vl", "TP2xDP2", BOTH),
            ("qwen2_5_vl", "PP2 virtual 2", BOTH),
            ("qwen2_5_vl", "CP2", BOTH),
            ("qwen3_vl_moe", "EP2", BOTH),
        ),
    ],
)
def test_the_same_updates(family: str, layout: str, settings: Optimizer) -> None:
    """With a trained tower, whose buckets are reduced last, on ranks whose last packs have no
    images, too.
    """
    for begun in check(family, layout, settings):
        assert any(begun), "overlap"


@pytest.mark.slow
def test_a_frozen_tower_holds_nothing_up() -> None:
    for begun in check("qwen2_5_vl", "DP2", BOTH, frozen=True):
        assert all(begun) and len(begun) > 2


@pytest.mark.slow
def test_adapters() -> None:
    for begun in check("qwen2_5_vl", "DP2", BOTH, frozen=True, lora=ADAPTERS):
        assert len(begun) > 0


def test_half_gradients() -> None:
    """Buffers of bfloat16 for a model in it."""
    (dtypes,) = launch(1, half, model_folder("qwen2_5_vl"))
    assert dtypes == ["torch.bfloat16"]


def half(folder: Path) -> list[str]:
    from megavlm.models.build import build_model
    from megavlm.models.common.config import ModelOptions
    from megavlm.parallel.mesh import build_mesh
    from tests.parity.inputs import inputs_of

    mesh = build_mesh(LAYOUTS["one rank"].mesh)
    chunks = build_model(inputs_of(folder).config, mesh, ModelOptions(dtype=torch.bfloat16))
    wrapped = gradient_buffers.wrap(chunks, replace(PLAIN, megatron={"grad_reduce_in_fp32": False}))
    return [str(buffer.grad_data.dtype) for chunk in wrapped for buffer in chunk.buffers]
