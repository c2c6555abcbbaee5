"""transformers' configurations as megatron-core's, their rotary angles, and what is refused."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm import families
from megavlm.models.common.architecture import interleaved_axes
from megavlm.models.common.config import LanguageConfig
from megavlm.models.common.rotary import MultimodalRotary
from tests.support.families import FAMILIES, build_in_transformers, part, small_config
from tests.support.releases import RELEASES, released_config, released_text


@cache
def rotary_class(family: str) -> Any:
    model = build_in_transformers(small_config(family)).model
    return type(getattr(model, "language_model", model).rotary_emb)


def assert_same_angles(config: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 5000, (3, 200), generator=generator)
    family = part(config.model_type, "config")
    interleaved = family.architecture(config).get("rotary_interleaved", False)
    rotary = MultimodalRotary(family.rotary(config), interleaved=interleaved)
    embedding = rotary_class(config.model_type)
    if {*family.rotary(config).axes} == {0}:  # without M-RoPE there is one position
        positions = positions[:1].expand(3, -1)
        cos, sin = embedding(config.text_config)(torch.ones(()), positions[:1])
    else:
        cos, sin = embedding(config.text_config)(torch.ones(()), positions[:, None])
    ours = rotary(positions)
    assert ours.shape == (200, 1, 1, cos.size(-1)) and ours.dtype == torch.float32
    assert torch.equal(ours[:, 0, 0].cos(), cos[0]) and torch.equal(ours[:, 0, 0].sin(), sin[0])
    tables = rotary.tables(positions, torch.float32)
    assert tables.interleaved == interleaved
    for table, whole in zip(tables[:2], (cos, sin), strict=True):
        twice = table[:, 0].repeat_interleave(2, 1) if interleaved else table[:, 0].repeat(1, 2)
        assert torch.equal(twice, whole[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_angles_are_those_of_transformers(family: str) -> None:
    assert_same_angles(small_config(family))


@pytest.mark.parametrize("release", RELEASES)
def test_released_configurations(release: str, tmp_path: Path) -> None:
    """As the hub has them: theta and sections lie elsewhere than in transformers 5's own form."""
    config = released_config(release, tmp_path)
    assert_same_angles(config)
    ours = LanguageConfig(**part(config.model_type, "config").architecture(config))
    text = released_text(RELEASES[release])
    assert ours.num_layers == text["num_hidden_layers"]
    assert ours.ffn_hidden_size == text.get("intermediate_size", ours.moe_ffn_hidden_size)
    assert ours.num_query_groups == text["num_key_value_heads"]
    assert ours.kv_channels == text.get("head_dim", 128)
    has_norms = release.startswith(("Qwen3", "InternVL3_5", "MiniCPM"))
    assert ours.qk_layernorm == has_norms != ours.add_qkv_bias
    assert ours.layernorm_epsilon == text.get("rms_norm_eps", 1e-6) and not ours.add_bias_linear
    if count := text.get("num_experts") or text.get("n_routed_experts"):
        assert (ours.num_moe_experts, ours.moe_router_topk) == (count, 8)
        assert ours.moe_ffn_hidden_size == text["moe_intermediate_size"]
        dense = text.get("first_k_dense_replace", 0)
        assert ours.moe_layer_freq == [0] * dense + [1] * (ours.num_layers - dense)
    else:
        assert ours.num_moe_experts is None
    if release.startswith(("Qwen3.5", "MiniCPM")):
        assert ours.linear_attention_freq == [1, 1, 1, 0] * (ours.num_layers // 4)
        assert ours.attention_output_gate and ours.layernorm_zero_centered_gamma
        assert bool(ours.moe_shared_expert_intermediate_size) == ("num_experts" in text)
    else:
        assert ours.linear_attention_freq is None and not ours.attention_output_gate


@pytest.mark.parametrize("family", FAMILIES)
def test_what_servers_read_is_added_where_it_lacks(family: str) -> None:
    values = small_config(family).to_dict()
    added = {"full_attention_interval", "partial_rotary_factor"}
    text = {name: x for name, x in values["text_config"].items() if name not in added}
    vision = {k: x for k, x in values["vision_config"].items() if k != "deepstack_visual_indexes"}
    has_linear_attention = "linear_num_key_heads" in text

    def complete(**changes: Any) -> dict[str, Any]:
        """What is added to the language model's values."""
        given = {**values, "text_config": text | changes, "vision_config": vision}
        completed = families.family(family).served_config(given)
        if not has_linear_attention:
            assert completed == given
            return {}
        levels = {"deepstack_visual_indexes": []} if family.startswith("qwen3_5") else {}
        assert completed["vision_config"] == vision | levels
        found: dict[str, Any] = completed["text_config"]
        return {name: found[name] for name in found.keys() - text.keys()}

    if added_here := complete():
        assert added_here == {"full_attention_interval": 4}
        rope = text["rope_parameters"] | {"partial_rotary_factor": 0.5}
        assert complete(rope_parameters=rope)["partial_rotary_factor"] == 0.5
        kinds = ["full_attention", "linear_attention"] * 2
        assert complete(layer_types=kinds) == {}
    assert bool(added_here) == has_linear_attention


def test_axes_of_the_released_qwen3_vl_take_turns_until_time_remains() -> None:
    axes = interleaved_axes([24, 20, 20])
    assert axes[:7] == (0, 1, 2, 0, 1, 2, 0) and axes[54:] == (0, 1, 2, 0, 1, 2, 0, 0, 0, 0)
    assert [axes.count(axis) for axis in range(3)] == [24, 20, 20]


def test_dense_layers_among_expert_layers() -> None:
    config = small_config("qwen3_vl_moe", num_layers=6, dense_layers=[3])
    config.text_config.decoder_sparse_step = 2
    fields = part("qwen3_vl_moe", "config").architecture(config)
    assert fields["moe_layer_freq"] == [0, 1, 0, 0, 0, 1]
    config.text_config.mlp_only_layers = list(range(6))
    assert "num_moe_experts" not in part("qwen3_vl_moe", "config").architecture(config)


@pytest.mark.parametrize(
    ("release", "changes", "message"),
    [
        (
            "Qwen3-VL-2B",
            {"hidden_act": "gelu"},
            "hidden_act: 'gelu' is not supported; use one of s",
        ),
        ("Qwen3-VL-2B", {"attention_bias": True}, "attention_bias: a bias is not supported"),
        (
            "Qwen2.5-VL-7B",
            {"use_sliding_window": True, "max_window_layers": 20},
            "layers from 20 on have a sliding window of 32768 tokens, but sliding windows are not",
        ),
        ("Qwen3.5-4B", {"attention_bias": True}, "attention_bias: a bias is not supported"),
        ("Qwen3-VL-30B-A3B", {"norm_topk_prob": False}, "norm_topk_prob: routers whose weights"),
        ("Qwen3-VL-30B-A3B", {"num_experts_per_tok": 1}, "num_experts_per_tok: 1 is not supported"),
        ("Qwen3.5-35B-A3B", {"num_experts_per_tok": 1}, "num_experts_per_tok: 1 is not supported"),
        ("GLM-4.6V", {"n_group": 8, "topk_group": 2}, "topk_group: 2 of 8 groups for num_experts"),
    ],
)
def test_what_is_not_implemented_is_refused(
    release: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = released_config(release, tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        part(config.model_type, "config").architecture(config)


def test_a_window_over_no_layer_is_no_window(tmp_path: Path) -> None:
    plain, windowed = (
        part("qwen2_5_vl", "config").architecture(
            released_config("Qwen2.5-VL-7B", tmp_path, use_sliding_window=is_windowed)
        )
        for is_windowed in (False, True)
    )
    assert windowed == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "rope_type 'yarn' is not supported; use default"),
        ({"mrope_section": [16, 24, 16]}, r"mrope_section \[16, 24, 16\] does not give .* the 64"),
        ({"mrope_section": [32, 32]}, r"mrope_section \[32, 32\] does not give time, height and"),
    ],
)
@pytest.mark.parametrize("release", ["Qwen2-VL-7B", "Qwen2.5-VL-7B", "Qwen3-VL-8B"])
def test_rotary_embeddings_that_are_refused(
    release: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    released = RELEASES[release].get("text_config", RELEASES[release])
    scaling = {"mrope_section": released["rope_scaling"]["mrope_section"], **changes}
    config = released_config(release, tmp_path, rope_scaling=scaling)
    with pytest.raises(ValueError, match=message):
        part(config.model_type, "config").rotary(config)


def test_qwen3_vl_has_no_rotary_embedding_of_qwen2_vl_s_type(tmp_path: Path) -> None:
    """transformers cannot build it; that of Qwen2-VL it reads as the default one."""
    scaling = {"type": "mrope", "mrope_section": [24, 20, 20]}
    config = released_config("Qwen3-VL-8B", tmp_path, rope_scaling=scaling)
    with pytest.raises(ValueError, match="rope_type 'mrope' is not supported; use default"):
        part(config.model_type, "config").rotary(config)


def test_a_section_that_is_not_given_is_the_released_one(tmp_path: Path) -> None:
    for release in ("Qwen2.5-VL-7B", "Qwen3-VL-8B"):
        config = released_config(release, tmp_path, rope_scaling={"rope_type": "default"})
        assert_same_angles(config)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("downsample_mode", "4x", "downsample_mode: '4x' is not supported; use '16x'"),
        ("merger_times", 2, "merger_times: 2 is not supported; use 1"),
        ("drop_vision_last_layer", True, "drop_vision_last_layer: True is not supported"),
        ("merge_kernel_size", [4, 4], "merge_kernel_size: .* is not supported; use \\(2, 2\\)"),
        ("insert_layer_id", 27, "insert_layer_id: 27 is not one of the tower's 27 layers"),
    ],
)
def test_towers_that_minicpm_v_was_not_released_with(
    name: str, value: object, message: str, tmp_path: Path
) -> None:
    config = released_config("MiniCPM-V-4.6", tmp_path)
    setattr(config.vision_config if name == "insert_layer_id" else config, name, value)
    with pytest.raises(ValueError, match=message):
        part(config.model_type, "config").architecture(config)
