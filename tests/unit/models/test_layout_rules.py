"""Which layouts a model can have, and what the refusal says."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from megavlm.demo.tiny_model import make_tiny_model
from megavlm.models.build import build_model
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.layout_rules import check_model_layout
from megavlm.parallel.mesh import Layout, build_mesh
from tests.parity.cases import compare, expect
from tests.parity.inputs import QUESTION, Inputs
from tests.parity.table import Case
from tests.support.families import part, small_config
from tests.support.fork import launch
from tests.support.releases import released_config

SEQUENCE = ModelOptions(sequence=True)
KEYS_AND_VALUES = re.compile(r"self_attn\.[kv]_proj\.")


def check(release: str, folder: Path, layout: Layout, options: ModelOptions, **text: Any) -> None:
    """`text`: what to change in the released configuration."""
    config = released_config(release, folder, **text)
    architecture = part(config.model_type, "config").architecture(config)
    check_model_layout(architecture, layout, options, vocab_size=config.text_config.vocab_size)


def uneven(first: int | None, last: int | None) -> ModelOptions:
    return ModelOptions(first_stage_layers=first, last_stage_layers=last)


@pytest.mark.parametrize(
    ("release", "layout", "options"),
    [
        ("Qwen2.5-VL-72B", Layout(tensor=8, pipeline=8, context=4), ModelOptions()),
        ("Qwen2.5-VL-72B", Layout(tensor=8, pipeline=8, virtual=5), SEQUENCE),
        ("Qwen2.5-VL-72B", Layout(pipeline=4), uneven(18, 20)),
        ("Qwen2.5-VL-72B", Layout(pipeline=2), uneven(39, 41)),
        ("Qwen2.5-VL-72B", Layout(pipeline=3, virtual=2), uneven(20, None)),
        ("Qwen3-VL-235B-A22B", Layout(tensor=8, expert=128), SEQUENCE),  # 4 key-value heads
        ("Qwen3-VL-30B-A3B", Layout(tensor=4, expert=4, expert_tensor=4), SEQUENCE),
    ],
)
def test_a_layout_that_fits(
    release: str, layout: Layout, options: ModelOptions, tmp_path: Path
) -> None:
    check(release, tmp_path, layout, options)


@pytest.mark.parametrize(
    ("release", "layout", "options", "message"),
    [
        (
            "Qwen2.5-VL-7B",
            Layout(tensor=8),
            ModelOptions(),
            "parallel.tensor=8 does not divide the model's num_attention_heads=28: "
            "set parallel.tensor to 1, 2 or 4",
        ),
        (
            "Qwen2.5-VL-72B",
            Layout(pipeline=7),
            ModelOptions(),
            "parallel.pipeline=7 with parallel.virtual=1, parallel.first_stage_layers=None and "
            "parallel.last_stage_layers=None does not split the model's 80 layers: stages without "
            "a number of their own must have equally many, and each stage a multiple of "
            "parallel.virtual; parallel.first_stage_layers=10 and parallel.last_stage_layers=10 "
            "work",
        ),
        (
            "Qwen3-VL-30B-A3B",
            Layout(expert=12),
            ModelOptions(),
            "parallel.expert=12 does not divide the model's num_experts=128: "
            "set parallel.expert to a number that does",
        ),
        (
            "Qwen3-VL-30B-A3B",
            Layout(expert_tensor=5),
            ModelOptions(),
            "parallel.expert_tensor=5 does not divide the model's moe_intermediate_size=768: "
            "set parallel.expert_tensor to a number that does",
        ),
        (
            "Qwen3-VL-30B-A3B",
            Layout(tensor=2),
            ModelOptions(),
            "parallel.tensor=2 with experts needs sequence parallelism, or every rank of the "
            "tensor axis would send the same tokens to them: set parallel.sequence=true",
        ),
        (
            "Qwen3-VL-8B",
            Layout(expert=2),
            ModelOptions(),
            "parallel.expert=2 divides experts, but the model has none: set parallel.expert=1",
        ),
    ],
)
def test_a_refusal_is_one_sentence(
    release: str, layout: Layout, options: ModelOptions, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as error:
        check(release, tmp_path, layout, options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"intermediate_size": 18946}, "intermediate_size=18946"),
        ({"vocab_size": 151654}, "vocab_size=151654"),
    ],
)
def test_every_tensor_is_cut_evenly(text: dict[str, int], name: str, tmp_path: Path) -> None:
    check("Qwen2.5-VL-7B", tmp_path, Layout(tensor=4), ModelOptions())
    with pytest.raises(ValueError, match=f"parallel.tensor=4 .* the model's {name}"):
        check("Qwen2.5-VL-7B", tmp_path, Layout(tensor=4), ModelOptions(), **text)


def test_ranks_that_share_a_head_cut_its_rows(tmp_path: Path) -> None:
    """Six ranks on two key-value heads: the 16 x 128 rows of all heads do not divide."""
    text = {"vocab_size": 151632, "intermediate_size": 8958}
    with pytest.raises(ValueError, match=r"does not divide the 2048 rows .* to 1 or 2"):
        check("Qwen2-VL-2B", tmp_path, Layout(tensor=6), ModelOptions(), **text)


def test_the_dense_size_matters_only_where_a_layer_is_dense(tmp_path: Path) -> None:
    release, layout, odd = "Qwen3-VL-30B-A3B", Layout(tensor=4), {"intermediate_size": 6146}
    check(release, tmp_path, layout, SEQUENCE, **odd)
    with pytest.raises(ValueError, match=r"intermediate_size=6146: set parallel.tensor to 1 or 2"):
        check(release, tmp_path, layout, SEQUENCE, mlp_only_layers=[3], **odd)


@pytest.mark.parametrize(
    ("layout", "options", "hint"),
    [
        (Layout(pipeline=8), ModelOptions(), "first_stage_layers=11 and .*last_stage_layers=11"),
        (Layout(pipeline=4), ModelOptions(), "first_stage_layers=23 and .*last_stage_layers=23"),
        (Layout(pipeline=4), uneven(23, 24), "first_stage_layers=23 and .*last_stage_layers=23"),
        (Layout(pipeline=4, virtual=2), ModelOptions(), "layers=22 and .*layers=24"),
        (Layout(pipeline=2), uneven(40, 40), "an even split works"),
        (Layout(pipeline=2), uneven(None, 94), "an even split works"),
        (Layout(pipeline=1), uneven(None, 90), "an even split works"),
        (Layout(pipeline=1), uneven(47, 47), "an even split works"),
        (Layout(pipeline=4, virtual=3), ModelOptions(), "a multiple of parallel.virtual$"),
    ],
)
def test_stages_of_94_layers(
    layout: Layout, options: ModelOptions, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=hint):
        check("Qwen3-VL-235B-A22B", tmp_path, layout, options)


def test_the_suggested_split_fits(tmp_path: Path) -> None:
    for layout, first, last in (
        (Layout(pipeline=8), 11, 11),
        (Layout(pipeline=4), 23, 23),
        (Layout(pipeline=4, virtual=2), 22, 24),
    ):
        check("Qwen3-VL-235B-A22B", tmp_path, layout, uneven(first, last))


def test_build_model_refuses() -> None:
    (sentence,) = launch(1, _refused)
    assert "parallel.tensor=3" in sentence and "num_attention_heads=8" in sentence


def _refused() -> str:
    mesh = build_mesh()
    three = replace(mesh, layout=Layout(tensor=3))
    with pytest.raises(ValueError, match=r"parallel.tensor=3") as caught:
        build_model(small_config("qwen2_5_vl"), three)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen2_5_vl", "TP2"), ("qwen3_vl", "TP2+SP"), ("qwen3_5", "TP2")],
    ids=str,
)
def test_ranks_that_share_a_key_value_head_equal_transformers(
    family: str, layout: str, tmp_path: Path
) -> None:
    """More tensor ranks than key-value heads, which megatron-core repeats; with biases, with norms
    of queries and keys, and with gates.
    """
    launch(1, _one_head, tmp_path, family)
    inputs = Inputs(tmp_path)
    sequences = [inputs.case(i, text=9 + i, responses=(3, 2)) for i in range(2)]
    (expected,) = launch(1, expect, tmp_path, sequences, "tokens")
    case = Case(family, layout, "one key-value head")
    for result in launch(2, compare, tmp_path, inputs.config, case, sequences, expected):
        assert result.logits < 1e-5
        assert result.gradients < 1e-5, result.parameter
        assert result.norm < 1e-6


def _one_head(folder: Path, family: str) -> None:
    make_tiny_model(
        folder,
        [QUESTION] * 10,
        seed=3,
        family=family,
        num_layers=2,
        num_kv_heads=2,
        init_std=0.02 if family == "qwen3_5" else 0.05,  # well conditioned: see parity.models
        randomise_norms_and_biases=True,
    )
    # Gated DeltaNet's key heads, which are as many, must divide over the ranks.
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_key_value_heads"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    tensors = {
        name: x.chunk(2)[0].contiguous() if KEYS_AND_VALUES.search(name) else x
        for name, x in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})


def test_recomputed_regions_divide_a_chunk() -> None:
    architecture = {
        "num_layers": 12,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "kv_channels": 8,
        "ffn_hidden_size": 64,
    }
    layout = Layout(pipeline=2, virtual=2)

    def check_regions(layers: int) -> None:
        check_model_layout(
            architecture, layout, ModelOptions(), vocab_size=64, recompute_layers=layers
        )

    check_regions(3)
    with pytest.raises(ValueError, match=r"recompute\.layers=2 does not divide the 3 layers"):
        check_regions(2)
