import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from megavlm import sglang_cpu
from megavlm.config.load import load
from megavlm.inference.server_args import GPU_ARGS, SHARED_GPU_ARGS, option_names
from megavlm.run.checks import model_folder, preflight
from tests.conftest import LFS_POINTER, TINY_CONFIG, png, row, write_model_folder, write_rows
from tests.support.releases import RELEASES
from tests.unit.run.checks import WriteRecipe, check, check_model, check_rows, refused


def test_a_complete_run_passes_and_nothing_is_written(write_recipe: WriteRecipe) -> None:
    recipe = write_recipe()
    check(recipe)
    check(recipe, phase="evaluate")
    assert not (recipe.parent / "run").exists()


def test_reward_and_data_are_needed_by_the_recipe_alone(write_recipe: WriteRecipe) -> None:
    recipe = write_recipe()
    assert "reward.name='exact' is unknown" in refused(recipe, "reward.name=exact", files=False)
    assert "data.train_files=[] names no data" in refused(recipe, "data.train_files=[]")
    assert "data.test_files=[]" in refused(recipe, "data.test_files=[]", phase="evaluate")
    check(recipe, "data.train_files=[]", phase="evaluate")
    check(recipe, "model.folder=none", "data.train_files=[none]", files=False)


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _cut(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-2])


