"""The precision-aware optimizer (Transformer Engine's FusedAdam) against the ordinary one, on the
GPU path; `test_stage.py` and `make test-gpu-path` run them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megavlm.checkpointing.folder import step_folder
from megavlm.checkpointing.reader import StepReader
from megavlm.training.colocate import trainer_memory
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS, Ranks
from tests.support.fork import launch
from tests.unit.checkpointing.ranks import Run, make_hf, start

ALL_LAYOUTS = LAYOUTS | EXPERT_LAYOUTS
HALF = {"dtype": torch.bfloat16, "freeze": False}
AWARE = {"use_precision_aware_optimizer": True}
MOMENTS = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
TIE = 0x8000  # lower half of a main weight in the middle between two bfloat16 numbers


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf(tmp_path_factory.mktemp("hf"))


def train(
    hf: Path,
    ranks: Ranks,
    keys: dict[str, Any],
    folder: Path,
    steps: int = 3,
    source: Path | None = None,
    away: bool = False,
) -> list[str]:
    """Train and save, from a saved step if `source` is given. away: memory goes to the host before
    each update and comes back.
    """
    keys = {"clip_grad": 0.5} | keys
    run = start(hf, ranks, **HALF, overlap=keys.pop("overlap", False), optimizer=keys)
    first = 0
    if source is not None:
        first = run.load(source)["step"]
    for step in range(first, first + steps):
        if away:
            go_and_come_back(run)
        run.train(range(step, step + 1))
    run.save(folder, 3, {"step": first + steps})
    return run.fingerprint()


def go_and_come_back(run: Run) -> None:
    parts = trainer_memory(run.updater)
    for part in parts.values():
        part.to_host()
    for part in reversed(parts.values()):
        part.to_device()


def saved(folder: Path) -> dict[str, torch.Tensor]:
    reader = StepReader(step_folder(folder, 3))
    return {key: reader.read(key) for key in reader.tensors}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Main weights and moments are equal bit by bit; so are weights, but for ties: the kernel
    rounds them away from zero, torch to even.
    """
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        same = found[key] == value
        if value.dtype == torch.bfloat16:
            main = expected[f"optimizer.state.param.{key}"].view(torch.int32)
            same |= (main & 0xFFFF) == TIE
        assert same.all(), key


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same, but for the last bit of few main weights."""
    assert found.keys() == expected.keys()
    different = total = 0
    for key, value in expected.items():
        if ".exp_avg" in key:
            assert found[key].equal(value), key
            continue
        gap = (found[key].float() - value.float()).abs()
        bit = 2.0**-7 * value.abs() if value.dtype == torch.bfloat16 else 2.0**-23
        assert (gap <= bit * value.float().abs().max().clamp(min=1)).all(), key
        different, total = different + int(gap.count_nonzero()), total + gap.numel()
    assert different <= 5e-5 * total


@pytest.mark.parametrize(
    ("family", "layout", "keys"),
    [
        ("qwen2_5_vl", "one rank", {}),
        ("qwen2_5_vl", "DP2", {"overlap": True}),  # several buckets, padded
        ("qwen2_5_vl", "PP2", {}),
        ("qwen3_vl_moe", "EP2", {}),
        ("qwen3_5", "TP2+SP", {}),  # some of its parameters stay in fp32
    ],
)
def test_updates_are_the_ordinary_ones_bit_by_bit(
    tmp_path: Path, family: str, layout: str, keys: dict[str, Any]
) -> None:
    hf, ranks = make_hf(tmp_path / "hf", family=family), ALL_LAYOUTS[layout]
    for name, chosen in (("ordinary", {}), ("aware", AWARE)):
        launch(ranks.world_size, train, hf, ranks, keys | chosen, tmp_path / name)
    expected = saved(tmp_path / "ordinary")
    assert_same(saved(tmp_path / "aware"), expected)
    remainders = [x for key, x in expected.items() if ".param." in key]
    assert any((x.view(torch.int32) & 0xFFFF).any() for x in remainders), "fp32 main weights"


def test_moments_in_bf16_are_rounded_after_the_update(hf: Path, tmp_path: Path) -> None:
    ranks = LAYOUTS["DP2"]
    for name, keys in (("ordinary", {}), ("rounded", AWARE | MOMENTS)):
        launch(2, train, hf, ranks, keys, tmp_path / f"{name} 1", 1)
        launch(2, train, hf, ranks, keys, tmp_path / f"{name} 3", 3)
    expected = saved(tmp_path / "ordinary 1")
    for key, value in expected.items():
        if ".exp_avg" in key:
            expected[key] = value.bfloat16().float()
    assert_same(saved(tmp_path / "rounded 1"), expected)
    expected, found = saved(tmp_path / "ordinary 3"), saved(tmp_path / "rounded 3")
    differs = 0.0
    for key, value in expected.items():
        if ".param." in key:
            differs = max(differs, (found[key] - value).abs().max().item())
    # Each of two updates of lr 1e-2 has moments that were rounded by 2^-9 and less.
    assert 0 < differs < 2 * 1e-2 * 2**-7


@pytest.mark.parametrize("layout", ["DP2", "TP2"])
def test_a_resumed_run_is_bit_equal(hf: Path, tmp_path: Path, layout: str) -> None:
    ranks, keys = LAYOUTS[layout], AWARE | MOMENTS
    through = launch(2, train, hf, ranks, keys, tmp_path / "through", 5)
    launch(2, train, hf, ranks, keys, tmp_path / "part", 3)
    resumed = launch(2, train, hf, ranks, keys, tmp_path / "rest", 2, tmp_path / "part")
    assert [x[:2] for x in resumed] == [x[:2] for x in through]
    assert_same(saved(tmp_path / "rest"), saved(tmp_path / "through"))


def test_runs_go_on_with_another_optimizer_and_layout(hf: Path, tmp_path: Path) -> None:
    ordinary, aware = ({}, LAYOUTS["DP2"]), (AWARE, LAYOUTS["TP2xPP2"])
    hf = make_hf(tmp_path / "hf", num_layers=4)
    for name, (first, second) in (("to", (ordinary, aware)), ("back", (aware, ordinary))):
        keys, ranks = first
        launch(ranks.world_size, train, hf, ranks, keys, tmp_path / f"{name} 3", 3)
        for other, (keys, ranks) in (("same", first), ("other", second)):
            path = tmp_path / f"{name} {other}"
            source = tmp_path / f"{name} 3"
            launch(ranks.world_size, train, hf, ranks, keys | {"clip_grad": 0.0}, path, 2, source)
        # The norm is summed in another order under another layout, so that nothing is clipped.
        # A main weight in the middle between two weights was rounded down by the ordinary one.
        compare = assert_near if name == "to" else assert_same
        compare(saved(tmp_path / f"{name} other"), saved(tmp_path / f"{name} same"))


@pytest.mark.parametrize("keys", [{}, AWARE | MOMENTS], ids=["ordinary", "aware"])
def test_offloaded_state_makes_the_same_updates(
    hf: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    """And is saved, and loaded."""
    ranks = LAYOUTS["DP2"]
    for name, chosen in (("stayed", keys), ("went", keys | {"offload": True})):
        launch(2, train, hf, ranks, chosen, tmp_path / f"{name} 3", 3)
        launch(2, train, hf, ranks, chosen, tmp_path / name, 2, tmp_path / f"{name} 3")
    assert_same(saved(tmp_path / "went"), saved(tmp_path / "stayed"))


def test_states_leave_a_shared_gpu_and_come_back(hf: Path, tmp_path: Path) -> None:
    keys = AWARE | MOMENTS
    stayed = launch(2, train, hf, LAYOUTS["DP2"], keys, tmp_path / "stayed")
    went = launch(2, train, hf, LAYOUTS["DP2"], keys, tmp_path / "went", 3, None, True)
    assert went == stayed


def state_bytes(hf: Path, ranks: Ranks, keys: dict[str, Any]) -> int:
    """Return the bytes of all tensors of the optimizer that are not the model's own."""
    run = start(hf, ranks, **HALF, optimizer=keys)
    run.train(range(1))
    run.updater.zero_gradients()
    memory = trainer_memory(run.updater)["optimizer"]
    elements = sum(p.numel() for chunk in run.chunks for p in chunk.parameters())
    sizes = sum(tensor.nbytes for tensor in memory._tensors())
    assert sizes % elements == 0
    return sizes // elements


