"""Modelled memory: every recipe fits 80 GB GPUs, and the model counts what autograd keeps."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megavlm.config.load import load
from megavlm.config.schema import Config
from megavlm.data.packs.packing import make_pack
from megavlm.data.packs.trees import prompt_tree
from megavlm.data.processor import Prompt
from megavlm.data.rows import Row
from megavlm.models.build import build_model
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.logprobs import Scoring
from megavlm.models.linear_attention.delta_rule import Rule
from megavlm.models.linear_attention.gated_delta_net import GatedDeltaNet
from megavlm.models.sizes import rank_parameters
from megavlm.parallel.mesh import Layout, build_mesh
from megavlm.planner import activations
from megavlm.planner.activations import activation_bytes
from megavlm.planner.memory import (
    GB,
    RunMemory,
    optimizer_bytes,
    step_bytes,
    trainer_ranks,
)
from megavlm.planner.overview import recomputations
from tests.gpu import page
from tests.support.families import small_config
from tests.support.fork import launch
from tests.support.levels import slow
from tests.support.releases import released_config
from tests.unit.config.test_recipes import RECIPES, WHOLE, resolve
from tests.unit.planner.estimates import cluster

AWARE = "use_precision_aware_optimizer=true"
ON_GPUS = [name for name in WHOLE if not name.startswith("debug/")]
# In the quick suite; models with many layers or experts take seconds to build.
SMALL = [name for name in ON_GPUS if not re.search(r"_(27|30|32|35|72|235|241)b_|4_6v", name)]


def release(config: Config, folder: Path) -> Any:
    return released_config(Path(config.model.folder).name.removesuffix("-Instruct"), folder)


@pytest.mark.parametrize("name", [*SMALL, *slow(*(x for x in ON_GPUS if x not in SMALL))])
def test_a_recipe_fits_its_gpus_and_says_how_it_is_started(name: str, tmp_path: Path) -> None:
    config, world_size = resolve(name), cluster(name.removesuffix(".yaml")).trainers
    assert world_size % config.parallel.num_ranks == 0
    hf_config = release(config, tmp_path)
    ranks = [*trainer_ranks(config, hf_config, world_size)]
    memory = RunMemory.of(config, hf_config, world_size, ranks=ranks)
    assert [*memory.problems()] == []
    for less in less_recomputation(config, hf_config):  # which would be faster
        assert [*RunMemory.of(less, hf_config, world_size, ranks=ranks).problems()], less.recompute
    header = (RECIPES / name).read_text()
    assert f"{memory.fullest / GB:.0f} GB on each of {world_size} GPUs that train" in header
    start = "launch" if "nodes" in name or world_size > 8 else "train"
    assert f"# Start: megavlm {start} recipes/{name}" in header


def less_recomputation(config: Config, hf_config: Any) -> Iterator[Config]:
    """Yield a recipe with each kind of recomputation that takes less time than its own."""
    own = config.recompute
    for kind in recomputations(hf_config):
        if (kind.language == own.language and own.language != "selective") or kind == own:
            return
        yield replace(config, recompute=kind)


@pytest.mark.parametrize(
    ("name", "keys", "world_size", "problem"),
    [
        ("qwen3_vl_30b_a3b_geo3k_nodes", [], 8, "ranks 0-7 need"),
        (
            "qwen3_vl_235b_a22b_geo3k_nodes",
            ["pipeline=8", "first_stage_layers=11", "last_stage_layers=11"],
            64,
            "ranks 0-7 need",
        ),
        ("qwen2_5_vl_7b_geo3k", ["tensor=1", "sequence=false", "data=4"], 4, "ranks 0-3 need"),
    ],
)
def test_what_does_not_fit_is_named(
    name: str, keys: list[str], world_size: int, problem: str, tmp_path: Path
) -> None:
    urls = ["rollout.urls=['http://node:30000']"] if "nodes" in name else []
    config = load(RECIPES / f"grpo/{name}.yaml", urls + [f"parallel.{key}" for key in keys])
    found = [*RunMemory.of(config, release(config, tmp_path), world_size).problems()]
    assert found and found[0].startswith(problem)


def test_servers_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config = load(
        RECIPES / "grpo/qwen2_5_vl_7b_geo3k_colocated.yaml",
        ["rollout.tensor_parallel=1", "rollout.servers=8"],
    )
    found = [*RunMemory.of(config, release(config, tmp_path), 8).problems()]
    assert found == [], "8 copies of the weights"
    low = load(
        RECIPES / "grpo/qwen2_5_vl_72b_geo3k_nodes.yaml",
        ["rollout.urls=['http://node:30000']", "rollout.tensor_parallel=2"],
    )
    found = [*RunMemory.of(low, release(low, tmp_path), 96).problems()]
    assert len(found) == 1 and "for its cache" in found[0]


def test_a_server_and_a_trainer_that_do_not_share_a_gpu_are_named(tmp_path: Path) -> None:
    name = RECIPES / "grpo/qwen2_5_vl_7b_geo3k_colocated.yaml"
    config = load(name, ["rollout.server_args.mem_fraction_static=0.95"])
    found = [*RunMemory.of(config, release(config, tmp_path), 8).problems()]
    assert len(found) == 1 and found[0].startswith("a server's rank needs 86 GB")


@pytest.mark.parametrize(
    ("recipe", "world_size"), [("qwen2_5_vl_7b_geo3k", 4), ("qwen3_vl_30b_a3b_geo3k_nodes", 16)]
)
def test_the_optimizer_takes_twelve_bytes_for_each_trained_parameter(
    recipe: str, world_size: int, tmp_path: Path
) -> None:
    config = resolve(f"grpo/{recipe}.yaml")
    options, layout = ModelOptions.from_config(config), Layout.from_config(config.parallel)
    held = rank_parameters(release(config, tmp_path), layout, world_size, 0, options)
    cut = [x for x in held if x.trained and x.pieces > 1]
    assert any(".experts." in x.name for x in cut) == ("a3b" in recipe)
    for parameter in cut:
        on_all_ranks = world_size * optimizer_bytes(parameter, config, world_size)
        assert on_all_ranks == 12 * parameter.numel * parameter.pieces, parameter.name


@pytest.mark.parametrize(
    ("keys", "kept", "copied"),
    [
        (["grad_reduce_in_fp32=false"], 12, 4),
        ([AWARE], 10, 0),
        ([AWARE, "grad_reduce_in_fp32=false"], 10, 0),
        ([AWARE, "exp_avg_dtype=bfloat16"], 8, 4),
        ([AWARE, "exp_avg_dtype=bfloat16", "exp_avg_sq_dtype=bfloat16"], 6, 8),
    ],
)
def test_the_precision_aware_optimizer_takes_fewer_bytes(
    keys: list[str], kept: int, copied: int, tmp_path: Path
) -> None:
    """tests/gpu_path/optimizer_cases.py counts those of the real one."""
    recipe = RECIPES / "grpo/qwen2_5_vl_7b_geo3k.yaml"
    config = load(recipe, [f"optimizer.megatron.{key}" for key in keys])
    options, layout = ModelOptions.from_config(config), Layout.from_config(config.parallel)
    held = rank_parameters(release(config, tmp_path), layout, 4, 0, options)
    for parameter in (x for x in held if x.trained and x.pieces > 1):
        on_all_ranks = 4 * optimizer_bytes(parameter, config, 4)
        assert on_all_ranks == kept * parameter.numel * parameter.pieces
        assert 4 * step_bytes(parameter, config, 4) == copied * parameter.numel * parameter.pieces


LORA = "lora={rank: 8}"


def test_the_last_stage_has_the_gradient_of_a_separate_output_layer(tmp_path: Path) -> None:
    recipe = RECIPES / "grpo/qwen2_5_vl_7b_geo3k.yaml"
    plain, adapters = (load(recipe, ["parallel.pipeline=2", key]) for key in ("run.seed=1", LORA))
    hf_config = release(plain, tmp_path)
    full, frozen = (RunMemory.of(x, hf_config, 4).stages[-1] for x in (plain, adapters))
    text, tensor = hf_config.text_config, plain.parallel.tensor
    gradient = text.vocab_size // tensor * text.hidden_size * (4 + 2)  # in fp32 and in bfloat16
    assert full.logits - frozen.logits == gradient


def test_offloaded_state_is_there_in_the_step_alone(tmp_path: Path) -> None:
    recipe = RECIPES / "grpo/qwen2_5_vl_7b_geo3k.yaml"
    plain, away = (load(recipe, [f"optimizer.offload={key}"]) for key in ("false", "true"))
    hf_config = release(plain, tmp_path)
    (stays,), (goes,) = (RunMemory.of(x, hf_config, 4).stages for x in (plain, away))
    assert stays.optimizer > 20e9 and (stays.step, goes.optimizer) == (0, 0)
    assert goes.step == stays.optimizer
    assert goes.total == stays.total - min(stays.optimizer, stays.activations + stays.logits)


@pytest.mark.parametrize("model", ["3b", "7b"])
def test_an_update_allocates_what_an_h200_measured(model: str) -> None:
    lines = [x for x in page.read_results()["a"] if x["part"] == f"figures {model}"]
    (size,) = [x for x in lines if x["check"] == "model"]
    (row,) = [x for x in lines if x.get("phase") == "forward and backward"]
    assert page.modelled_bytes(size) / GB == pytest.approx(row["gigabytes"], rel=0.005)


TOKENS = 512
SIZES = {"hidden_size": 128, "ffn_size": 320, "num_heads": 4, "num_kv_heads": 2}
ALL = [
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4v",
    "glm4v_moe",
    "internvl",
]
ON_CPUS = ["data.max_prompt_tokens=256", f"data.pack_tokens={TOKENS}", "model.fusions=false"]


def two_kinds(family: str, num_layers: int, sizes: dict[str, int]) -> Any:
    """Return a configuration whose layers are all alike, but in Qwen3.5 every second one has full
    attention and the others Gated DeltaNet.
    """
    experts = {"dense_layers": []} if family in ("qwen3_vl_moe", "glm4v_moe") else {}
    hf_config = small_config(family, num_layers=num_layers, **sizes, **experts)
    if family.startswith("qwen3_5"):
        kinds = ["linear_attention", "full_attention"] * (num_layers // 2)
        hf_config.text_config.layer_types = kinds
    return hf_config


def kept_bytes(
    family: str, num_layers: int, layout: Layout, sizes: dict[str, int], options: ModelOptions
) -> int:
    """Bytes that autograd keeps of a forward, each storage once, without the parameters and without
    the delta rule, which is another one on GPUs.
    """
    mesh = build_mesh(layout)
    (model,) = build_model(two_kinds(family, num_layers, sizes), mesh, options)
    model.train()
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            module.rule = partial(uncounted, module.rule)
    ids = torch.arange(TOKENS) % 90 + 10
    positions = torch.arange(TOKENS).expand(3, -1)
    prompt = Prompt(Row(0, "", "", (), "", ""), ids[:-8], (), positions[:, :-8], TOKENS - 8, ())
    trees = [prompt_tree(prompt, [ids[-8:].tolist()])]
    pack = make_pack(
        trees, vision_token_ids=set(), multiple=layout.tensor, context_size=layout.context
    ).part(mesh.context_rank)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    alive = []  # else storages are freed and their addresses used again

    def pack_hook(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        model(pack, {}, Scoring())
    return sum(kept.values())


def uncounted(rule: Rule, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):  # the innermost hooks
        return rule(*args, **kwargs)


def kept_and_modelled(
    family: str, layout: Layout, sizes: dict[str, int], config: Config
) -> tuple[float, float]:
    """Return the bytes of two layers more on a rank: those kept, and those modelled."""
    ranks, options = layout.model_size, ModelOptions.from_config(config)
    kept, modelled = [], []
    for num_layers in (2, 4):
        found = launch(ranks, kept_bytes, family, num_layers, layout, sizes, options)
        kept.append(sum(found) / ranks)
        hf_config = two_kinds(family, num_layers, sizes)
        held = rank_parameters(hf_config, layout, ranks, 0, options)
        modelled.append(activation_bytes(config, hf_config, held)[0])
    return kept[1] - kept[0], modelled[1] - modelled[0]


@pytest.mark.parametrize(
    ("family", "dtype", "recompute"),
    [
        *((family, "float32", "none") for family in ALL),
        *((family, "float32", "core_attn") for family in ("qwen2_5_vl", "qwen3_5")),
        *((family, "float32", "large") for family in ("qwen3_vl", "qwen3_5_moe")),
        *((family, "float32", "full") for family in ("qwen3_vl_moe", "qwen3_5")),
        ("qwen3_5", "bfloat16", "none"),  # several of its tensors are in fp32
    ],
)
def test_activations_are_what_autograd_keeps(
    family: str, dtype: str, recompute: str, write_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two layers more, by megatron-core's own layers."""
    monkeypatch.setattr(activations, "_rule_values", lambda *_: 0.0)
    modules = {"large": ("moe" if "moe" in family else "mlp",), "core_attn": ("core_attn",)}
    keys = {"language": recompute}
    if recompute in modules:
        keys = {"language": "selective", "modules": modules[recompute]}
    config = load(write_recipe(recompute=keys), [*ON_CPUS, f"model.dtype={dtype}"])
    kept, modelled = kept_and_modelled(family, Layout(), SIZES, config)
    if recompute != "full":
        itemsize = getattr(torch, dtype).itemsize
        modelled += itemsize * TOKENS * values_of_cpus(family, SIZES, config)
    assert modelled / kept == pytest.approx(1.0, rel=0.02)


