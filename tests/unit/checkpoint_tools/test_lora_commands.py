"""The commands for adapters as people type them: what they say, write and refuse."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megavlm.checkpointing.folder import LORA_SETTINGS as SETTINGS
from tests.unit.checkpoint_tools.command import refusal, run
from tests.unit.checkpoint_tools.conftest import Folder
from tests.unit.checkpoint_tools.lora_models import (
    configure,
    rewrite,
)

FAMILY = "qwen2_5_vl"
K_PROJ = "base_model.model.model.language_model.layers.0.self_attn.k_proj"


@pytest.fixture
def checkpoint(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "checkpoint", tmp_path / "in" / "checkpoint"))


def without_b(tensors: dict[str, Any]) -> None:
    tensors.pop(f"{K_PROJ}.lora_B.weight")


def embedding(tensors: dict[str, Any]) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.ones(4, 2)


def magnitude(tensors: dict[str, Any]) -> None:
    tensors[f"{K_PROJ}.lora_magnitude_vector"] = torch.ones(64)


def saved_module(tensors: dict[str, Any]) -> None:
    tensors["base_model.model.lm_head.weight"] = torch.ones(4, 2)


def head(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name.replace(K_PROJ, "base_model.model.lm_head"): x for name, x in tensors.items()}


def narrow(tensors: dict[str, Any]) -> None:
    tensors[f"{K_PROJ}.lora_A.weight"] = torch.ones(4, 100)


def other_rank(tensors: dict[str, Any]) -> None:
    tensors[f"{K_PROJ}.lora_A.weight"] = torch.ones(3, 128)


def twice(tensors: dict[str, Any]) -> None:
    tensors[f"{K_PROJ}.lora_A.other.weight"] = torch.ones(4, 128)


def nudge(tensors: dict[str, Any]) -> None:
    tensors[f"{K_PROJ}.lora_B.weight"][3, 1] += 1


Spoil = Callable[[Path], object]


def configured(**values: Any) -> Spoil:
    return lambda folder: configure(folder, **values)


def rewritten(change: Callable[[dict[str, Any]], object]) -> Spoil:
    return lambda folder: rewrite(folder, change)


CASES: dict[str, tuple[Spoil, str]] = {
    "DoRA": (configured(use_dora=True), r"adapter_config\.json has use_dora=True, but only plain"),
    "bias": (
        configured(bias="lora_only"),
        r"has bias='lora_only', .* merge it into its model with",
    ),
    "lora_bias": (configured(lora_bias=True), r"has lora_bias=True, but only"),
    "saved modules": (
        configured(modules_to_save=["lm_head"]),
        r"has modules_to_save=\['lm_head'\]",
    ),
    "tokens": (configured(trainable_token_indices=[1]), r"has trainable_token_indices=\[1\]"),
    "layers repeated": (
        configured(layer_replication=[[0, 2]]),
        r"has layer_replication=\[\[0, 2\]",
    ),
    "what is not known": (configured(use_tomorrow="yes"), r"has use_tomorrow='yes', but only"),
    "changed base": (
        configured(init_lora_weights="pissa_niter_4"),
        r"has init_lora_weights='pissa_niter_4', but that changes the base weights: convert it",
    ),
    "changed base, as PEFT reads it": (
        configured(init_lora_weights="OLoRA"),
        r"has init_lora_weights='OLoRA', but that changes the base weights: convert it",
    ),
    "another method": (configured(peft_type="LOHA"), r"adapters: peft_type 'LOHA' is not LORA"),
    "no rank": (configured(r=None), r"is not a configuration of LoRA adapters: int\(\) argument"),
    "rank 0": (configured(r=0), r"is not a configuration of LoRA adapters: a rank is below 1"),
    "infinite alpha": (
        configured(lora_alpha=float("inf")),
        r"is not a configuration of LoRA adapters: an alpha is not finite",
    ),
    "alpha 0": (
        configured(lora_alpha=0),
        r"is not a configuration of LoRA adapters: an alpha of 0 disables the adapters",
    ),
    "alpha 0 of some": (
        configured(alpha_pattern={"k_proj": 0.0}),
        r"is not a configuration of LoRA adapters: an alpha of 0 disables the adapters",
    ),
    "infinite rank": (
        configured(r=float("inf")),
        r"is not a configuration of LoRA adapters: cannot",
    ),
    "a pattern": (
        configured(rank_pattern={"(": 3}),
        r"is not a configuration of LoRA adapters: miss",
    ),
    "no configuration": (
        lambda folder: (folder / "adapter_config.json").unlink(),
        r"in/peft is not a PEFT folder: it has no adapter_config\.json",
    ),
    "pickle": (
        lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
        r"has no adapter_model\.safetensors; pickled adapters \(\.bin\) can run code when read",
    ),
    "cut off": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}"),
        r"adapter_model\.safetensors (is not a complete safetensors file|holds no adapters)",
    ),
    "half a pair": (
        rewritten(without_b),
        r"holds .*k_proj\.lora_A\.weight without the other of the pair",
    ),
    "embedding": (
        rewritten(embedding),
        r"embed_tokens\.lora_embedding_A, but it is not part of a pair",
    ),
    "magnitude": (
        rewritten(magnitude),
        r"k_proj\.lora_magnitude_vector, but it is not part of a pair",
    ),
    "module": (
        rewritten(saved_module),
        r"holds base_model\.model\.lm_head\.weight, but it is not part",
    ),
    "head": (
        rewritten(head),
        r"adapts lm_head, but training can only adapt the linear layers of a model",
    ),
    "another model": (rewritten(narrow), r"self_attn\.k_proj as 64 x 100; the model's is 64 x 128"),
    "another rank": (
        rewritten(other_rank),
        r"A 3 x 128 float32 and B 64 x 4 float32, but .* rank to 4",
    ),
    "two adapters": (rewritten(twice), r"holds two adapters for .*k_proj: .*lora_A\.(other\.)?w"),
}


@pytest.mark.parametrize("case", CASES)
def test_adapters_that_cannot_be_held_are_one_sentence(
    case: str,
    peft: Path,
    hf_folder: Folder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil, message = CASES[case]
    spoil(peft)
    refused = refusal(capsys, "lora-import", peft, tmp_path / "out", "--base", hf_folder(FAMILY))
    with pytest.raises(ValueError, match=message):
        raise ValueError(refused)
    assert refused == refusal(
        capsys, "lora-merge", hf_folder(FAMILY), tmp_path / "out", "--adapter", peft
    )
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_base_that_is_not_there(
    peft: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(peft, base_model_name_or_path="Qwen/Qwen2.5-VL-3B-Instruct")
    message = refusal(capsys, "lora-import", peft, tmp_path / "out")
    assert (
        "names the base model 'Qwen/Qwen2.5-VL-3B-Instruct', but there is no such folder" in message
    )
    for command in (
        ("lora-import", peft, tmp_path / "out", "--base", checkpoint),
        ("lora-merge", checkpoint, tmp_path / "out", "--adapter", peft),
    ):
        assert "already has adapters: merge them first" in refusal(capsys, *command)


@pytest.mark.parametrize(
    "text", ["{", "[]", "7", '{"rank": 4}', '{"rank": 4, "alpha": [], "base": 1}']
)
def test_settings_of_adapters_that_are_garbage(
    text: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint / "step_00000000" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"][SETTINGS]
    path.write_text(json.dumps(manifest))
    (path.parent / SETTINGS).write_text(text)
    message = refusal(capsys, "lora-export", checkpoint, tmp_path / "out")
    assert f"{path.parent / SETTINGS} cannot be read as adapter settings: " in message


@pytest.mark.parametrize("alpha", ["inf", "nan"])
def test_an_alpha_that_is_no_number(
    alpha: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("lora-export", "lora-merge", "export"):
        message = refusal(capsys, command, checkpoint, tmp_path / "out", "--alpha", alpha)
        assert message.endswith(f"adapters cannot have alpha {alpha}; it must be finite.")


def test_an_alpha_or_a_base_that_nothing_tells(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = checkpoint / "step_00000000"
    path = step / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"][SETTINGS]
    path.write_text(json.dumps(manifest))
    (step / SETTINGS).unlink()
    for command in ("lora-export", "lora-merge", "export"):
        message = refusal(capsys, command, checkpoint, tmp_path / "out")
        assert "does not record the alpha of its adapters" in message and "--alpha" in message
    message = refusal(capsys, "lora-export", checkpoint, tmp_path / "out", "--alpha", 6)
    assert "does not record the base model of its adapters" in message and "--base" in message
    assert not run("lora-export", checkpoint, tmp_path / "out", "--alpha", 6, "--base", "x/y")
    assert "(rank 4, alpha 6) on 12 modules" in capsys.readouterr().out


def test_folders_without_adapters(
    imported: Folder, hf_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("lora-export", "lora-merge"):
        message = refusal(capsys, command, imported(FAMILY), tmp_path / "out")
        assert "step_00000000 holds no adapters" in message
    message = refusal(capsys, "lora-merge", hf_folder(FAMILY), tmp_path / "out")
    assert message.endswith("holds no adapters: name a PEFT folder by --adapter.")
    assert not list(tmp_path.iterdir())


def test_what_commands_say(
    made: Path, hf_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    peft, checkpoint, hf = made / "peft", made / "checkpoint", hf_folder(FAMILY)
    assert not run("lora-import", peft, tmp_path / "in", "--base", hf)
    first, second = capsys.readouterr().out.splitlines()
    assert "tensors with those of the base model" in first
    assert second == (
        "A recipe with these adapters has lora.rank=4 lora.alpha=6 "
        "lora.targets=[language_model.decoder.layers.*.self_attention.linear_qkv]"
    )
    assert not run("lora-export", checkpoint, tmp_path / "out", "--json")
    record = json.loads(capsys.readouterr().out)
    # k alone was adapted; q and v share its linear here and come along as zeros
    assert (record["rank"], record["alpha"], record["num_modules"]) == (4, 6, 12)
    assert not run("lora-merge", checkpoint, tmp_path / "merged", "--quiet")
    assert capsys.readouterr().out == ""
    assert not run("export", checkpoint, tmp_path / "exported")
    assert "adapters of 12 projections are merged" in capsys.readouterr().out
    assert not run("verify", tmp_path / "merged", tmp_path / "exported")
    assert "is not empty" in refusal(capsys, "lora-export", checkpoint, tmp_path / "out")
    assert "holds no adapter_config.json: --force does not replace" in refusal(
        capsys, "lora-export", checkpoint, tmp_path / "merged", "--force"
    )
    assert not run("lora-export", checkpoint, tmp_path / "out", "--force")


def test_inspect_shows_adapters(
    made: Path, hf_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert not run("inspect", made / "peft", "--json")
    record = json.loads(capsys.readouterr().out)
    tensors = load_file(made / "peft" / "adapter_model.safetensors").values()
    assert (record["kind"], record["rank"], record["scale"]) == ("PEFT adapters", [4], [1.5])
    assert record["base"] == str(hf_folder(FAMILY)) and record["modules"] == 4
    assert record["parameters"] == sum(x.numel() for x in tensors)
    assert [part["name"] for part in record["components"]] == ["attention"]
    assert not run("inspect", made / "peft")
    assert "attention" in capsys.readouterr().out

    assert not run("inspect", made / "checkpoint", "--json")
    record = json.loads(capsys.readouterr().out)
    targets = ["language_model.decoder.layers.*.self_attention.linear_qkv"]
    known = {"rank": 4, "alpha": 6, "base": str(hf_folder(FAMILY)), "targets": targets}
    assert record["adapters"] == known
    assert record["components"][-1]["name"] == "adapters"
    assert not run("inspect", made / "checkpoint")
    assert "rank 4, alpha 6" in capsys.readouterr().out


def test_verify_compares_adapters(
    made: Path,
    peft: Path,
    checkpoint: Path,
    hf_folder: Folder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not run("lora-export", checkpoint, tmp_path / "out")
    capsys.readouterr()
    assert not run("verify", tmp_path / "out", checkpoint)
    assert capsys.readouterr().out == "All 24 tensors are equal, bit by bit.\n"
    assert run("verify", peft, tmp_path / "out", "--json") == 1  # it has q and v besides
    record = json.loads(capsys.readouterr().out)
    assert (record["equal"], record["different"]) == (8, 16)
    assert f"q_proj is only in {tmp_path / 'out'}" in record["first"][0]

    rewrite(peft, nudge)
    assert run("verify", made / "peft", peft) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 of 8 tensors differ:" and len(lines) == 2
    assert "B of model.language_model.layers.0.self_attn.k_proj differs in 1 of 256" in lines[1]
    assert "first at [3, 1]" in lines[1]

    configure(peft, lora_alpha=5)
    assert run("verify", made / "peft", peft) == 1
    assert "is scaled by 1.5 and by 1.25" in capsys.readouterr().out
    configure(peft, lora_alpha=-6)
    assert run("verify", made / "peft", peft) == 1
    assert "is scaled by 1.5 and by -1.5" in capsys.readouterr().out

    message = refusal(capsys, "verify", peft, hf_folder(FAMILY))
    assert message.endswith("is a model folder: it holds no adapters to compare.")


def test_verify_of_checkpoints_sees_their_adapters(
    made: Path,
    checkpoint: Path,
    imported: Folder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not run("verify", made / "checkpoint", checkpoint)
    capsys.readouterr()
    assert run("verify", checkpoint, imported(FAMILY), "--json") == 1
    record = json.loads(capsys.readouterr().out)
    assert record["different"] == 16 and all("lora_" in one for one in record["first"])

    path = checkpoint / "step_00000000" / SETTINGS
    text = path.read_text()
    path.write_text(text.replace("6.0", "7.0"))
    manifest = checkpoint / "step_00000000" / "manifest.json"
    values = json.loads(manifest.read_text())
    del values["files"][SETTINGS]
    manifest.write_text(json.dumps(values))
    assert run("verify", made / "checkpoint", checkpoint) == 1
    assert "adapters have alpha 6.0 and 7.0" in capsys.readouterr().out
