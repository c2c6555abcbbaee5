"""The tiny model's folder is complete, reproducible, and what the options say."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from megavlm.demo.tiny_model import make_tiny_model, mrope_section
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


def test_mrope_sections_fill_the_head() -> None:
    assert mrope_section(32) == [4, 6, 6]  # the recipe's
    assert mrope_section(128) == [16, 24, 24]  # the released models'
    assert all(sum(mrope_section(dim)) == dim // 2 for dim in (8, 16, 24, 64))


def test_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="family: 'llava' has no tiny model"):
        make_tiny_model(tmp_path, TEXTS, seed=0, family="llava")
