"""A layout that the ranks or the model do not allow is one sentence, from config.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from megavlm.run.checks.layout import language_sizes
from tests.conftest import write_model_folder
from tests.support.families import FAMILIES, part, small_config
from tests.support.releases import RELEASES, released_config
from tests.unit.run.checks import WriteRecipe, check, check_model, refused

EXPERTS = {
    "model_type": "qwen3_vl_moe",
    "num_experts": 8,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
LINEAR = {
    "model_type": "qwen3_5",
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
SHARED_EXPERTS = {
    **LINEAR,
    "model_type": "qwen3_5_moe",
    "num_experts": 8,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
ADAPTERS = ["lora.rank=2", "rollout.lora=adapter"]


@pytest.mark.parametrize("name", ["a.b:C", "vqa_retry", "geo3k_calculator"])
def test_responses_that_stop_between_steps_are_of_one_turn(
    write_recipe: WriteRecipe, name: str
) -> None:
    stale = ["rollout.max_staleness=1", "rollout.oversample=1.5", "algorithm.importance=token"]
    overrides = [*stale, "data.train_files=[t]"]
    check(write_recipe(), *overrides, f"environment.name={name}", files=False)  # plays them on
    check(write_recipe(), *overrides, "rollout.colocate=true", files=False)
    assert f"environment.name={name} may have several turns: set environment.name to one of" in (
        refused(
            write_recipe(),
            *overrides,
            "rollout.colocate=true",
            f"environment.name={name}",
            files=False,
        )
    )


def test_a_policy_loss_and_an_estimator_are_found_before_anything_starts(
    write_recipe: WriteRecipe,
) -> None:
    data = "data.train_files=[t]"
    own = "tests.unit.algorithms.own"
    names = [f"algorithm.policy_loss={own}:plain", f"algorithm.advantage_estimator={own}:grpo"]
    check(write_recipe(), data, *names, files=False)
    message = refused(write_recipe(), data, "algorithm.advantage_estimator=rlo", files=False)
    assert "algorithm.advantage_estimator='rlo' is unknown: did you mean rloo?" in message
    message = refused(write_recipe(), data, f"algorithm.policy_loss={own}:nothing", files=False)
    assert f"algorithm.policy_loss={own}:nothing cannot be imported" in message


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (["parallel.tensor=2"], 3, "parallel.pipeline=1 does not divide the world size 3"),
        (
            ["parallel.tensor=2", "parallel.context=2", "parallel.pipeline=2"],
            12,
            "parallel.tensor=2 x parallel.context=2 x parallel.pipeline=2 does not divide the "
            "world size 12: start a multiple of 8 ranks",
        ),
        (["parallel.tensor=2", "parallel.data=2"], 8, "is 4 ranks, but the world size is 8"),
        (["run.profile_ranks=[0,4]"], 4, "names rank 4, but the run has ranks 0 to 3"),
        (
            ["parallel.expert=4"],
            6,
            "parallel.expert=4 x parallel.expert_tensor=1 x parallel.pipeline=1 does not divide "
            "the world size 6: start a multiple of 4 ranks",
        ),
        (
            ["parallel.pipeline=2", "parallel.expert_tensor=2"],
            2,
            "parallel.pipeline=2 does not divide the world size 2: start a multiple of 4 ranks",
        ),
        (
            ["algorithm.minibatches=16", "algorithm.responses_per_prompt=2"],
            3,
            "is 2, too few for 3 data-parallel ranks",
        ),
        (["algorithm.name=sft", "algorithm.batch_size=3"], 4, "algorithm.batch_size is 3, too few"),
    ],
)
def test_ranks(
    write_recipe: WriteRecipe, overrides: list[str], world_size: int, message: str
) -> None:
    assert message in refused(write_recipe(), *overrides, world_size=world_size)


def test_ranks_that_make_the_axes(write_recipe: WriteRecipe) -> None:
    check(write_recipe(), "parallel.tensor=2", world_size=4)
    check(write_recipe(), "parallel.pipeline=2", "parallel.context=2", world_size=8)
    # Context ranks share their prompts: one is enough for both.
    one = ["algorithm.name=sft", "algorithm.batch_size=1"]
    check(write_recipe(), "parallel.context=2", *one, world_size=2)


# Model sizes (heads 4, key-value heads 2, MLP 256, vocabulary 384, layers 4 where not given),
# overrides, and what the sentence says.
REFUSED: list[tuple[dict[str, Any], list[str], str]] = [
    (
        {},
        ["parallel.tensor=3"],
        "parallel.tensor=3 does not divide the model's num_attention_heads=4: "
        "set parallel.tensor to 1, 2 or 4",
    ),
    (
        {
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "hidden_size": 384,
            "intermediate_size": 768,
        },
        ["parallel.tensor=6"],
        "parallel.tensor=6 neither divides the model's num_key_value_heads=4 nor gives each of "
        "them equally many ranks: set parallel.tensor to 1, 2 or 4",
    ),
    ({"vocab_size": 257}, ["parallel.tensor=2"], "does not divide the model's vocab_size=257"),
    (
        {},
        ["parallel.pipeline=3"],
        "parallel.pipeline=3 with parallel.virtual=1, parallel.first_stage_layers=None and "
        "parallel.last_stage_layers=None does not split the model's 4 layers",
    ),
    (
        {},
        ["recompute.language=full", "recompute.layers=3"],
        "recompute.layers=3 does not divide the 4 layers of a pipeline stage or chunk of one",
    ),
    (
        {},
        ["parallel.expert=2"],
        "parallel.expert=2 divides experts, but the model has none: set parallel.expert=1",
    ),
    (EXPERTS, ["parallel.expert=3"], "parallel.expert=3 does not divide the model's num_experts=8"),
    (
        EXPERTS,
        ["parallel.tensor=2"],
        "parallel.tensor=2 with experts needs sequence parallelism, or every rank of the tensor "
        "axis would send the same tokens to them: set parallel.sequence=true",
    ),
    ({}, ["rollout.tensor_parallel=8"], "rollout.tensor_parallel=8 does not divide the model's"),
    (
        {},
        ["lora.rank=2", "lora.targets=[language.experts]"],
        "lora.targets holds language.experts, but the model has no experts: remove it",
    ),
    (
        {},
        ["algorithm.routing_replay=true"],
        "has no experts: set it to false",
    ),
    (
        EXPERTS,
        ["lora.rank=2"],
        "lora.targets holds language.mlp, but the model has no layers without experts: remove it",
    ),
    (
        {},
        ["lora.rank=2", "lora.targets=[language.linear_attention]"],
        "lora.targets holds language.linear_attention, but the model has no layers of linear",
    ),
    (
        SHARED_EXPERTS,
        ADAPTERS,
        "rollout.lora=adapter cannot serve lora.targets=language.mlp without language.experts",
    ),
    (
        EXPERTS | {"mlp_only_layers": [2]},
        ADAPTERS,
        "rollout.lora=adapter cannot serve lora.targets=language.mlp of a mixture of experts",
    ),
    (
        LINEAR,
        ["parallel.tensor=2", "parallel.context=4"],
        "parallel.tensor=2 times parallel.context=4 does not divide the model's linear_num_key",
    ),
]

FITTING: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["parallel.tensor=2", "parallel.context=3", "parallel.pipeline=2", "parallel.virtual=2"]),
    ({}, ["parallel.tensor=4"]),  # two ranks share each key-value head
    ({}, ["recompute.language=full", "recompute.layers=2", "parallel.pipeline=2"]),
    ({}, ["recompute.layers=3"]),  # nothing is recomputed
    ({}, ["rollout.tensor_parallel=4"]),  # the server repeats key-value heads
    (EXPERTS, ["parallel.expert=8"]),
    (EXPERTS, ["algorithm.routing_replay=true"]),
    # no layer has the dense MLP of intermediate_size
    (EXPERTS | {"intermediate_size": 257}, ["parallel.tensor=2", "parallel.sequence=true"]),
    (EXPERTS, ["lora.rank=2", "lora.targets=[language.experts]"]),
    (EXPERTS | {"mlp_only_layers": [2]}, ["lora.rank=2"]),
    (SHARED_EXPERTS, ["lora.rank=2"]),
    (SHARED_EXPERTS, [*ADAPTERS, "lora.targets=[language.attention]"]),
    (LINEAR, ["lora.rank=2", "lora.targets=[language.linear_attention]"]),
    (LINEAR, ADAPTERS),
    ({}, ["lora.targets=[language.experts]"]),  # there are no adapters
]


@pytest.mark.parametrize(("sizes", "overrides", "message"), REFUSED)
def test_a_model_that_cannot_be_cut_so(
    write_recipe: WriteRecipe,
    tmp_path: Path,
    sizes: dict[str, Any],
    overrides: list[str],
    message: str,
) -> None:
    folder = write_model_folder(tmp_path / "other", **sizes)
    recipe = write_recipe()
    assert message in refused(recipe, f"model.folder={folder}", *overrides, by=check_model)


@pytest.mark.parametrize(("sizes", "overrides"), FITTING)
def test_a_model_that_can_be_cut_so(
    write_recipe: WriteRecipe, tmp_path: Path, sizes: dict[str, Any], overrides: list[str]
) -> None:
    folder = write_model_folder(tmp_path / "other", **sizes)
    check_model(write_recipe(), f"model.folder={folder}", *overrides)


def test_text_config_is_read_where_it_is(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    write_recipe()
    path = tmp_path / "model" / "config.json"
    flat = json.loads(path.read_text())
    model_type = {"model_type": flat.pop("model_type")}
    for within in (lambda values: values, lambda values: {"thinker_config": values}):
        path.write_text(json.dumps(model_type | within({"text_config": flat})))
        check_model(write_recipe())
        for name in ("vocab_size", "num_hidden_layers", "num_key_value_heads"):
            text = {key: value for key, value in flat.items() if key != name}
            path.write_text(json.dumps(model_type | within({"text_config": text})))
            assert f"config.json has no {name}: give a complete" in refused(
                write_recipe(), by=check_model
            )


def values_of(config: Any) -> dict[str, Any]:
    """A config.json's values, with the model_type of the folder where it holds several models."""
    values: dict[str, Any] = config.to_dict() | {"model_type": config.model_type}
    return values