def _missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "is not a JSON object"),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'),
            "model_type 'llama' is not supported: use one of glm4v, glm4v_moe, internvl, minicpm",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no *.safetensors"),
        (_pickled, "pickled weights (pytorch_model.bin); loading them can run any code"),
        (_cut, "model.safetensors is damaged"),
        (
            _missing_shard,
            "lacks the file more.safetensors that its model.safetensors.index.json names",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda folder: (folder / "preprocessor_config.json").unlink(), "has no image processor"),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{}"),
            "contains both a model and adapters; the adapters would be ignored: merge them",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(LFS_POINTER),
            "model.safetensors: a git-LFS pointer in place of the file: fetch it with `git lfs pu",
        ),
        (
            lambda folder: (folder / "config.json").write_text(
                json.dumps({**TINY_CONFIG, "quantization_config": {"quant_method": "fp8"}})
            ),
            "describes quantised weights (fp8), but they can be neither trained nor converted",
        ),
    ],
)
def test_a_model_folder_is_complete(
    write_recipe: WriteRecipe, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    write_recipe()
    damage(tmp_path / "model")
    assert message in refused(write_recipe(), by=check_model)


def test_servers_draft_with_a_head_that_the_folder_has(
    write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    drafting = ("rollout.server_args.speculative_algorithm=nextn",)
    recipe = write_recipe()
    assert refused(recipe, *drafting, by=check_model) == (
        "rollout.server_args.speculative_algorithm=NEXTN drafts with the head mtp.* of Qwen3.5, "
        f"but model.folder={tmp_path / 'model'} has no such tensors: take a folder with them, or "
        "remove it"
    )
    other_model = "rollout.server_args.speculative_draft_model_path=models/draft"
    check_model(recipe, *drafting, other_model)
    save_file({"mtp.fc.weight": np.zeros(2)}, tmp_path / "model" / "head.safetensors")
    check_model(recipe, *drafting)
    # The folder's family is Qwen2.5-VL, of which nobody released a head.
    assert "speculation.train=true trains an EAGLE-3 draft head with model.folder=" in refused(
        recipe, *drafting, "speculation.train=true", by=check_model
    )
    config = {**TINY_CONFIG, "model_type": "qwen2_vl"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert "speculation.train=true trains the draft head mtp.* of Qwen3.5 or an EAGLE-3" in refused(
        recipe, *drafting, "speculation.train=true", by=check_model
    )


def test_an_eagle3_head_that_is_trained_is_the_model_s(
    write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    """An SFT run is told where it is as an RL run is."""
    recipe = write_recipe()
    release: Any = RELEASES["Qwen3-VL-4B"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(release))
    training = ("speculation.train=true", "algorithm.name=sft")
    folder = tmp_path / "model"
    make = f"make one with megavlm-convert draft-head {folder} HEAD_DIR"
    assert refused(recipe, *training, by=check_model) == (
        f"speculation.train=true trains an EAGLE-3 draft head with model.folder={folder}, but "
        f"rollout.server_args.speculative_draft_model_path names none: {make}, or set "
        "speculation.train=false"
    )
    head = f"rollout.server_args.speculative_draft_model_path={tmp_path}"
    message = refused(recipe, *training, head, by=check_model)
    assert message.startswith(f"{tmp_path} has no EAGLE-3 draft head") and message.endswith(make)


def test_what_only_servers_read_of_a_config_json(tmp_path: Path) -> None:
    release: Any = RELEASES["Qwen3.5-9B"]
    text = {k: v for k, v in release["text_config"].items() if k != "full_attention_interval"}
    folder = write_model_folder(tmp_path / "model", **{**release, "text_config": text})
    recipes = Path(__file__).parents[3] / "recipes"
    served = load(recipes / "grpo/qwen3_5_9b_geo3k.yaml")
    with pytest.raises(ValueError) as caught:
        model_folder.check_model(folder, served)
    assert str(caught.value) == (
        f"model.folder={folder}: SGLang reads text_config.full_attention_interval from config.json"
        ', but it is missing: add "full_attention_interval": 4 to text_config'
    )
    model_folder.check_model(folder, load(recipes / "tasks/qwen2_5_vl_7b_sft.yaml"))


def test_model_folder_and_checkpoint_exist(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    message = refused(write_recipe(), "model.folder=none")
    assert "model.folder=none is not a folder" in message
    assert message.endswith("hf download Qwen/Qwen2.5-VL-3B-Instruct --local-dir none")
    override = f"model.checkpoint={tmp_path / 'checkpoint'}"
    assert "holds no complete checkpoint" in refused(write_recipe(), override)
    (tmp_path / "checkpoint" / "step_00000003").mkdir(parents=True)
    assert "holds no complete checkpoint" in refused(write_recipe(), override)
    (tmp_path / "checkpoint" / "step_00000003" / "manifest.json").write_text("{}")
    check(write_recipe(), override)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "qwen2_vl"}, "of the family qwen2_vl, but model.folder one of qwen2_5_vl"),
        ({"hidden_size": 64}, "holds a model with hidden_size=64, but the one in model.folder="),
        ({"max_position_embeddings": 64}, None),
    ],
)
def test_a_checkpoint_is_of_the_model(
    write_recipe: WriteRecipe, tmp_path: Path, values: dict[str, Any], message: str | None
) -> None:
    for name in ("step_00000003", "hf"):
        (tmp_path / "checkpoint" / name).mkdir(parents=True)
    (tmp_path / "checkpoint/step_00000003/manifest.json").write_text("{}")
    (tmp_path / "checkpoint/latest").write_text("step_00000003")
    (tmp_path / "checkpoint/hf/config.json").write_text(json.dumps(TINY_CONFIG | values))
    override = f"model.checkpoint={tmp_path / 'checkpoint'}"
    if message is None:
        check(write_recipe(), override)
    else:
        assert message in refused(write_recipe(), override)


def test_options_of_servers_are_sglangs(write_recipe: WriteRecipe) -> None:
    assert refused(write_recipe(), "rollout.server_args.mem_fraction=0.5").startswith(
        "rollout.server_args.mem_fraction is not an option of the installed SGLang: did you "
        "mean mem_fraction_static?"
    )
    check(write_recipe(), "rollout.server_args={--mem-fraction-static: 0.5, max_total_tokens: 9}")
    check(write_recipe(), "rollout.server_args={of_another_release: null, ep_size: null}")


def test_the_options_that_megavlm_sets_are_sglangs() -> None:
    used = {*sglang_cpu.ARGS, *GPU_ARGS, *SHARED_GPU_ARGS}
    used |= {"tp_size", "disable_radix_cache", "enable_lora", "cuda_graph_max_bs_decode"}
    assert used <= option_names()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        ([row(), row(problem="no placeholder"), row(problem="<image><image>")], ":2: 2 <image>"),
        ([row(), row(images=[{"bytes": png()[:60], "path": None}])], ":1: image 1: "),
        ([row(), row(images=[{"bytes": b"<svg/>", "path": None}])], ":1: image 1: not an image"),
        ([row(images=[LFS_POINTER])], ":0: image 1: a git-LFS pointer"),
        ([row(images=[3])], ":0: column 'images': an image has neither bytes nor a path: 3"),
        ([row(images=["http://10.0.0.5/x.png"])], "10.0.0.5 is not a public address"),
        ([row(task=b"x")], ":0: 'task' is b'x'; it must be text or a number"),
    ],
)
def test_rows(
    write_recipe: WriteRecipe, tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    schema_rows = rows or [row()]
    path = write_rows(tmp_path / "bad.parquet", schema_rows)
    if not rows:
        import pyarrow.parquet as pq

        pq.write_table(pq.read_table(path).slice(0, 0), path)
    text = refused(write_recipe(), f"data.train_files=[{path}]", by=check_rows)
    assert message in text and "bad.parquet" in text


def test_only_a_sample_is_decoded(
    write_recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = row(images=[{"bytes": b"no image", "path": None}])
    path = write_rows(tmp_path / "late.parquet", [row(), row(), bad])
    monkeypatch.setattr(preflight, "SAMPLE", 2)
    check_rows(write_recipe(), f"data.train_files=[{path}]")
    monkeypatch.setattr(preflight, "SAMPLE", 3)
    assert "late.parquet:2" in refused(write_recipe(), f"data.train_files=[{path}]", by=check_rows)


def test_files_and_columns(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    assert "none.parquet" in refused(write_recipe(), "data.train_files=[none.parquet]")
    text = refused(write_recipe(), "data.image_keys=[photos]", by=check_rows)
    assert "'photos'" in text and "data.image_keys" in text and "images" in text
    (tmp_path / "text.parquet").write_text("no parquet")
    override = f"data.train_files=[{tmp_path / 'text.parquet'}]"
    assert "text.parquet" in refused(write_recipe(), override, by=check_rows)


def test_run_dir(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = refused(write_recipe(), f"run.dir={tmp_path / 'file' / 'run'}")
    assert f"because {tmp_path / 'file'} is a file" in text
    assert "because /proc is not writable" in refused(write_recipe(), "run.dir=/proc/run")


@pytest.mark.parametrize(
    ("name", "value", "folder"),
    [
        ("HOME", "/proc/none", "/proc/none/.cache/sglang"),
        ("SGLANG_CACHE_DIR", "/proc/cache", "/proc/cache"),
    ],
)
def test_a_cache_of_servers_that_cannot_be_written_names_the_variable(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch, name: str, value: str, folder: str
) -> None:
    monkeypatch.delenv("SGLANG_CACHE_DIR", raising=False)
    monkeypatch.setenv(name, value)
    text = refused(write_recipe(), "rollout.mode=managed")
    assert text.startswith(f"{name}={value}: servers cannot write {folder}")
    assert "set SGLANG_CACHE_DIR" in text


DPO = ["algorithm.name=dpo", "data.rejected_key=rejected"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environment.name=geospot", "data.answer_key=null"], "name the columns that it has"),
        (["environment.name=caption", "data.answer_key=null"], "no 'references' and no answer"),
        (["environment.name=vqa", "data.answer_key=null"], "no answer that a response is compared"),
        (["data.answer_key=null"], "name its column in data.answer_key"),
        (
            ["algorithm.name=sft", "data.answer_key=null"],
            "sft needs an answer to learn",
        ),
        ([*DPO, "data.answer_key=null"], "dpo needs an answer to learn"),
        (
            [*DPO, "data.rejected_key=worse"],
            "dpo needs a response to reject, but this row has none",
        ),
        ([*DPO, "data.rejected_key=answer"], "the chosen and the rejected response are the same"),
        (["reward.parts={a: {name: geo3k}}", "data.answer_key=null"], "the row has no answer"),
    ],
)
def test_rows_have_what_rewards_and_supervision_need(
    write_recipe: WriteRecipe, overrides: list[str], message: str
) -> None:
    said = refused(write_recipe(), *overrides, by=check_rows)
    assert message in said and "rows.parquet:0: " in said


def test_extra_columns_can_be_sent_to_the_reward(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"problem": "?", "answer": "1", "task": "", "sizes": [1.5, NaN]}\n'
    )
    files = f"data.train_files=[{tmp_path / 'rows.jsonl'}]"
    overrides = [files, "data.image_keys=[]", "data.extra_keys=[sizes]"]
    check_rows(write_recipe(), *overrides)
    said = refused(write_recipe(), *overrides, "reward.name=http://127.0.0.1:1/", by=check_rows)
    assert "rows.jsonl:1: sizes: a value cannot be sent: Out of range float" in said
    assert "take it out of data.extra_keys" in said


def test_rows_need_no_more_than_is_used(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    place = row(answer="", lat=1.5, lon=2.5)
    spots = write_rows(tmp_path / "spots.parquet", [place])
    files = f"data.train_files=[{spots}]"
    test = f"data.test_files=[{spots}]"
    keys = "data.extra_keys=[lat, lon]"
    recipe = write_recipe()
    check(recipe, "environment.name=geospot", files, test, keys)
    assert "no answer" in refused(recipe, files, test, keys)
    quiet = ["evaluation.every=0", "evaluation.before=false", "evaluation.after=false"]
    check(recipe, test, *quiet)
    check(recipe, "algorithm.name=sft", test, *quiet)
    assert "no answer" in refused(recipe, test, *quiet, phase="evaluate")
    whole = write_rows(tmp_path / "chat.parquet", [row(answer="", problem=CHAT, images=[])])
    check(
        recipe,
        "algorithm.name=sft",
        "data.answer_key=null",
        f"data.train_files=[{whole}]",
        "data.image_keys=[]",
        "data.test_files=[]",
        *quiet,
    )
    some = write_rows(tmp_path / "some.parquet", [row(answer=""), row()])
    check(recipe, f"data.train_files=[{some}]", "data.bad_samples=skip")


CHAT = [{"role": "user", "content": "Colour?"}, {"role": "assistant", "content": "red"}]