def values_of_cpus(family: str, sizes: dict[str, int], config: Config) -> float:
    """Return the values of a token that only CPUs keep in two layers: a third tensor of torch's
    norms, where the fused ones keep one or two; SDPA's output in an order of its own; and the
    output gate's sigmoid in fp32 in place of its input, where the GPU's is compiled.
    """
    tensor, has_norms = config.parallel.tensor, family.startswith("qwen3")  # of queries and keys
    is_gated = family.startswith("qwen3_5")
    has_small_heads = has_norms or family == "glm4v_moe"
    head = 16 if has_small_heads else sizes["hidden_size"] // sizes["num_heads"]
    query, groups = head * sizes["num_heads"] / tensor, max(sizes["num_kv_heads"], tensor)
    # Qwen3.5's norms are computed in fp32.
    wide = 4 // getattr(torch, config.model.dtype).itemsize if is_gated else 1
    norms = wide * (query + head * groups / tensor) * has_norms
    gate = (wide * query - query * (tensor < groups)) * is_gated
    is_again = config.recompute.language == "selective" and "core_attn" in config.recompute.modules
    layers = 1 if is_gated else 2  # with full attention
    num_norms = 8 if family == "glm4v" else 4
    return num_norms * wide * sizes["hidden_size"] / tensor + layers * (
        norms + gate + query * (not is_again)
    )


