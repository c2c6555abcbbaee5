"""Save and load of a training run, over layouts."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from safetensors.torch import load_file, save_file

from checkpoint_tools.draft_head import FOLDER
from checkpoint_tools.export_hf import export_hf
from checkpoint_tools.import_hf import import_hf
from megavlm.checkpointing.folder import (
    read_extra,
    step_folder,
    write_extra,
    write_hf_files,
)
from megavlm.checkpointing.load import load_checkpoint
from megavlm.checkpointing.reader import StepReader
from megavlm.checkpointing.save import SaveTarget, save_checkpoint
from megavlm.config.lora import LoRA
from megavlm.config.optimizer import MEGATRON_DEFAULTS
from megavlm.families import FAMILIES, language_values
from megavlm.models.common.eagle3 import check_head
from megavlm.models.common.hf_source import HFFolder
from megavlm.models.common.lora import add_adapters
from megavlm.training.initial_model import head_tensors
from megavlm.training.optimizer import build_updater
from tests.parity.eagle3_reference import add_random_eagle3
from tests.parity.table import LAYOUTS, Ranks
from tests.support.draft_head import add_draft_head
from tests.support.fork import launch
from tests.support.levels import slow
from tests.unit.checkpointing.ranks import (
    ONE_RANK,
    SETTINGS,
    TP2,
    check_state,
    made_up,
    make_hf,
    start,
    train_and_save,
)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, for two stages of two chunks."""
    return make_hf(tmp_path_factory.mktemp("hf"), num_layers=4)


def resume(
    hf: Path, ranks: Ranks, folder: Path, options: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    run = start(hf, ranks, seed=99, **options)
    extra = run.load(folder)
    run.train(range(3, 5))
    shorter = run.weights()
    run.train(range(5, 6))
    equal = [torch.equal(x, shorter[name]) for name, x in run.weights().items()]
    assert not all(equal), "the comparison can fail"
    return extra, run.fingerprint()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("PP2 virtual 2", {}),
        ("TP2", {"freeze": False}),
        # With fp32 weights in the optimizer.
        ("DP2", {"dtype": torch.bfloat16, "optimizer": {"offload": True}}),
        *slow(("DP2", {"dtype": torch.bfloat16}), ("CP2", {})),
    ],
)
def test_a_resumed_run_is_bit_equal(
    hf: Path, tmp_path: Path, layout: str, options: dict[str, Any]
) -> None:
    ranks = LAYOUTS[layout]
    through = launch(ranks.world_size, train_and_save, hf, ranks, tmp_path, 3, options)
    resumed = launch(ranks.world_size, resume, hf, ranks, tmp_path, options)
    for rank in range(ranks.world_size):
        extra, fingerprint = resumed[rank]
        assert fingerprint == through[rank]
        assert extra == {"step": 3, "loader": {"epoch": 1, "seen": [1, 2]}}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_a_draft_head_is_saved_with_the_model(family: str, tmp_path: Path) -> None:
    """Bit for bit, under the same and another layout, and in the exported folder. An EAGLE-3 head
    is exported to a folder of its own, from which a run can start.
    """
    is_eagle3 = FAMILIES[family].draft_head == "eagle3"
    plain = make_hf(tmp_path / "plain", family=family, num_layers=4)
    hf = (add_random_eagle3 if is_eagle3 else add_draft_head)(plain, tmp_path / "model")
    ranks, options = LAYOUTS["PP2"], {"draft_head": True}
    through = launch(2, train_and_save, hf, ranks, tmp_path / "run", 3, options)
    resumed = launch(2, resume, hf, ranks, tmp_path / "run", options)
    assert [fingerprint for _, fingerprint in resumed] == through
    names = check_state(hf, tmp_path, ranks, LAYOUTS["TP2+SP"], **options)
    assert "optimizer.state.exp_avg.draft_head.fc.weight" in names
    write_hf_files(hf, tmp_path / "run/hf")
    export_hf(tmp_path / "run", tmp_path / "exported")
    exported = tmp_path / "exported"
    assert set(HFFolder(exported)) == set(HFFolder(hf))
    kind = FAMILIES[family].draft_head
    before, after = (head_tensors(x / FOLDER if is_eagle3 else x, kind) for x in (hf, exported))
    assert before.keys() == after.keys() and len(after) == (12 if is_eagle3 else 15)
    for name in before:
        assert not after[name].equal(before[name]), name
    weight = StepReader(step_folder(tmp_path / "run", 3)).read("draft_head.fc.weight")
    assert after["mtp.fc.weight"].equal(weight)
    if is_eagle3:
        values = json.loads((exported / "config.json").read_text())
        check_head(exported / FOLDER, language_values(values), "make one")
    card = (exported / "README.md").read_text()
    assert "mtp" not in card and (f"`{FOLDER}`" in card) == is_eagle3


