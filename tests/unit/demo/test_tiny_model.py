"""The tiny model's folder is complete, reproducible, and what the options say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from megavlm.demo.tiny_model import _randomise, _slow_decay, make_tiny_model
from megavlm.families import FAMILIES, UNTRAINED
from megavlm.model_config import trained_config
from megavlm.models.common.tiny import (
    TinySizes,
    interleaved_mrope_section,
    mrope_section,
    tiny_config,
    tiny_family,
)
from megavlm.parallel.torchvision_ops import define_torchvision_operators

TEXTS = ["What color is the shape?", "red", "1 purple 3 yellow"] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder, TEXTS, seed=0)
    return folder


def test_folder_loads_in_transformers_with_hub_names(folder: Path) -> None:
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText, AutoProcessor

    names = load_file(folder / "model.safetensors").keys()
    assert {name.split(".")[0] for name in names} == {"visual", "model", "lm_head"}
    assert "model.layers.0.self_attn.q_proj.weight" in names
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert sum(p.numel() for p in model.parameters()) < 1.2e6
    assert model.generation_config.eos_token_id == model.config.text_config.eos_token_id
    processor = AutoProcessor.from_pretrained(folder)
    assert type(processor).__name__ == "Qwen2_5_VLProcessor"
    assert processor.image_processor.size["shortest_edge"] == 56 * 56
    assert (folder / "preprocessor_config.json").is_file()


def test_tokenizer_has_one_token_per_frequent_word_and_encodes_anything(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    assert len(tokenizer.encode("red")) == 1
    assert tokenizer.decode(tokenizer.encode("é 漢 \\boxed{7}")) == "é 漢 \\boxed{7}"
    assert tokenizer.encode("<|im_end|>") == [config.text_config.eos_token_id]
    assert tokenizer.encode("<|image_pad|>") == [config.image_token_id]
    assert len(tokenizer) <= config.text_config.vocab_size
    assert config.text_config.vocab_size % 64 == 0


def test_chat_template_is_qwens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Which?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_seed_decides_the_weights_and_leaves_the_callers_generator_alone(
    folder: Path, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_tiny_model(tmp_path / "same", TEXTS, seed=0)
    assert torch.equal(torch.rand(3), expected)
    make_tiny_model(tmp_path / "other", TEXTS, seed=1)
    first, same, other = (
        load_file(path / "model.safetensors")
        for path in (folder, tmp_path / "same", tmp_path / "other")
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_sizes_windows_ties_and_noise(tmp_path: Path) -> None:
    make_tiny_model(
        tmp_path,
        TEXTS,
        seed=0,
        hidden_size=64,
        num_layers=2,
        ffn_size=96,
        tied_embeddings=True,
        vision_depth=4,
        full_attention_blocks=[1, 3],
        randomise_norms_and_biases=True,
    )
    config = AutoConfig.from_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert config.tie_word_embeddings and "lm_head.weight" not in weights
    assert config.text_config.hidden_size == 64 and config.text_config.num_hidden_layers == 2
    assert config.vision_config.fullatt_block_indexes == [1, 3]
    for name in ("model.norm", "visual.blocks.3.norm1"):
        assert weights[f"{name}.weight"].std() > 0.05, name
    assert weights["model.layers.0.self_attn.q_proj.bias"].std() > 0.05


QWEN2 = ("Qwen2VLProcessor", "Qwen2VLVideoProcessor")
QWEN3 = ("Qwen3VLProcessor", "Qwen3VLVideoProcessor")
GLM4 = ("Glm4vProcessor", "Glm4vVideoProcessor")
GLM46 = ("Glm46VProcessor", "Glm46VVideoProcessor")


@pytest.mark.parametrize(
    ("family", "name", "processors", "side"),
    [
        ("qwen2_vl", "visual.blocks.0.mlp.fc1.bias", QWEN2, 28),
        ("qwen3_vl", "model.visual.deepstack_merger_list.2.norm.bias", QWEN3, 32),
        ("qwen3_vl_moe", "model.language_model.layers.0.mlp.experts.gate_up_proj", QWEN3, 32),
        ("glm4v", "model.language_model.layers.0.post_mlp_layernorm.weight", GLM4, 28),
        ("glm4v_moe", "model.language_model.layers.1.mlp.gate.e_score_correction_bias", GLM46, 28),
    ],
)
def test_every_family_loads_in_transformers(
    tmp_path: Path, family: str, name: str, processors: tuple[str, str], side: int
) -> None:
    make_tiny_model(tmp_path, TEXTS, seed=0, family=family)
    assert name in load_file(tmp_path / "model.safetensors")
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert model.config.model_type == family and not any(report.values())
    processor = AutoProcessor.from_pretrained(tmp_path)
    video_processor = processor.video_processor
    assert (type(processor).__name__, type(video_processor).__name__) == processors
    frames = 1 if family.startswith("qwen") else 2  # of which the bound counts the pixels
    assert processor.image_processor.size["shortest_edge"] == frames * (2 * side) ** 2
    assert processor.image_processor.patch_size == video_processor.patch_size == side // 2
    image = Image.new("RGB", (4 * side, 2 * side))
    inputs = processor(text=[f"{processor.image_token}red"], images=[image], return_tensors="pt")
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == 8
    assert model(**inputs).logits.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_reaches_every_norm_and_bias(tmp_path: Path, family: str) -> None:
    make_tiny_model(tmp_path, TEXTS, seed=0, family=family, randomise_norms_and_biases=True)
    weights = load_file(tmp_path / "model.safetensors")
    trained = {name: x for name, x in weights.items() if not name.startswith(UNTRAINED)}
    plain = [name for name, x in trained.items() if x.dim() == 1 and x.std() < 0.02]
    assert not plain


def test_qwen3_sizes(tmp_path: Path) -> None:
    make_tiny_model(
        tmp_path / "given",
        TEXTS,
        seed=0,
        family="qwen3_vl",
        hidden_size=64,
        head_dim=32,
        vision_depth=4,
        deepstack_blocks=[1, 3],
        position_table_side=6,
    )
    config = AutoConfig.from_pretrained(tmp_path / "given")
    weights = load_file(tmp_path / "given" / "model.safetensors")
    assert weights["model.language_model.layers.0.self_attn.q_proj.weight"].shape == (128, 64)
    assert weights["model.language_model.layers.0.self_attn.q_norm.weight"].shape == (32,)
    assert weights["model.visual.pos_embed.weight"].shape == (36, 96)
    assert config.vision_config.deepstack_visual_indexes == [1, 3]
    assert config.text_config.rope_parameters["mrope_section"] == [6, 5, 5]

    make_tiny_model(tmp_path / "plain", TEXTS, seed=0, family="qwen3_vl", num_layers=2)
    config = AutoConfig.from_pretrained(tmp_path / "plain")
    assert config.text_config.head_dim == 32
    assert config.vision_config.deepstack_visual_indexes == [0, 1]  # a level per language layer


def test_experts_lie_on_disk_as_released_and_load(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, TEXTS, seed=0, family="qwen3_vl_moe", num_experts=6, dense_layers=[1])
    weights = load_file(tmp_path / "model.safetensors")
    layers = "model.language_model.layers"
    assert weights[f"{layers}.0.mlp.experts.gate_up_proj"].shape == (6, 128, 192)
    assert weights[f"{layers}.0.mlp.experts.down_proj"].shape == (6, 96, 128)
    assert weights[f"{layers}.1.mlp.gate_proj.weight"].shape == (256, 128)
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    experts = model.model.language_model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        on_disk = weights[f"{layers}.0.mlp.experts.{name}"]
        assert torch.equal(getattr(experts, name), on_disk.transpose(1, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_stays_on_the_device_that_it_was_made_on(family: str) -> None:
    """A device that is not the default, as a GPU is not."""
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText

    ids = {token: number for number, token in enumerate(tiny_family(family).tokens.special)}
    config = trained_config(tiny_config(family, TinySizes(), 64, ids))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    _slow_decay(model)
    _randomise(model)
    held = [*model.named_parameters(), *model.named_buffers()]
    assert [name for name, tensor in held if tensor.device.type != "meta"] == []


def test_a_randomised_router_spreads(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, TEXTS, seed=0, family="qwen3_vl_moe", randomise_norms_and_biases=True)
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    chosen: list[tuple[torch.Tensor, torch.Tensor]] = []  # weights and experts [T, 2], by layer
    for layer in model.model.language_model.layers:
        layer.mlp.gate.register_forward_hook(lambda *call: chosen.append(call[2][1:]))
    model(input_ids=torch.arange(256)[None])
    assert len(chosen) == 3
    for weights, experts in chosen:
        share = experts.flatten().bincount(minlength=4) / experts.numel()
        assert share.min() > 0.18 and share.max() < 0.32, share  # 0.25 would be even
        assert weights.std() > 0.1


def test_mrope_sections_fill_the_head() -> None:
    assert mrope_section(32) == [4, 6, 6]  # the recipe's
    assert mrope_section(128) == [16, 24, 24]  # the released models'
    assert interleaved_mrope_section(128) == [24, 20, 20]
    for dim in (8, 16, 24, 64):
        assert sum(mrope_section(dim)) == sum(interleaved_mrope_section(dim)) == dim // 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "llava"}, "model_type 'llava' is not supported: use one of glm4v, "),
        ({"head_dim": 64}, "head_dim: qwen2_5_vl has no such option; it has full_attention_blocks"),
        ({"family": "qwen3_vl", "num_experts": 4}, "num_experts: qwen3_vl has no such option"),
        ({"family": "qwen2_vl", "vision_ffn_size": 100}, "vision_ffn_size: 100 is not a multiple"),
        ({"family": "qwen3_vl_moe", "moe_ffn_size": 64}, "moe_ffn_size: 64 makes an expert tensor"),
        ({"family": "glm4v_moe", "dense_layers": [1]}, r"dense_layers: \[1\] are not the first"),
    ],
)
def test_what_a_family_does_not_have_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_tiny_model(tmp_path, TEXTS, seed=0, **options)
    assert not any(tmp_path.iterdir())