@pytest.mark.parametrize(
    ("keys", "size"), [({}, 12), (AWARE, 10), (AWARE | MOMENTS, 6)], ids=["ordinary", "10", "6"]
)
def test_bytes_of_a_parameter_are_those_of_the_plan(
    hf: Path, keys: dict[str, Any], size: int
) -> None:
    assert launch(1, state_bytes, hf, LAYOUTS["one rank"], keys) == [size]


def rounded_states(hf: Path, ranks: Ranks, keys: dict[str, Any]) -> set[str]:
    """Return the names of the states in bfloat16."""
    run = start(hf, ranks, **HALF, optimizer=AWARE | keys)
    states = run.updater.optimizer.chained_optimizers[0].optimizer.state.values()
    return {name for state in states for name, x in state.items() if x.dtype == torch.bfloat16}


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_a_moment_has_the_dtype_of_its_own_key(hf: Path, name: str) -> None:
    keys = {f"{name}_dtype": "bfloat16"}
    assert launch(1, rounded_states, hf, LAYOUTS["one rank"], keys) == [{name}]


def two_dtypes(hf: Path, ranks: Ranks) -> str:
    try:
        start(hf, ranks, **HALF, optimizer=AWARE | {"grad_reduce_in_fp32": False})
    except ValueError as error:
        return str(error)
    return ""


def test_gradients_of_two_dtypes_are_refused(hf: Path, tmp_path: Path) -> None:
    mixed = make_hf(tmp_path / "hf", family="qwen3_5")
    for message in launch(2, two_dtypes, mixed, LAYOUTS["DP2"]):
        assert message.startswith("optimizer.megatron.use_precision_aware_optimizer=true reads")
    assert launch(2, two_dtypes, hf, LAYOUTS["DP2"]) == ["", ""]


def gradients_in_bf16(hf: Path, ranks: Ranks, keys: dict[str, Any]) -> torch.Tensor:
    """Return the main weights after an update whose gradients are clipped, less those before."""
    run = start(
        hf, ranks, **HALF, optimizer=keys | {"grad_reduce_in_fp32": False, "clip_grad": 0.5}
    )
    before = main_weights(run)
    run.train(range(1))
    return main_weights(run) - before


def main_weights(run: Run) -> torch.Tensor:
    part = run.updater.optimizer.chained_optimizers[0]
    parameters = sorted(part.model_param_group_index_map, key=lambda p: p.numel())
    found = [part._get_main_param_and_optimizer_states(p)["param"] for p in parameters]
    return torch.cat([x.detach().clone().flatten() for x in found])


def test_gradients_in_bf16_are_clipped_in_bf16(hf: Path) -> None:
    """The ordinary optimizer clips a copy in fp32; a gradient near Adam's epsilon shows it."""
    ranks = LAYOUTS["one rank"]
    (expected,) = launch(1, gradients_in_bf16, hf, ranks, {})
    (found,) = launch(1, gradients_in_bf16, hf, ranks, AWARE)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=2**-8)