@pytest.mark.parametrize(
    ("family", "layout", "num_kv_heads"),
    [
        ("qwen3_vl", Layout(tensor=2), 1),  # which both ranks hold
        ("qwen2_5_vl", Layout(context=2), 4),
        ("qwen3_5", Layout(tensor=2), 4),
        ("qwen3_5_moe", Layout(context=2), 4),
    ],
)
def test_activations_of_a_layout_are_what_autograd_keeps(
    family: str,
    layout: Layout,
    num_kv_heads: int,
    write_recipe: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two layers more, in fp32, on one rank; with small MLPs, as attention is what is cut."""
    monkeypatch.setattr(activations, "_rule_values", lambda *_: 0.0)
    sizes = SIZES | {"ffn_size": 64, "num_kv_heads": num_kv_heads}
    keys = [
        f"parallel.tensor={layout.tensor}",
        f"parallel.sequence={str(layout.tensor > 1).lower()}",
        f"parallel.context={layout.context}",
    ]
    config = load(write_recipe(), [*ON_CPUS, "model.dtype=float32", *keys])
    kept, modelled = kept_and_modelled(family, layout, sizes, config)
    tokens = TOKENS // layout.context
    # SDPA's mask of this rank's second chunk, in each layer with attention.
    masks = tokens * TOKENS / (2 if family.startswith("qwen3_5") else 1) * (layout.context > 1)
    modelled += 4 * (tokens * values_of_cpus(family, sizes, config) + masks)
    assert modelled / kept == pytest.approx(1.0, rel=0.03)
