import os
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megavlm.config.algorithm import GRPO, SFT
from megavlm.config.dump import changes, code_of, to_yaml, write
from megavlm.config.load import RENAMED, load
from megavlm.config.optimizer import Optimizer
from megavlm.config.recipe import naming_files
from megavlm.config.run import RunConfig
from megavlm.config.schema import Config
from megavlm.environments.registry import load_environment
from megavlm.rollout.rewards import make_reward_manager

REQUIRED = "run: {dir: runs/x}\nmodel: {folder: m}\n"


def recipe(folder: Path, text: str = "", name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_defaults_are_the_dataclasses(tmp_path: Path) -> None:
    config = load(recipe(tmp_path, REQUIRED))
    assert config.algorithm == GRPO()
    assert config.optimizer == Optimizer(warmup_steps=5)  # it follows from algorithm.steps
    assert config.run == RunConfig(dir="runs/x")
    assert config.parallel.num_ranks == 1


def test_later_wins_over_earlier_base_over_base_and_override_over_all(tmp_path: Path) -> None:
    recipe(
        tmp_path, REQUIRED + "optimizer: {lr: 1, warmup_steps: 1, min_lr: 0.1}", "low/first.yaml"
    )
    recipe(
        tmp_path, "base: [first.yaml]\noptimizer: {warmup_steps: 2, min_lr: 0.2}", "low/second.yaml"
    )
    recipe(tmp_path, "optimizer: {min_lr: 0.3, weight_decay: 3}", "third.yaml")
    path = recipe(tmp_path, "base: [low/second.yaml, third.yaml]\noptimizer: {weight_decay: 4}")
    optimizer = load(path, ["optimizer.clip_grad=5"]).optimizer
    given = (optimizer.lr, optimizer.warmup_steps, optimizer.min_lr, optimizer.weight_decay)
    assert (*given, optimizer.clip_grad) == (1, 2, 0.3, 4, 5)


def test_a_new_name_starts_without_options_of_the_old_one(tmp_path: Path) -> None:
    base = {
        "environment": "{name: vqa_retry, max_turns: 2, options: {discount: 0.5}}",
        "reward": "{name: vqa, workers: 3, options: {tolerance: 0.1}}",
        "algorithm": "{name: ppo, steps: 7, value_clip: 0.3}",
    }
    recipe(tmp_path, REQUIRED + "".join(f"{k}: {v}\n" for k, v in base.items()), "base.yaml")

    def child(text: str, *overrides: str) -> Config:
        return load(recipe(tmp_path, "base: base.yaml\n" + text), overrides)

    same = child("reward: {name: vqa, options: {right: 2.0}}")
    assert same.reward.options == {"tolerance": 0.1, "right": 2.0}
    other = child("reward: {name: exact_match}")
    assert (other.reward.options, other.reward.workers) == ({}, 3)
    assert other.environment.options == {"discount": 0.5}
    assert child("", "reward.options.a=1", "reward.name=exact_match").reward.options == {"a": 1}
    parts = child("", "reward.name=null", "reward.parts.a.name=vqa")
    assert child("", "reward.name=null").reward.options == {} and parts.reward.parts

    plain = child("environment: {name: single_turn}")
    assert (plain.environment.options, plain.environment.max_turns) == ({}, 2)
    assert plain.reward.options == {"tolerance": 0.1}, "it has its own name"
    algorithm = child("", "algorithm.name=grpo").algorithm
    assert isinstance(algorithm, GRPO) and algorithm.steps == 7


def test_an_error_names_the_base_that_sets_a_key(tmp_path: Path) -> None:
    low = recipe(tmp_path, REQUIRED + "algorithm: {minibatches: 5}", "low.yaml")
    path = recipe(tmp_path, "base: low.yaml\nalgorithm: {prompts_per_step: 4}")
    note = rf" \(algorithm\.minibatches is set in {re.escape(os.path.relpath(low))}\)$"
    with pytest.raises(ValueError, match=note):
        load(path)
    with pytest.raises(ValueError, match=r"one of them$"):
        load(path, ["algorithm.minibatches=3"])


def test_an_error_names_the_base_that_sets_an_option(tmp_path: Path) -> None:
    service = "{name: reward_model, options: {url: 'http://127.0.0.1:1/v1', modl: m}}"
    given = f"reward: {{parts: {{helpful: {service}}}}}\n"
    given += "environment: {name: zoom, options: {box: 1}}\n"
    low = recipe(tmp_path, REQUIRED + given, "low.yaml")
    path = recipe(
        tmp_path,
        "base: low.yaml\nreward: {parts: {helpful: {options: {scale: 5}}}}\n"
        "environment: {options: {min_tokens: 4}}",
    )
    config = load(path)
    for key, check in (
        ("reward.parts.helpful.options.modl", lambda: make_reward_manager(config)),
        (
            "environment.options.box",
            lambda: load_environment(config.environment.name, config.environment.options),
        ),
    ):
        note = rf"{key}: .* \({key} is set in {re.escape(os.path.relpath(low))}\)$"
        with pytest.raises(ValueError, match=note), naming_files(path):
            check()
        with pytest.raises(ValueError, match=key) as error, naming_files(path, [f"{key}=2"]):
            check()
        assert "is set in" not in str(error.value)


def test_lists_are_replaced(tmp_path: Path) -> None:
    recipe(tmp_path, REQUIRED + "data: {train_files: [a, b]}", "base.yaml")
    path = recipe(tmp_path, "base: [base.yaml]\ndata: {train_files: [c]}")
    assert load(path).data.train_files == ("c",)
    assert load(path, ["data.train_files=[d, e]"]).data.train_files == ("d", "e")


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("optimizer.lr=1e-5", lambda c: c.optimizer.lr == 1e-5),
        ("data.category_key=null", lambda c: c.data.category_key is None),
        ("model.freeze_tower=false", lambda c: c.model.freeze_tower is False),
        ("run.dir=${model.folder}/run", lambda c: c.run.dir == "m/run"),
        ("run.seed=${algorithm.steps}", lambda c: c.run.seed == 40),
        ("data.system_prompt='a = b'", lambda c: c.data.system_prompt == "a = b"),
        (
            "rollout.server_args.mem-fraction-static=0.5",
            lambda c: c.rollout.server_args == {"mem-fraction-static": 0.5},
        ),
    ],
)
def test_overrides_are_yaml(tmp_path: Path, override: str, read: Callable[[Config], bool]) -> None:
    assert read(load(recipe(tmp_path, REQUIRED), [override]))


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        ([], "optimizer.warmup_steps", 5),
        (["algorithm.steps=3"], "optimizer.warmup_steps", 0),
        (["algorithm.steps=1000"], "optimizer.warmup_steps", 20),
        (["algorithm.name=ppo"], "optimizer.warmup_steps", 4),  # of the policy's 37 steps
        (["algorithm.name=sft"], "optimizer.warmup_steps", 20),
        (["optimizer.warmup_steps=7"], "optimizer.warmup_steps", 7),
        (["algorithm.name=ppo"], "algorithm.critic_warmup_steps", 3),
        (["algorithm.name=ppo", "algorithm.steps=3"], "algorithm.critic_warmup_steps", 0),
        (["algorithm.name=ppo", "algorithm.steps=90"], "algorithm.critic_warmup_steps", 5),
        ([], "data.pack_tokens", 4096),
        (["rollout.max_new_tokens=400"], "data.pack_tokens", 1024 + 8 * 400),
        (["data.max_prompt_tokens=4090"], "data.pack_tokens", 4090 + 8 * 4),
        (
            ["environment.max_turns=3", "rollout.max_new_tokens=200"],
            "data.pack_tokens",
            1024 + 8 * (3 * 200 + 2 * 256),
        ),
        (["algorithm.name=sft", "data.max_prompt_tokens=3000"], "data.pack_tokens", 6000),
        ([], "rollout.pause_mode", "abort"),
        (["rollout.max_staleness=1"], "rollout.pause_mode", "in_place"),
        ([], "rollout.sync", "tensor"),
        (["rollout.mode=external", "rollout.urls=[http://a:1]"], "rollout.sync", "distributed"),
    ],
)
def test_what_follows_from_other_keys_is_shown_and_what_is_given_is_kept(
    tmp_path: Path, overrides: list[str], key: str, value: object
) -> None:
    section, name = key.split(".")
    path = recipe(tmp_path, REQUIRED)
    assert load(path, overrides).to_dict()[section][name] == value
    assert load(path, [f"{key}=null", *overrides]).to_dict()[section][name] == value
    assert f"  {name}: {value}\n" in to_yaml(load(path, overrides))


