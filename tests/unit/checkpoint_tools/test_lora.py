"""Adapters of PEFT into checkpoints, back, and merged: what PEFT computes is what comes out."""

import filecmp
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_tools.export_hf import WriteOptions, export_hf
from checkpoint_tools.lora.compare import compare_adapters
from checkpoint_tools.lora.export_adapters import export_adapters
from checkpoint_tools.lora.import_adapters import import_adapters
from checkpoint_tools.lora.merge_adapters import merge_adapters, open_peft_adapters
from checkpoint_tools.lora.step_adapters import step_adapters
from checkpoint_tools.weights import hub_weights, step_weights
from tests.support.levels import slow
from tests.unit.checkpoint_tools.conftest import Folder
from tests.unit.checkpoint_tools.lora_models import (
    PROJECTIONS,
    STACKS,
    Tensors,
    configure,
    load,
    load_adapters,
    logits,
    make_adapters,
    relative,
    rewrite,
)

MOE = "qwen3_vl_moe"
FILES = ("adapter_config.json", "adapter_model.safetensors")
MIXED = {
    "r": 8,
    "lora_alpha": 16,
    "rank_pattern": {"q_proj": 4, "v_proj": 2},
    "alpha_pattern": {"v_proj": 3},
}


@pytest.mark.parametrize(
    "family",
    [
        "qwen2_5_vl",
        "qwen3_5_moe",
        *slow("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "glm4v_moe"),
        *slow("internvl", "internvl_moe", "minicpmv4_6", "qwen3_omni_moe"),
    ],
)
def test_every_family_there_and_back(family: str, hf_folder: Folder, tmp_path: Path) -> None:
    """Different ranks and scales for q, k and v; experts as the stacks of transformers 5."""
    hf = hf_folder(family)
    theirs = logits(make_adapters(hf, tmp_path / "peft", **MIXED))
    assert relative(logits(load(hf)), theirs) > 0.1

    done = import_adapters(tmp_path / "peft", tmp_path / "checkpoint", base=hf)
    # PEFT gives stacks of gate and up twice the rank if the hub has the two apart.
    assert (done.rank, done.alpha) == (
        (16, 32) if family in ("glm4v_moe", "qwen3_omni_moe") else (8, 16)
    )
    merge_adapters(tmp_path / "checkpoint", tmp_path / "merged")
    assert relative(logits(load(tmp_path / "merged")), theirs) < 1e-5
    merge_adapters(hf, tmp_path / "directly", adapter=tmp_path / "peft")
    files = [path.name for path in sorted((tmp_path / "merged").glob("*.safetensors"))]
    assert files == [path.name for path in sorted((tmp_path / "directly").glob("*.safetensors"))]
    assert not filecmp.cmpfiles(tmp_path / "merged", tmp_path / "directly", files, False)[1]

    export_adapters(tmp_path / "checkpoint", tmp_path / "exported")
    assert relative(logits(load_adapters(hf, tmp_path / "exported")), theirs) < 1e-5
    import_adapters(tmp_path / "exported", tmp_path / "again", base=hf)
    export_adapters(tmp_path / "again", tmp_path / "exported again")
    for name in FILES:
        pair = (tmp_path / x / name for x in ("exported", "exported again"))
        assert filecmp.cmp(*pair, shallow=False), name


def test_one_rank_goes_through_without_a_bit_changed(hf_folder: Folder, tmp_path: Path) -> None:
    hf = hf_folder("qwen2_5_vl")
    make_adapters(hf, tmp_path / "peft")
    done = import_adapters(tmp_path / "peft", tmp_path / "checkpoint", base=hf)
    assert (done.rank, done.alpha) == (4, 6)
    # PEFT has found projections of these names in the tower too.
    assert done.targets == ["vision.mlp", "language.attention", "language.mlp"]
    export_adapters(tmp_path / "checkpoint", tmp_path / "exported")
    before, after = (load_file(tmp_path / x / FILES[1]) for x in ("peft", "exported"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


SETTINGS: dict[str, dict[str, Any]] = {
    "rank-stabilised": {"use_rslora": True, "rank_pattern": {"k_proj": 3}},
    "rank-stabilised, of two scales": {"use_rslora": True, "alpha_pattern": {"v_proj": 3}},
    "patterns of which the first holds": {
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 3, "q_proj": 2},
        "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 5, "q_proj": 3},
    },
    "a pattern from the first letter on": {
        "rank_pattern": {r"^model\.language_model\.layers\.1\.self_attn\.q_proj": 2},
        "alpha_pattern": {r"^layers\.1\.self_attn\.k_proj": 5},  # which matches nothing
    },
    "a scale that must be rounded": {"alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 5}},
    "q and v alone": {"target_modules": ["q_proj", "v_proj"]},
    "a regex": {"target_modules": r".*language_model\.layers\.[02]\.self_attn\.(k|o)_proj"},
    "layers": {"target_modules": ["up_proj", "q_proj"], "layers_to_transform": [1, 3]},
    "tower": {"target_modules": ["attn.qkv", "attn.proj", "merger.mlp.0", "merger.mlp.2"]},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_of_peft(case: str, hf_folder: Folder, tmp_path: Path) -> None:
    hf = hf_folder("qwen2_5_vl")
    model = make_adapters(hf, tmp_path / "peft", **SETTINGS[case])
    import_adapters(tmp_path / "peft", tmp_path / "checkpoint", base=hf)
    export_adapters(tmp_path / "checkpoint", tmp_path / "exported")
    ours = load_adapters(hf, tmp_path / "exported")
    deltas = [
        {
            name: module.get_delta_weight("default")
            for name, module in peft.named_modules()
            if hasattr(module, "get_delta_weight")
        }
        for peft in (model, ours)
    ]
    for name, expected in deltas[0].items():
        assert relative(deltas[1].pop(name), expected) < 1e-6, name
    assert not any(delta.any() for delta in deltas[1].values())  # the others in a fused linear
    assert len(deltas[1]) <= len(deltas[0])


@pytest.mark.parametrize(
    ("alpha", "pattern"), [(6, {"q_proj": -6}), (-6, {"q_proj": 6, "v_proj": -12})]
)
def test_a_scale_may_be_negative(
    alpha: float, pattern: dict[str, float], hf_folder: Folder, tmp_path: Path
) -> None:
    """A recipe's is positive, so that of the checkpoint is too, and B takes the sign."""
    hf = hf_folder("qwen2_5_vl")
    model = make_adapters(hf, tmp_path / "peft", lora_alpha=alpha, alpha_pattern=pattern)
    theirs = logits(model)
    assert import_adapters(tmp_path / "peft", tmp_path / "checkpoint", base=hf).alpha == 6
    merge_adapters(hf, tmp_path / "merged", adapter=tmp_path / "peft")
    assert relative(logits(load(tmp_path / "merged")), theirs) < 1e-5
    export_adapters(tmp_path / "checkpoint", tmp_path / "exported")
    assert relative(logits(load_adapters(hf, tmp_path / "exported")), theirs) < 1e-5


def test_what_a_recipe_must_say(hf_folder: Folder, tmp_path: Path) -> None:
    def targets(**settings: Any) -> list[str]:
        make_adapters(hf_folder(MOE), tmp_path / "peft", **settings)
        shutil.rmtree(tmp_path / "checkpoint", ignore_errors=True)
        done = import_adapters(tmp_path / "peft", tmp_path / "checkpoint", base=hf_folder(MOE))
        return done.targets

    layers = "language_model.decoder.layers"
    assert targets() == ["language.attention", "language.experts", "language.mlp"]
    assert targets(target_modules=["v_proj"]) == [f"{layers}.*.self_attention.linear_qkv"]
    assert targets(target_modules=[], target_parameters=["layers.2.mlp.experts.down_proj"]) == [
        f"{layers}.2.mlp.experts.linear_fc2"
    ]


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_one_stack_of_experts(name: str, hf_folder: Folder, tmp_path: Path) -> None:
    hf = hf_folder(MOE)
    settings = {"target_modules": [], "target_parameters": [f"experts.{name}"]}
    theirs = logits(make_adapters(hf, tmp_path / "peft", **settings))
    import_adapters(tmp_path / "peft", tmp_path / "checkpoint", base=hf)
    export_adapters(tmp_path / "checkpoint", tmp_path / "exported")
    assert relative(logits(load_adapters(hf, tmp_path / "exported")), theirs) < 1e-5


def unstack(tensors: Tensors) -> Tensors:
    """A module for each expert and projection, as before transformers stacked them."""
    found: Tensors = {}
    for name, x in tensors.items():
        match name.split(".experts."):
            case [layer, rest] if rest.startswith("base_layer.lora_A"):
                for expert, rows in enumerate(x.chunk(8)):
                    for part, a in zip(("gate_proj", "up_proj"), rows.chunk(2), strict=True):
                        found[f"{layer}.experts.{expert}.{part}.lora_A.weight"] = a.clone()
            case [layer, rest] if rest.startswith("base_layer.lora_B"):
                for expert, b in enumerate(x.view(len(x), -1, 8).unbind(2)):
                    gate, up = b.chunk(2)
                    place = f"{layer}.experts.{expert}"
                    found[f"{place}.gate_proj.lora_B.weight"] = gate.chunk(2, 1)[0].clone()
                    found[f"{place}.up_proj.lora_B.weight"] = up.chunk(2, 1)[1].clone()
            case [layer, rest] if rest.startswith("lora_A"):
                for expert, a in enumerate(x.chunk(8)):
                    found[f"{layer}.experts.{expert}.down_proj.lora_A.weight"] = a.clone()
            case [layer, rest]:
                for expert, b in enumerate(x.view(len(x), -1, 8).unbind(2)):
                    found[f"{layer}.experts.{expert}.down_proj.lora_B.weight"] = b.clone()
            case _:
                found[name] = x
    return found


@pytest.mark.parametrize("family", [MOE, *slow("qwen3_5_moe")])
def test_experts_go_out_as_modules_and_come_back(
    family: str, hf_folder: Folder, tmp_path: Path
) -> None:
    """The same adapters as in stacks, bit by bit; a module has the rank of the others."""
    hf = hf_folder(family)
    make_adapters(hf, tmp_path / "peft", target_parameters=STACKS)
    import_adapters(tmp_path / "peft", tmp_path / "first", base=hf)
    export_adapters(tmp_path / "first", tmp_path / "stacked")
    export_adapters(tmp_path / "first", tmp_path / "modules", separate=True)
    config = json.loads((tmp_path / "modules" / "adapter_config.json").read_text())
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    assert "target_parameters" not in config
    tensors = load_file(tmp_path / "modules" / "adapter_model.safetensors")
    expected = unstack(load_file(tmp_path / "stacked" / "adapter_model.safetensors"))
    assert tensors.keys() == expected.keys()
    assert all(tensors[name].equal(x) for name, x in expected.items())

    import_adapters(tmp_path / "modules", tmp_path / "second", base=hf)
    export_adapters(tmp_path / "second", tmp_path / "again")
    for name in FILES:
        assert filecmp.cmp(tmp_path / "stacked" / name, tmp_path / "again" / name, False)
    for folder in ("stacked", "modules"):
        result = compare_adapters(tmp_path / folder, tmp_path / "second")
        assert result.equal and not result.different


def rename(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): x for name, x in tensors.items()}


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen2_5_vl", rename("model.model.language_model.", "model.model.")),
        ("qwen2_5_vl", rename("base_model.model.", "")),
        ("qwen2_5_vl", rename(".weight", ".default.weight")),
        ("qwen3_vl", rename("model.model.language_model.", "model.language_model.model.")),
        (MOE, unstack),
    ],
    ids=["before transformers 4.52", "no prefix", "adapter's name", "model in model", "experts"],
)
def test_every_naming_is_one_checkpoint(
    family: str, change: Callable[[Tensors], Tensors], hf_folder: Folder, tmp_path: Path
) -> None:
    hf = hf_folder(family)
    make_adapters(hf, tmp_path / "peft")
    import_adapters(tmp_path / "peft", tmp_path / "first", base=hf)
    export_adapters(tmp_path / "first", tmp_path / "exported")
    rewrite(tmp_path / "exported", change)
    if change is not unstack:
        rewrite(tmp_path / "exported", rename("model.visual.", "visual."))
    import_adapters(tmp_path / "exported", tmp_path / "second", base=hf)
    a, b = (step_adapters(step_weights(tmp_path / x)) for x in ("first", "second"))
    assert (a.rank, a.alpha, list(a.linears)) == (b.rank, b.alpha, list(b.linears))
    for projection in a.projections():
        for x, y in zip(a.read(projection), b.read(projection), strict=True):
            assert torch.equal(x, y), projection


def test_dtypes_of_adapters(hf_folder: Folder, tmp_path: Path) -> None:
    """bf16 stays where ratios of scales are powers of two, and becomes fp32 where they are not."""
    hf = hf_folder("qwen2_5_vl")
    make_adapters(hf, tmp_path / "peft", **MIXED | {"alpha_pattern": {"v_proj": 8}})
    rewrite(tmp_path / "peft", lambda tensors: {name: x.bfloat16() for name, x in tensors.items()})
    weights = hub_weights(hf)
    exact = open_peft_adapters(tmp_path / "peft", weights)
    assert exact.dtype == torch.bfloat16 and exact.scale == 2
    q, k, v = exact.linears["language_model.decoder.layers.0.self_attention.linear_qkv"]
    place = "base_model.model.model.language_model.layers.0.self_attn"
    tensors = load_file(tmp_path / "peft" / FILES[1])
    for one, ratio in ((q, 2), (k, 1), (v, 2)):
        a, b = exact.read(one)
        source = tensors[f"{place}.{one.part}.lora_B.weight"]
        rank = source.shape[1]
        assert torch.equal(b[:, :rank].float(), source.float() * ratio)
        assert torch.equal(a[:rank], tensors[f"{place}.{one.part}.lora_A.weight"])
        assert not a[rank:].any() and not b[:, rank:].any()
        assert a.dtype == b.dtype == torch.bfloat16
    configure(tmp_path / "peft", alpha_pattern={"v_proj": 3})
    assert open_peft_adapters(tmp_path / "peft", weights).dtype == torch.float32


def test_fp16_has_no_room_for_other_scales(hf_folder: Folder, tmp_path: Path) -> None:
    """Half of its smallest number is 0 in fp16, and twice its largest is infinite."""
    hf = hf_folder("qwen2_5_vl")
    make_adapters(hf, tmp_path / "peft", target_modules=["self_attn.q_proj", "self_attn.k_proj"])
    rewrite(tmp_path / "peft", lambda tensors: {name: x.half() for name, x in tensors.items()})
    name = "base_model.model.model.language_model.layers.0.self_attn.k_proj.lora_B.weight"
    edges = torch.tensor([3 * 2.0**-24, 2.0**-24, 65504, 1])

    def fill(tensors: Tensors) -> None:
        tensors[name][:] = edges

    rewrite(tmp_path / "peft", fill)
    weights = hub_weights(hf)
    assert open_peft_adapters(tmp_path / "peft", weights).dtype == torch.float16
    for alpha, ratio in ((3, 0.5), (12, 2), (-6, -1)):
        configure(tmp_path / "peft", alpha_pattern={r"layers\.0\.self_attn\.k_proj": alpha})
        adapters = open_peft_adapters(tmp_path / "peft", weights)
        assert adapters.dtype == (torch.float16 if ratio == -1 else torch.float32)
        linear = adapters.linears["language_model.decoder.layers.0.self_attention.linear_qkv"]
        (k,) = (one for one in linear if one.part == "k_proj")
        _, b = adapters.read(k)
        assert adapters.alpha == 6 and torch.equal(b[0].float(), edges * ratio)


def test_a_merge_adds_in_fp32_and_rounds_once(hf_folder: Folder, tmp_path: Path) -> None:
    """Into a model in bf16, whose experts are stacked."""
    make_adapters(hf_folder(MOE), tmp_path / "peft")
    hf = Path(shutil.copytree(hf_folder(MOE), tmp_path / "hf"))
    base = {name: x.bfloat16() for name, x in load_file(hf / "model.safetensors").items()}
    save_file(base, hf / "model.safetensors", {"format": "pt"})
    merge_adapters(hf, tmp_path / "bf16", adapter=tmp_path / "peft")
    merge_adapters(
        hf, tmp_path / "fp32", adapter=tmp_path / "peft", options=WriteOptions(dtype=torch.float32)
    )
    import_adapters(tmp_path / "peft", tmp_path / "checkpoint", base=hf)
    export_hf(tmp_path / "checkpoint", tmp_path / "export")
    rounded, exact = (load_file(tmp_path / x / "model.safetensors") for x in ("bf16", "fp32"))
    assert filecmp.cmp(*(tmp_path / x / "model.safetensors" for x in ("bf16", "export")))
    for name, x in exact.items():
        assert x.dtype == torch.float32 and torch.equal(x.bfloat16(), rounded[name]), name
        assert torch.equal(x, base[name].float()) == ("_proj" not in name), name
    tensors = load_file(tmp_path / "peft" / FILES[1])
    name = "model.language_model.layers.2.self_attn.o_proj"
    a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    expected = base[f"{name}.weight"].float() + 1.5 * b @ a
    torch.testing.assert_close(exact[f"{name}.weight"], expected, rtol=1e-6, atol=1e-7)


def test_the_files_that_are_written(hf_folder: Folder, tmp_path: Path) -> None:
    hf = hf_folder(MOE)
    make_adapters(hf, tmp_path / "peft")
    import_adapters(tmp_path / "peft", tmp_path / "checkpoint", base=hf)
    export_adapters(
        tmp_path / "checkpoint", tmp_path / "out", base="Qwen/Qwen3-VL-30B-A3B-Instruct"
    )
    config = json.loads((tmp_path / "out" / FILES[0]).read_text())
    assert config["base_model_name_or_path"] == "Qwen/Qwen3-VL-30B-A3B-Instruct"
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 6, False)
    assert config["rank_pattern"] == {r"mlp\.experts\.gate_up_proj": 8}
    written = {name.rpartition(".")[2] for name in config["target_modules"]}
    assert written == set(PROJECTIONS) - {"gate_up_proj"}, "the model's, which has no fused one"
    names = [*config["target_modules"], *config["target_parameters"]]
    assert all(name.startswith("model.language_model.layers.") for name in names)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES)
    merge_adapters(hf, tmp_path / "merged", adapter=tmp_path / "out")
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "adapters of rank 4 merged" in card and str(tmp_path) not in card
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