def family_sizes(config: Any) -> dict[str, Any]:
    """What a family's `architecture` says of the sizes that preflight reads from config.json."""
    architecture = part(config.model_type, "config").architecture(config)
    names = language_sizes(values_of(config), Path("model"))
    experts = {"num_moe_experts"} & architecture.keys()
    return {name: architecture[name] for name in {*names, *experts}}


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_a_family_s_own_architecture(family: str) -> None:
    config = small_config(family)
    assert language_sizes(values_of(config), Path("model")) == family_sizes(config)


@pytest.mark.parametrize("release", RELEASES)
def test_sizes_are_those_of_a_released_model_s_architecture(release: str, tmp_path: Path) -> None:
    config = released_config(release, tmp_path)
    assert language_sizes(RELEASES[release], Path("model")) == family_sizes(config)


FP8 = ["rollout.quantization=fp8", "model.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("release", "overrides", "message"),
    [
        ("Qwen2.5-VL-7B", ["rollout.tensor_parallel=4", "parallel.tensor=4"], None),
        ("Qwen2.5-VL-32B", ["rollout.tensor_parallel=8", "parallel.tensor=8"], None),
        ("Qwen3-VL-30B-A3B", ["rollout.tensor_parallel=2", "parallel.expert=8"], None),
        (
            "Qwen3-VL-30B-A3B",
            ["rollout.tensor_parallel=4", "rollout.server_args.ep_size=4"],
            None,
        ),
        (
            "Qwen3-VL-30B-A3B",
            ["rollout.tensor_parallel=2", "rollout.server_args.ep_size=null"],
            None,
        ),
        (
            "Qwen2.5-VL-32B",
            ["rollout.tensor_parallel=5"],
            "model's intermediate_size=27648 over rollout.tensor_parallel=5 is 5529.6, no multiple "
            "of 128: lower rollout.tensor_parallel, or set rollout.quantization=null",
        ),
        (
            "Qwen3-VL-30B-A3B",
            ["parallel.tensor=16", "parallel.sequence=true"],
            "rows of queries, keys and values=5120 over parallel.tensor=16 is 320, no multiple of",
        ),
        (
            "Qwen3-VL-30B-A3B",
            ["rollout.tensor_parallel=4"],
            "moe_intermediate_size=768 over rollout.tensor_parallel / ep_size=4 is 192, no",
        ),
        (
            "Qwen3-VL-30B-A3B",
            ["parallel.expert_tensor=4"],
            "moe_intermediate_size=768 over parallel.expert_tensor=4 is 192, no multiple of 128",
        ),
    ],
)
def test_blocks_of_quantised_weights_are_on_one_rank(
    write_recipe: WriteRecipe,
    tmp_path: Path,
    release: str,
    overrides: list[str],
    message: str | None,
) -> None:
    write_model_folder(tmp_path / "release", **RELEASES[release])
    given = [f"model.folder={tmp_path / 'release'}", *FP8, *overrides]
    if message is None:
        check_model(write_recipe(), *given)
    else:
        assert message in refused(write_recipe(), *given, by=check_model)