def test_a_single_text_is_a_list_of_one(tmp_path: Path) -> None:
    recipe(tmp_path, REQUIRED + "data: {train_files: a.parquet, image_keys: photo}", "base.yaml")
    config = load(recipe(tmp_path, "base: base.yaml"), ["lora.targets=vision.mlp"])
    assert (config.data.train_files, config.data.image_keys) == (("a.parquet",), ("photo",))
    assert config.lora.targets == ("vision.mlp",)


def test_algorithm_is_chosen_by_name(tmp_path: Path) -> None:
    path = recipe(tmp_path, REQUIRED + "algorithm: {name: sft, batch_size: 3}")
    assert load(path).algorithm == SFT(batch_size=3)


MISTAKES = {
    "optimiser.lr=1": "unknown key optimiser: did you mean optimizer?",
    "optimizer.lrr=1": "unknown key optimizer.lrr: did you mean optimizer.lr?",
    "optimizer.clip_low=1": "unknown key optimizer.clip_low: did you mean algorithm.clip_low?",
    "lr=1": "unknown key lr: did you mean optimizer.lr?",
    "algorithm.batch_size=1": "unknown key algorithm.batch_size",  # sft's, and this is grpo
    "algorithm.name=kto": "algorithm.name='kto' is unknown: choose one of grpo, ppo, sft, dpo",
    "optimizer.lr=fast": 'optimizer.lr="fast" has the wrong type: it must be a number',
    f"optimizer.lr=1{'0' * 400}": "has the wrong type: it must be a number",
    f"run.seed=1{'0' * 5000}": "is not YAML: Exceeds the limit",
    "run.seed=1.5": "run.seed=1.5 has the wrong type: it must be a whole number",
    "run.seed=null": "run.seed=null has the wrong type: it must be a whole number",
    "parallel.data=two": "has the wrong type: it must be a whole number or null",
    "run.resume=maybe": 'run.resume="maybe" has the wrong type: it must be one of auto, never',
    "evaluation.before=0": "evaluation.before=0 has the wrong type: it must be true or false",
    "data.train_weights=a": 'data.train_weights="a" has the wrong type: it must be a list',
    "rollout.gpus=3": "rollout.gpus=3 has the wrong type: it must be a list",
    "data.train_files={a: 1}": "has the wrong type: it must be a list",
    "optimizer.precision_aware=true": "has moved: set optimizer.megatron.use_precision_aware_opti",
    "rollout.server_args=[a]": "has the wrong type: it must be keys with values",
    "run.dir.name=x": "run.dir={",
    "model=null": "model=null is not a section",
    "run.dir=${nothing}": "a ${...} of the recipe has no value",
    "run.seed=${run.seed}": "a ${...} of the recipe has no value",
    "run.seed": "'run.seed' is not an override: write section.key=value",
    "=1": "'=1' is not an override",
    "run.seed=[1": "the value of 'run.seed=[1' is not YAML",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_one_sentence(tmp_path: Path, override: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(recipe(tmp_path, REQUIRED), [override])
    assert MISTAKES[override] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_must_be_given_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model.folder is not set: .* add model.folder=VALUE$"):
        load(recipe(tmp_path, "run: {dir: x}"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("- a\n- b", "must be sections of keys"),
        ("5", "must be sections of keys"),
        (f"run: {{seed: 1{'0' * 5000}}}", "recipe.yaml is not YAML: Exceeds the limit"),
        ('base: "a\\0b"', r"a\\x00b' \(a base of .*\) is not the path of a recipe"),
        ("base: 3", "base=3 in .* must be a file, or a list of files"),
        ("base: [1]", "must be a file, or a list of files"),
        ("base: {a: b}", "must be a file, or a list of files"),
        ("base: [none.yaml]", r"none.yaml \(a base of .*recipe.yaml\) cannot be read"),
        ("base: [recipe.yaml]", "is a base of itself"),
    ],
)
def test_an_unusable_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(recipe(tmp_path, text))
    assert "recipe.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_recipe_is_a_recipe(tmp_path: Path) -> None:
    assert load(recipe(tmp_path), ["run.dir=a", "model.folder=b"]).run.dir == "a"


def test_the_dump_is_complete_and_loads_to_the_same(tmp_path: Path) -> None:
    overrides = [
        "data.train_files=[a]",
        "rollout.server_args={x: [1, null]}",
        "run.dir=${oc.env:HOME}",
    ]
    config = load(recipe(tmp_path, REQUIRED), overrides)
    write(config, tmp_path / "run")
    assert load(tmp_path / "run" / "config.yaml") == config
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]
    code = code_of((tmp_path / "run" / "config.yaml").read_text())
    assert code is not None and re.fullmatch(r"megavlm [\w.]+(, commit \w{40}(-dirty)?)?", code)
    assert code_of("run: {}") is None
    assert "$" not in to_yaml(config)
    dumped: dict[str, Any] = config.to_dict()
    for section in fields(Config):
        assert set(dumped[section.name]) == {
            item.name for item in fields(getattr(config, section.name))
        }


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path: Path) -> None:
    config = load(recipe(tmp_path, REQUIRED))
    write(config, tmp_path)
    before = (tmp_path / "config.yaml").read_bytes()
    (tmp_path / f".config.yaml.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/config.yaml'"):
        write(config, tmp_path)
    assert (tmp_path / "config.yaml").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "config.yaml"}