@pytest.mark.slow
@pytest.mark.distributed
def test_buckets_of_gradients_may_change(hf: Path, tmp_path: Path) -> None:
    """A run that overlaps their reduction goes on without, bit by bit."""
    ranks, options = LAYOUTS["DP2"], {"freeze": False}
    overlaps = options | {"overlap": True}
    through = launch(2, train_and_save, hf, ranks, tmp_path, 3, overlaps)
    resumed = launch(2, resume, hf, ranks, tmp_path, options)
    assert [fingerprint for _, fingerprint in resumed] == through


def test_the_options_of_recipes_are_megatron_core_s() -> None:
    known = {*OptimizerConfig.__dataclass_fields__}
    known |= {*DistributedDataParallelConfig.__dataclass_fields__}
    assert MEGATRON_DEFAULTS.keys() <= known


CHANGED = {
    "lr": 3e-3,
    "min_lr": 1e-3,
    "schedule": "linear",
    "warmup_steps": 0,
    "adam_beta1": 0.7,
    "adam_beta2": 0.8,
    "adam_eps": 1e-3,
    "weight_decay": 0.3,
    "clip_grad": 0.5,
}


def resume_with_changed_keys(hf: Path, ranks: Ranks, folder: Path) -> dict[str, float]:
    """The rate of the first update, and the largest difference of a weight from its computation.
    A step has two updates from now on.
    """
    run = start(hf, ranks, seed=99, freeze=False, optimizer=CHANGED, updates_per_step=2)
    run.load(folder)
    reader, rate = StepReader(step_folder(folder, 3)), run.updater.learning_rate
    gradients = {
        x.key: made_up(f"{x.key} {x.expert} 3", run.table[x.key, x.expert]) for x in run.tensors()
    }
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    beta1, beta2, eps = (CHANGED[f"adam_{name}"] for name in ("beta1", "beta2", "eps"))
    wanted = {}
    for x in run.tensors():
        gradient = gradients[x.key] * CHANGED["clip_grad"] / (norm + 1e-6)
        first = reader.read(f"optimizer.state.exp_avg.{x.key}")
        second = reader.read(f"optimizer.state.exp_avg_sq.{x.key}")
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        decay = CHANGED["weight_decay"] if x.data.dim() > 1 else 0.0
        size = (second / (1 - beta2**4)).sqrt() + eps
        wanted[x.key] = x.data * (1 - rate * decay) - rate * first / (1 - beta1**4) / size
    run.train(range(3, 4))
    differences = [(x.data - wanted[x.key]).abs().max() for x in run.tensors()]
    return {"rate": rate, "difference": float(max(differences))}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["one rank", *slow("DP2")])
def test_changed_keys_hold_from_the_first_update_after_a_resume(
    hf: Path, tmp_path: Path, layout: str
) -> None:
    ranks = LAYOUTS[layout]
    launch(ranks.world_size, train_and_save, hf, ranks, tmp_path, 0, {"freeze": False})
    for found in launch(ranks.world_size, resume_with_changed_keys, hf, ranks, tmp_path):
        assert found["rate"] == pytest.approx(1e-3 + 2e-3 * (1 - 3 / 10)), "three of ten are made"
        assert found["difference"] < 1e-6


def save_at_once(hf: Path, ranks: Ranks, folder: Path) -> list[str]:
    run = start(hf, ranks)
    run.save(folder, 0)
    run.train(range(3))
    return run.fingerprint()


def resume_at_once(hf: Path, ranks: Ranks, folder: Path) -> list[str]:
    run = start(hf, ranks, seed=99)
    run.load(folder)
    run.train(range(3))
    return run.fingerprint()


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["DP2", *slow("one rank")])
def test_a_run_can_be_saved_before_its_first_update(hf: Path, tmp_path: Path, layout: str) -> None:
    """As one whose first updates were all skipped."""
    ranks = LAYOUTS[layout]
    through = launch(ranks.world_size, save_at_once, hf, ranks, tmp_path)
    assert launch(ranks.world_size, resume_at_once, hf, ranks, tmp_path) == through


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("PP2 virtual 2", "TP2"),
        *slow(
            ("DP2", "CP2"),
            ("TP2xPP2", "DP2"),
            ("one rank", "PP2 virtual 2"),
        ),
    ],
)
def test_another_layout_goes_on_from_equal_state(
    hf: Path, tmp_path: Path, before: str, after: str
) -> None:
    check_state(hf, tmp_path, LAYOUTS[before], LAYOUTS[after])


