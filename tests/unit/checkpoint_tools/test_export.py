"""What an export holds, and who can read it."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from checkpoint_tools.compare_logits import compare_logits
from checkpoint_tools.compare_weights import compare_weights
from checkpoint_tools.export_hf import WriteOptions, export_hf
from checkpoint_tools.import_hf import import_hf
from checkpoint_tools.lora.adapters import AdapterPairs, Pair, Projection
from checkpoint_tools.model_card import model_card
from checkpoint_tools.weights import open_both, step_weights
from megavlm import sglang_cpu
from megavlm.checkpointing.folder import copy_hf_files
from megavlm.config.data import Data
from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.families import family_of
from megavlm.models.common.hf_source import HFFolder
from megavlm.parallel.torchvision_ops import define_torchvision_operators
from tests.parity.models import make_model
from tests.support.levels import slow
from tests.support.samples import auto_processor
from tests.unit.checkpoint_tools.conftest import Folder


@pytest.mark.parametrize(
    "family",
    [
        "qwen2_vl",
        "qwen3_vl_moe",
        "qwen3_5",
        *slow("qwen2_5_vl", "qwen3_vl", "qwen3_5_moe", "minicpmv4_6", "qwen3_omni_moe"),
    ],
)
def test_every_family_loads_in_transformers_with_the_same_logits(
    family: str, hf_folder: Folder, imported: Folder, tmp_path: Path
) -> None:
    define_torchvision_operators()
    from transformers import AutoModelForMultimodalLM, AutoProcessor, GenerationConfig

    done = export_hf(
        imported(family), tmp_path / "out", options=WriteOptions(max_shard_bytes=2 * 10**6)
    )
    assert done.num_files > 1
    _, report = AutoModelForMultimodalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    texts = [
        AutoProcessor.from_pretrained(folder).chat_template
        for folder in (hf_folder(family), tmp_path / "out")
    ]
    assert texts[0] == texts[1] and texts[0]
    ends = GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert ends == GenerationConfig.from_pretrained(hf_folder(family)).eos_token_id

    differences = compare_logits(hf_folder(family), tmp_path / "out")
    assert [one.prompt for one in differences] == ["text", "image"]
    assert [one.largest for one in differences] == [0, 0]


def test_the_index_names_every_tensor_and_shards_are_as_small_as_asked(
    hf_folder: Folder, imported: Folder, tmp_path: Path
) -> None:
    done = export_hf(
        imported("qwen3_vl_moe"), tmp_path / "out", options=WriteOptions(max_shard_bytes=10**6)
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in tmp_path.glob("out/*.safetensors")}
    assert (
        len(files) == done.num_files
        and max(sum(x.nbytes for x in file.values()) for file in files.values()) <= 10**6
    )
    assert index["weight_map"] == {key: name for name, file in files.items() for key in file}
    tensors = HFFolder(hf_folder("qwen3_vl_moe"))
    assert set(tensors) == set(index["weight_map"]) and len(tensors) == done.num_tensors
    total = sum(x.nbytes for x in tensors.values())
    assert index["metadata"]["total_size"] == total == done.num_bytes


def test_weights_and_their_configuration_get_the_dtype_that_is_asked_for(
    hf_folder: Folder, imported: Folder, tmp_path: Path
) -> None:
    done = export_hf(
        imported("qwen3_vl_moe"), tmp_path / "out", options=WriteOptions(dtype=torch.bfloat16)
    )
    before, after = HFFolder(hf_folder("qwen3_vl_moe")), HFFolder(tmp_path / "out")
    assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)
    assert done.num_bytes == sum(x.nbytes for x in before.values()) // 2
    text = (tmp_path / "out" / "config.json").read_text()
    assert json.loads(text)["dtype"] == "bfloat16" and "float32" not in text


READ = """
import json, sys
from sglang.srt.configs.qwen3_5 import Qwen3_5Config
config = Qwen3_5Config(**json.load(open(sys.argv[1])))
text, vision = config.text_config, config.vision_config
print(text.linear_layer_ids, text.partial_rotary_factor, vision.deepstack_visual_indexes)
"""


@pytest.mark.slow
def test_sglang_reads_what_transformers_leaves_out(hf_folder: Folder, tmp_path: Path) -> None:
    hf, checkpoint, out = (tmp_path / name for name in ("hf", "checkpoint", "out"))
    shutil.copytree(hf_folder("qwen3_5"), hf)
    config = json.loads((hf / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    text["rope_parameters"]["partial_rotary_factor"] = 0.5
    text["rope_parameters"]["mrope_section"] = [6, 5, 5]
    AutoConfig.for_model(**config).save_pretrained(hf)
    written = json.loads((hf / "config.json").read_text())
    for name in ("full_attention_interval", "partial_rotary_factor"):
        written["text_config"].pop(name, None)
    written["vision_config"].pop("deepstack_visual_indexes", None)
    (hf / "config.json").write_text(json.dumps(written))
    import_hf(hf, checkpoint)
    export_hf(checkpoint, out)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(out / "config.json")],
        env=os.environ | {"PYTHONPATH": str(sglang_cpu.FOLDER)},
        capture_output=True,
        text=True,
    )
    linear = [i for i, kind in enumerate(text["layer_types"]) if kind == "linear_attention"]
    assert linear and vision["deepstack_visual_indexes"] == []
    assert done.stdout.splitlines()[-1:] == [f"{linear} 0.5 []"], done.stderr


def test_tensors_of_several_dtypes_keep_theirs(hf_folder: Folder, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    hf.mkdir()
    for path in hf_folder("qwen2_5_vl").iterdir():
        (hf / path.name).write_bytes(path.read_bytes())
    tensors = {
        name: x if "norm" in name else x.bfloat16()
        for name, x in load_file(hf / "model.safetensors").items()
    }
    save_file(tensors, hf / "model.safetensors", {"format": "pt"})
    import_hf(hf, tmp_path / "checkpoint")
    export_hf(tmp_path / "checkpoint", tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == tensors.keys() and {x.dtype for x in after.values()} == {
        torch.float32,
        torch.bfloat16,
    }
    for name, x in tensors.items():
        assert after[name].dtype == x.dtype and torch.equal(after[name], x), name


def spoiled(hf: Path, folder: Path, name: str, *numbers: float) -> Path:
    """A copy of a model whose tensor begins with these numbers."""
    shutil.copytree(hf, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name].flatten()[: len(numbers)] = torch.tensor(numbers)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2_5_vl", "model.layers.1.mlp.up_proj.weight"),  # one of two in a key
        ("qwen3_vl_moe", "model.language_model.layers.2.mlp.experts.down_proj"),
    ],
)
def test_a_number_too_large_for_the_dtype_is_refused(
    family: str, name: str, hf_folder: Folder, tmp_path: Path
) -> None:
    hf = spoiled(hf_folder(family), tmp_path / "hf", name, 70000, -1e6)
    import_hf(hf, tmp_path / "checkpoint")
    with pytest.raises(
        ValueError,
        match=f"^{re.escape(name)} holds -1e[+]06, but float16 has a maximum of 65504: "
        ".*--dtype bfloat16",
    ):
        export_hf(
            tmp_path / "checkpoint", tmp_path / "out", options=WriteOptions(dtype=torch.float16)
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf"]
    export_hf(tmp_path / "checkpoint", tmp_path / "out", options=WriteOptions(dtype=torch.bfloat16))
    assert load_file(tmp_path / "out" / "model.safetensors")[name].flatten()[1] == -999424


def test_what_is_not_finite_anyway_is_exported_as_it_is(hf_folder: Folder, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    numbers = (float("inf"), float("nan"), 65504)
    hf = spoiled(hf_folder("qwen2_5_vl"), tmp_path / "hf", name, *numbers)
    import_hf(hf, tmp_path / "checkpoint")
    export_hf(tmp_path / "checkpoint", tmp_path / "out", options=WriteOptions(dtype=torch.float16))
    x = load_file(tmp_path / "out" / "model.safetensors")[name].flatten()[:3]
    assert torch.allclose(x.float(), torch.tensor(numbers), rtol=0, equal_nan=True)


def test_the_other_files_of_a_model(hf_folder: Folder, tmp_path: Path) -> None:
    """Links are followed; one to nothing, as a pruned cache has it, is not a file to leave out."""
    hf = Path(shutil.copytree(hf_folder("qwen2_vl"), tmp_path / "hf"))
    (hf / "tokenizer.json").rename(tmp_path / "blob")
    (hf / "tokenizer.json").symlink_to(tmp_path / "blob")
    (hf / "adapter_config.json").write_text("{}")
    (hf / "gone.bin").symlink_to(tmp_path / "nowhere")  # not one of those that are copied
    copy_hf_files(hf, tmp_path / "copy")
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert names == {path.name for path in hf.glob("*.*")} - {
        "adapter_config.json",
        "gone.bin",
        "model.safetensors",
    }
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (tmp_path / "blob").read_bytes()
    (hf / "adapter_config.json").unlink()
    (tmp_path / "blob").unlink()
    with pytest.raises(ValueError, match=r"hf/tokenizer\.json is a link to a missing file"):
        import_hf(hf, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def share(value: float) -> dict[str, object]:
    cell = {"share": value, "count": 8, "interval": [0.1, 0.9]}
    return {"overall": cell, "by_category": {"colour|hue": cell}}


def evaluation(step: int, accuracy: float) -> str:
    measures = {name: share(0.25) for name in ("valid", "blind", "shuffled")}
    record = {"step": step, "greedy": share(accuracy), "sampled": None, "seconds": 1.0}
    return json.dumps(record | measures) + "\n"


def test_the_card_of_a_run_tells_base_recipe_data_and_evaluation(
    hf_folder: Folder, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    import_hf(hf_folder("qwen2_vl"), run / "checkpoints")
    recipe = {
        "run": {"dir": "/secret/place"},
        "model": {"folder": "/home/me/Qwen2-VL-2B", "checkpoint": None},
        "data": {"train_files": ["/home/me/train.parquet"], "test_files": []},
        "algorithm": {"name": "grpo", "steps": 40, "clip_low": 0.2},
        "optimizer": {"lr": 1e-6},
    }
    text = json.dumps(recipe)  # JSON is YAML
    (run / "config.yaml").write_text(f"# By megavlm 0.0.9, commit abcdef\n{text}")
    (run / "evaluations.jsonl").write_text(evaluation(0, 0.5) + evaluation(40, 0.75))
    export_hf(run / "checkpoints", tmp_path / "start")
    (run / "evaluations.jsonl").write_text(evaluation(0, 0.5))
    step = run / "checkpoints" / "step_00000000"
    manifest = json.loads((step / "manifest.json").read_text()) | {"step": 40}
    (step / "manifest.json").write_text(json.dumps(manifest))
    export_hf(run / "checkpoints", tmp_path / "unmeasured")
    (run / "evaluations.jsonl").write_text(evaluation(0, 0.5) + evaluation(40, 0.75))
    export_hf(step, tmp_path / "end")

    start, unmeasured, end = (
        (tmp_path / name / "README.md").read_text() for name in ("start", "unmeasured", "end")
    )
    assert "- Trained by: megavlm 0.0.9, commit abcdef\n" in end
    for text in ("Qwen2-VL-2B", "train.parquet", "step 40 of 40", "clip_low: 0.2", "lr: 1.0e-06"):
        assert text in end
    assert "pipeline_tag: image-text-to-text" in end and "/home" not in end and "secret" not in end
    assert r"| colour\|hue | 8 | 50.0 % | 75.0 % | 25.0 % | 25.0 % |" in end
    assert "| all | 8 | - | 50.0 % | 25.0 % | 25.0 % |" in start
    assert "Evaluation" not in unmeasured


def test_the_card_of_an_import_tells_what_is_known(imported: Folder, tmp_path: Path) -> None:
    export_hf(imported("qwen2_vl"), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Step 0 of a checkpoint, exported by megavlm 0." in card
    assert "# qwen2_vl, 0.00" in card and "megavlm 0." in card and "Training" not in card


@pytest.mark.parametrize(
    "text",
    [
        "seed: 1",
        "algorithm: 3",
        "model: {folder: x}",
        "[1, 2]",
        "a: [1",
        "",
        "words",
        "7",
        "day: 2026-99-99",
        "\0",
        "${",
    ],
)
def test_a_config_of_something_else_is_none_of_a_run(
    text: str, imported: Folder, tmp_path: Path
) -> None:
    shutil.copytree(imported("qwen2_vl"), tmp_path / "checkpoint")
    (tmp_path / "config.yaml").write_text(text)
    weights = step_weights(tmp_path / "checkpoint")
    assert model_card(weights) == model_card(step_weights(imported("qwen2_vl")))


@pytest.mark.parametrize(
    ("base", "shown"),
    [("/home/me/Qwen2-VL-2B", "Qwen2-VL-2B"), ("Qwen/Qwen2-VL-2B", "Qwen/Qwen2-VL-2B")],
)
def test_the_card_of_imported_adapters_tells_their_base(
    base: str, shown: str, imported: Folder
) -> None:
    weights = step_weights(imported("qwen2_vl"))
    adapters = AdapterPairs(weights.path, 4, 8, torch.float32, {}, _nothing, base)
    assert f"- Base model: {shown}\n" in model_card(weights, adapters)


def _nothing(projection: Projection) -> Pair:
    raise AssertionError(projection)


def test_what_is_not_trained_is_copied(hf_folder: Folder, tmp_path: Path) -> None:
    """Bit for bit in its own dtype, through a checkpoint and again through a checkpoint of the
    export; A_log keeps fp32 in a bfloat16 folder; the model card says what was not trained.
    """
    hub = tmp_path / "hub"
    shutil.copytree(hf_folder("qwen3_5"), hub)
    tensors = load_file(hub / "model.safetensors")
    kept = {
        "mtp.fc.weight": torch.randn(8, 16).bfloat16(),
        "mtp.layers.0.mlp.experts.down_proj": torch.randn(2, 3, 4),
    }
    save_file(tensors | kept, hub / "model.safetensors", {"format": "pt"})
    source = hub
    for turn in (1, 2):
        checkpoint, out = tmp_path / f"checkpoint{turn}", tmp_path / f"out{turn}"
        import_hf(source, checkpoint)
        done = export_hf(checkpoint, out, options=WriteOptions(dtype=torch.bfloat16))
        written = HFFolder(out)
        assert set(written) == {*tensors, *kept} and done.num_tensors == len(written)
        for name, tensor in kept.items():
            assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor)
        for name, tensor in tensors.items():
            dtype = torch.float32 if name.endswith(".A_log") else torch.bfloat16
            assert torch.equal(written[name], tensor.to(dtype)), name
        assert "`mtp.*` (2 tensors" in (out / "README.md").read_text()
        source = out


def test_a_model_with_a_talker_comes_back(tmp_path: Path) -> None:
    """Bit for bit, from several files and to several, the trained model in bfloat16 and the others
    in float32; its experts also in one stack, as transformers has them in memory.
    """
    hub, checkpoint, out = (tmp_path / name for name in ("hub", "checkpoint", "out"))
    make_model(hub, "qwen3_omni_moe", tied=True)
    tensors = load_file(hub / "model.safetensors")
    kept = {name for name in tensors if name.startswith(("talker.", "code2wav."))}
    assert 0 < len(kept) < len(tensors)
    tensors |= {name: x.bfloat16() for name, x in tensors.items() if name not in kept}
    (hub / "model.safetensors").unlink()
    places = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        held = {name: tensors[name] for name, place in places.items() if place == file}
        save_file(held, hub / file, {"format": "pt"})
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    import_hf(hub, checkpoint)
    assert export_hf(checkpoint, out).num_tensors == len(tensors)
    written = HFFolder(out)
    assert set(written) == set(tensors)
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["thinker_config"]["tie_word_embeddings"]
    card = (out / "README.md").read_text()
    assert f"`code2wav.*` and `talker.*` ({len(kept)} tensors) were not trained" in card
    assert "peculative" not in card

    options = WriteOptions(experts="memory", max_shard_bytes=10**6)
    assert export_hf(checkpoint, tmp_path / "stacks", options=options).num_files > 2
    assert "thinker.model.layers.0.mlp.experts.down_proj" in HFFolder(tmp_path / "stacks")
    import_hf(tmp_path / "stacks", tmp_path / "again")
    both = open_both(tmp_path / "again", checkpoint)
    assert not compare_weights(*both).different


IMAGE_SIZE = (280, 392)  # width, height: grid 1 x 28 x 20 in the folder's limits


def trained(hf: Path, root: Path, **data: Any) -> Path:
    """Return the folder of a run that imported `hf`, and trained with these keys of data."""
    import_hf(hf, root / "run" / "checkpoints")
    recipe = {
        "model": {"folder": "base"},
        "data": {"train_files": ["train.parquet"], **data},
        "algorithm": {"name": "grpo", "steps": 40},
    }
    (root / "run" / "config.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return root / "run" / "checkpoints"


@pytest.mark.parametrize("form", ["both", "processor alone", "preprocessor alone", "released"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_an_exported_folder_shows_images_and_videos_as_they_were_trained(
    family: str, form: str, hf_folder: Folder, tmp_path: Path
) -> None:
    """In each form that a folder has: what transformers 5 saves, and what is on the hub."""
    hf = Path(shutil.copytree(hf_folder(family), tmp_path / "hf"))
    if form in ("preprocessor alone", "released"):
        (hf / "processor_config.json").unlink()
    if form == "processor alone":
        (hf / "preprocessor_config.json").unlink()
    if form == "released":
        file = hf / "preprocessor_config.json"
        values = json.loads(file.read_text())
        size = values.pop("size")
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        file.write_text(json.dumps(values | limits))
    base, limit = auto_processor(hf), 48 * 28 * 28
    checkpoint = trained(hf, tmp_path, min_pixels=None, max_pixels=limit)
    export_hf(checkpoint, tmp_path / "out")

    image = Image.new("RGB", IMAGE_SIZE)
    ours = Processor(hf, Data(max_prompt_tokens=2**20, max_pixels=limit), family_of(hf))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    (shown,) = ours.prompt(Row(0, "<image>", "", (buffer.getvalue(),), "", "rows:0")).images
    served = auto_processor(tmp_path / "out")
    grid = served.image_processor(images=[image], return_tensors="pt")["image_grid_thw"]
    assert grid.tolist() == [list(shown.grid)]
    assert grid.tolist() != base.image_processor(images=[image])["image_grid_thw"].tolist()
    assert served.video_processor.size == base.video_processor.size
    assert served.image_processor.size["shortest_edge"] == base.image_processor.size.shortest_edge


def test_without_limits_in_the_recipe_the_preprocessor_is_the_base_s(
    hf_folder: Folder, tmp_path: Path
) -> None:
    hf = hf_folder("qwen2_vl")
    export_hf(trained(hf, tmp_path, max_pixels=None), tmp_path / "out")
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (hf / name).read_bytes()
    assert not (tmp_path / "out" / "video_preprocessor_config.json").exists()
    assert "## Use" not in (tmp_path / "out" / "README.md").read_text()


def test_the_card_has_the_system_prompt_as_a_message(hf_folder: Folder, tmp_path: Path) -> None:
    prompt = 'Think "step by step".\nGib die Größe an.'
    checkpoint = trained(hf_folder("qwen2_vl"), tmp_path, system_prompt=prompt, max_pixels=100352)
    export_hf(checkpoint, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    message = card.split("```json\n")[1].split("\n```")[0]
    assert json.loads(message) == {"role": "system", "content": prompt}
    assert "at most 100,352 pixels" in card