@pytest.mark.parametrize(
    "content", [b"5", b"- a", b"run: [", b"run: {dir: '${'}", b"\0", b"\xff", b""]
)
def test_a_damaged_record_of_the_last_start_is_named(tmp_path: Path, content: bytes) -> None:
    config = load(recipe(tmp_path, REQUIRED))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_bytes(content)
    (found,) = changes(config, tmp_path / "run")
    assert re.fullmatch(r"unknown, as .*config.yaml is damaged \(.*\)", found)


def test_changes_since_the_last_start_are_named(tmp_path: Path) -> None:
    path = recipe(tmp_path, REQUIRED)
    assert changes(load(path), tmp_path / "run") == [], "there was none"
    write(load(path), tmp_path / "run")
    assert changes(load(path), tmp_path / "run") == []
    overrides = ["optimizer.lr=2e-5", "optimizer.megatron={adam_eps: 0.1}", "algorithm.name=sft"]
    found = changes(load(path, overrides), tmp_path / "run")
    for change in (
        "optimizer.lr=2e-05 (was 1e-06)",
        "optimizer.megatron.adam_eps=0.1 (was absent)",
        'algorithm.name="sft" (was "grpo")',
        "algorithm.clip_low=absent (was 0.2)",
    ):
        assert change in found
    assert not [change for change in found if not change.startswith(("optimizer", "algorithm"))]


@pytest.mark.parametrize(("old", "new"), sorted(RENAMED.items()))
def test_a_renamed_key_keeps_its_old_name_for_one_release(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, old: str, new: str
) -> None:
    section, _, key = new.partition(".")
    value = {"streaming": "true", "on_timeout": "drop", "pause_mode": "retract"}.get(key, "7.0")
    path = recipe(tmp_path, REQUIRED)
    by_old_name = load(path, [f"{old}={value}"])
    assert caplog.messages == [f"{old} is now {new}: the old name is read until the next release"]
    assert by_old_name == load(path, [f"{new}={value}"])
    assert getattr(getattr(by_old_name, section), key) != getattr(getattr(load(path), section), key)
    with pytest.raises(ValueError, match=f"{old} is the old name of {new}, and both are set"):
        load(path, [f"{old}={value}", f"{new}={value}"])
