"""Checkpoints of mixtures of experts and of Gated DeltaNet: weights and optimizer state go from
every layout to every other, and experts are stacked in them as in a HuggingFace folder.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from megavlm.checkpointing.folder import step_folder
from megavlm.checkpointing.load import load_checkpoint
from megavlm.checkpointing.reader import StepReader
from megavlm.families import family
from megavlm.models.common.hf_source import HFFolder
from megavlm.models.common.mapping import by_key
from megavlm.parallel.mesh import Layout
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS, Ranks
from tests.support.fork import launch
from tests.support.levels import slow
from tests.unit.checkpointing.ranks import (
    ONE_RANK,
    check_state,
    make_hf,
    start,
    train_and_save,
)

pytestmark = pytest.mark.distributed
ALL_LAYOUTS = {
    **LAYOUTS,
    **EXPERT_LAYOUTS,
    "EP2xDP4": Ranks(Layout(expert=2), data=4),  # each expert on two data ranks
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with experts on both sides of a dense one."""
    folder = tmp_path_factory.mktemp("experts")
    return make_hf(folder, family="qwen3_vl_moe", num_layers=4, dense_layers=[1])


MOMENT = "optimizer.state.exp_avg_sq."


def resume(hf: Path, ranks: Ranks, folder: Path, dtype: torch.dtype) -> list[str]:
    run = start(hf, ranks, seed=99, dtype=dtype)
    run.load(folder)
    run.train(range(3, 5))
    return run.fingerprint()


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("EP2 over TP2+SP", torch.bfloat16), *slow(("EP2", torch.float32))],
)
def test_a_resumed_run_is_bit_equal(
    hf: Path, tmp_path: Path, layout: str, dtype: torch.dtype
) -> None:
    ranks = ALL_LAYOUTS[layout]
    through = launch(ranks.world_size, train_and_save, hf, ranks, tmp_path, 2, {"dtype": dtype})
    assert launch(ranks.world_size, resume, hf, ranks, tmp_path, dtype) == through
    assert through[0][0] != through[1][0], "experts differ over ranks"


def load_and_save(hf: Path, ranks: Ranks, source: Path, target: Path) -> None:
    """As loaded, and after two more updates."""
    run = start(hf, ranks, seed=99)
    run.load(source)
    run.save(target, 3)
    run.train(range(3, 5))
    run.save(target, 5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("EP2 over TP2+SP", "EP2"),
        *slow(
            ("EP2xPP2 virtual 2", "expert TP2+SP"),
            ("expert TP2+SP", "EP2xDP4"),
        ),
    ],
)
def test_another_layout_goes_on_from_equal_state(
    hf: Path, tmp_path: Path, before: str, after: str
) -> None:
    keys = check_state(hf, tmp_path, ALL_LAYOUTS[before], ALL_LAYOUTS[after])
    assert any(key.startswith(MOMENT) and ".mlp.experts." in key for key in keys)


@pytest.mark.parametrize(
    ("model", "before", "after", "dtype"),
    [
        ("qwen3_5", "one rank", "DP2", torch.bfloat16),
        *slow(
            ("qwen3_5", "PP2 virtual 2", "TP2", torch.float32),
            ("qwen3_5", "CP2xDP2", "TP2xPP2", torch.bfloat16),
            ("qwen3_5_moe", "EP2xPP2", "TP2+SP", torch.float32),
        ),
    ],
)
def test_gated_delta_net_goes_on_from_equal_state(
    tmp_path: Path, model: str, before: str, after: str, dtype: torch.dtype
) -> None:
    """Its weights are cut by key heads, and one of them stays in fp32."""
    hf = make_hf(tmp_path / "hf", family=model, num_layers=4)
    first, second = ALL_LAYOUTS[before], ALL_LAYOUTS[after]
    keys = check_state(hf, tmp_path, first, second, dtype=dtype)
    for name in ("A_log", "conv_weight", "dt_bias", "in_proj.weight"):
        assert any(key.startswith(MOMENT) and key.endswith(name) for key in keys), name


def save_start(hf: Path, ranks: Ranks, folder: Path) -> None:
    start(hf, ranks).save(folder, 0)


def load_weights(hf: Path, folder: Path) -> bool:
    run = start(hf, ONE_RANK)
    expected = run.weights()
    with torch.no_grad():
        for parameter in run.chunks[0].parameters():
            parameter.fill_(7)
    load_checkpoint(folder, chunks=run.chunks)
    found = run.weights()
    return all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_of_expert_ranks_load_on_one(hf: Path, tmp_path: Path) -> None:
    """Each expert in its own place of the stack."""
    ranks = ALL_LAYOUTS["EP2"]
    launch(ranks.world_size, save_start, hf, ranks, tmp_path)
    assert launch(1, load_weights, hf, tmp_path) == [True]
    config = AutoConfig.from_pretrained(hf)
    source, reader = HFFolder(hf), StepReader(step_folder(tmp_path, 0))
    stacks = [
        group for group in by_key(family(config.model_type).mapping(config)).values() if group[1:]
    ]
    assert len(stacks) == 6, "two of each layer with experts"
    for group in stacks:
        stack = reader.read(group[0].megatron)
        for row, entry in zip(stack, group, strict=True):
            (name,) = entry.hf
            assert torch.equal(row, entry.to_megatron([source[name][entry.expert]]))