@pytest.mark.distributed
@pytest.mark.parametrize(("before", "after"), [("PP2", "one rank"), *slow(("one rank", "PP2"))])
def test_tied_embeddings_are_on_the_first_and_the_last_stage(
    tmp_path: Path, before: str, after: str
) -> None:
    hf = make_hf(tmp_path / "hf", tied_embeddings=True)
    check_state(hf, tmp_path, LAYOUTS[before], LAYOUTS[after])


def save_weights(hf: Path, ranks: Ranks, folder: Path) -> dict[Any, torch.Tensor]:
    run = start(hf, ranks)
    run.train(range(1))
    save_checkpoint(SaveTarget(folder, hf), 1, run.updater, extra={})
    return run.weights()


@pytest.mark.distributed
@pytest.mark.parametrize("tied", [True, *slow(False)])
def test_an_export_holds_the_trained_weights(tmp_path: Path, tied: bool) -> None:
    hf = make_hf(tmp_path / "hf", tied_embeddings=tied)
    (expected,) = launch(1, save_weights, hf, ONE_RANK, tmp_path / "one")
    launch(2, save_weights, hf, TP2, tmp_path / "two")
    launch(2, save_weights, hf, LAYOUTS["PP2"], tmp_path / "stages")
    for name in ("one", "two", "stages"):
        export_hf(tmp_path / name, tmp_path / f"{name}_hf")
        (exported,) = launch(1, weights_of, tmp_path / f"{name}_hf")
        assert exported.keys() == expected.keys()
        for key, tensor in expected.items():
            assert (exported[key] == tensor).all(), key
    before, after = HFFolder(hf), HFFolder(tmp_path / "two_hf")
    assert set(before) == set(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if not name.startswith("visual.")}
    assert (tmp_path / "two_hf" / "tokenizer.json").is_file()


def weights_of(hf: Path) -> dict[Any, torch.Tensor]:
    return start(hf, ONE_RANK).weights()


def load_weights(hf: Path, ranks: Ranks, folder: Path) -> bool:
    run = start(hf, ranks)
    expected = run.weights()
    with torch.no_grad():
        for chunk in run.chunks:
            for parameter in chunk.parameters():
                parameter.fill_(7)
    assert load_checkpoint(folder, chunks=run.chunks) == {}
    found = run.weights()
    return all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.slow
@pytest.mark.distributed
def test_imported_weights_in_bf16_load_into_a_model_in_fp32(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", num_layers=4)
    path = hf / "model.safetensors"
    save_file({name: x.bfloat16() for name, x in load_file(path).items()}, path)
    import_hf(hf, tmp_path / "checkpoint")
    assert launch(1, load_weights, hf, ONE_RANK, tmp_path / "checkpoint") == [True]


def load_error(
    hf: Path,
    ranks: Ranks,
    folder: Path,
    step: int | None,
    weights: bool,
    options: dict[str, Any] | None = None,
) -> str:
    run = start(hf, ranks, **options or {})
    try:
        if weights:
            config = json.loads((hf / "config.json").read_text())
            load_checkpoint(folder, step=step, chunks=run.chunks, model_type=config["model_type"])
        else:
            run.load(folder, step)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.distributed
def test_what_cannot_be_loaded_is_named_on_every_rank(hf: Path, tmp_path: Path) -> None:
    import_hf(hf, tmp_path / "imported")
    launch(2, train_and_save, hf, TP2, tmp_path / "trained", 0)
    wide = make_hf(tmp_path / "wide", num_layers=4, ffn_size=512)
    deep = make_hf(tmp_path / "deep", num_layers=6)
    other = make_hf(tmp_path / "other", num_layers=4, family="qwen2_vl")

    for source, folder, step, weights, message in (
        (hf, tmp_path / "imported", None, False, "holds weights only"),
        (hf, tmp_path / "nothing", None, True, "holds no complete checkpoint."),
        (hf, tmp_path / "trained", 2, True, "no complete checkpoint of step 2; it has steps 3."),
        (other, tmp_path / "imported", None, True, "qwen2_5_vl, but model.folder one of qwen2_vl"),
        (wide, tmp_path / "imported", None, True, "(512, 128), but the model's has (1024, 128): "),
        (deep, tmp_path / "trained", None, True, "but the model needs it: "),
    ):
        for layout in ("TP2", "PP2"):  # of two stages, the first could do without what is missing
            first, second = launch(2, load_error, source, LAYOUTS[layout], folder, step, weights)
            assert first == second and message in first, first


@pytest.mark.distributed
def test_a_run_that_trains_more_than_the_saved_one_is_refused(hf: Path, tmp_path: Path) -> None:
    """Also on the pipeline stage that holds no tower; the weights alone can be taken."""
    launch(1, train_and_save, hf, ONE_RANK, tmp_path, 0)
    arguments = (load_error, hf, LAYOUTS["PP2"], tmp_path, None)
    first, second = launch(2, *arguments, False, {"freeze": False})
    assert first == second and "no optimizer state of visual." in first, first
    assert launch(2, *arguments, True, {"freeze": False}) == ["", ""]
    launch(1, train_and_save, hf, ONE_RANK, tmp_path / "all", 0, {"freeze": False})
    assert launch(1, load_error, hf, ONE_RANK, tmp_path / "all", None, False) == [""]


def two_steps(hf: Path, folder: Path) -> None:
    run = start(hf, TP2)
    for step in (1, 2):
        run.train(range(step, step + 1))
        run.save(folder, step)


@pytest.fixture(scope="module")
def saved(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    launch(2, two_steps, hf, folder)
    return folder


@pytest.fixture
def steps(saved: Path, tmp_path: Path) -> Path:
    """Checkpoints of two steps, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "steps"))


ADAPTERS = LoRA(rank=2, alpha=4.0, targets=("language.mlp",))


def adapters_error(hf: Path, ranks: Ranks, folder: Path) -> str:
    """A plain model on the weights of one with adapters."""
    run = start(hf, ranks)
    for chunk in run.chunks:
        add_adapters(chunk, ADAPTERS)
    updater = build_updater(run.chunks, SETTINGS, run.mesh, num_steps=10)
    save_checkpoint(SaveTarget(folder), 1, updater, extra={})
    load_checkpoint(folder, chunks=run.chunks)
    return load_error(hf, ranks, folder, None, True)


@pytest.mark.distributed
def test_adapters_are_not_left_behind(hf: Path, tmp_path: Path) -> None:
    first, second = launch(2, adapters_error, hf, LAYOUTS["PP2"], tmp_path)
    assert first == second and "holds adapters that this model has no place for" in first, first


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("file", "index"),
    [
        (".metadata", 10),  # in the length of a pickle's frame: it cannot be parsed
        *slow((".metadata", None), ("__1_0.distcp", None), ("random_00001.pt", None)),
        *slow(("common.pt", None)),
    ],
)
def test_a_flipped_bit_is_named_and_the_step_before_loads(
    hf: Path, steps: Path, file: str, index: int | None
) -> None:
    """No rank reads a file before another has found that it is damaged."""
    path = step_folder(steps, 2) / file
    data = bytearray(path.read_bytes())
    assert index is None or data[2] == 0x95, "a frame"
    data[index or len(data) // 2] ^= 128
    path.write_bytes(data)
    first, second = launch(2, load_error, hf, TP2, steps, None, False)
    assert first == second == f"{path} is damaged: its checksum differs from its manifest."
    assert launch(2, load_error, hf, TP2, steps, 1, False) == ["", ""]


@pytest.mark.distributed
def test_damaged_files_of_the_model_are_named_on_every_rank(hf: Path, tmp_path: Path) -> None:
    import_hf(hf, tmp_path / "imported")
    path = tmp_path / "imported" / "hf" / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:100])
    first, second = launch(2, load_error, hf, TP2, tmp_path / "imported", None, True)
    assert first == second and first.startswith(f"{path} has 100 bytes"), first


def resume_elsewhere(hf: Path, folder: Path) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megavlm").addHandler(handler)
    start(hf, ONE_RANK).load(folder)
    return messages


@pytest.mark.distributed
def test_random_states_of_another_layout_are_not_restored(hf: Path, saved: Path) -> None:
    (messages,) = launch(1, resume_elsewhere, hf, saved)
    assert len(messages) == 1 and "random states start from the seed" in messages[0]


def test_bytes_of_the_trainer_s_state_are_files(tmp_path: Path) -> None:
    extra = {"step": 3, "driver": {"seen": [1], "backlog": b"abc", "other": b""}}
    names = write_extra(tmp_path, extra)
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    driver = read_extra(tmp_path)["driver"]
    assert driver["seen"] == [1]
    assert driver["backlog"].read_bytes() == b"abc" and driver["other"].read_bytes() == b""
    assert read_extra(tmp_path / "none") == {}


def test_the_manifest_covers_every_other_file(saved: Path) -> None:
    folder = step_folder(saved, 2)
    manifest = json.loads((folder / "manifest.json").read_text())
    names = {path.name for path in folder.iterdir()}
    assert set(manifest["files"]) == names - {"manifest.json"}
    assert {"random_00000.pt", "random_00001.pt", "extra.json"} < names
    assert manifest["layout"] == {
        "tensor": 2,
        "pipeline": 1,
        "virtual": 1,
        "context": 1,
        "expert": 1,
        "expert_tensor": 1,
        "data": 1,
    }
