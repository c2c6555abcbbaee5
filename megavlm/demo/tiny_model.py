"""A tiny Qwen-VL with random weights, as a complete HuggingFace folder.

The folder holds what a released one holds (config, generation config, safetensors, tokenizer,
chat template, processor configs), so transformers and SGLang load it like any other; only the
sizes are small.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2_5_VLConfig

from megavlm.parallel.torchvision_ops import define_torchvision_operators

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# Qwen2.5-VL's released template without its default system message, to keep prompts short.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

FAMILIES = ("qwen2_5_vl",)


def make_tiny_model(
    folder: str | Path,
    texts: Iterable[str],
    *,
    seed: int,
    family: str = "qwen2_5_vl",
    hidden_size: int = 128,
    num_layers: int = 3,
    ffn_size: int = 256,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    tied_embeddings: bool = False,
    vision_depth: int = 3,
    vision_hidden_size: int = 96,
    vision_ffn_size: int = 192,
    vision_num_heads: int = 4,
    full_attention_blocks: Sequence[int] | None = None,
    init_std: float = 0.02,
    randomise_norms_and_biases: bool = False,
    max_vocab: int = 512,
    max_pixels: int = 28 * 28 * 1280,
) -> None:
    """Write a random model and a tokenizer trained on `texts` to `folder`.

    texts: what the tokenizer learns its merges from; a frequent word becomes one token.
    full_attention_blocks: tower blocks without windows (default: all); the others have windows
        of 112 pixels.
    randomise_norms_and_biases: draw norm weights around 1 and biases around 0 instead of exactly
        1 and 0, so that a test sees a norm or a bias that was left out or swapped.
    max_vocab: bound on the byte-level BPE vocabulary, special tokens not counted.
    max_pixels: largest resized picture, as the folder's image processor will enforce it.

    Raises ValueError for a family that has no tiny form.
    """
    if family not in FAMILIES:
        raise ValueError(f"family: {family!r} has no tiny model; use one of {', '.join(FAMILIES)}")
    folder = Path(folder)
    tokenizer = train_tokenizer(texts, max_vocab=max_vocab)
    vocab = tokenizer.get_vocab()
    ids = {token: vocab[token] for token in SPECIAL_TOKENS}
    if full_attention_blocks is None:
        full_attention_blocks = range(vision_depth)
    config = Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config={
            # A multiple of 64, as released vocabularies are, so that tensor parallelism can cut it.
            "vocab_size": -(-len(tokenizer) // 64) * 64,
            "hidden_size": hidden_size,
            "intermediate_size": ffn_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "rope_type": "default",
                "type": "default",
                "rope_theta": 1e6,
                "mrope_section": mrope_section(hidden_size // num_heads),
            },
            "rms_norm_eps": 1e-6,
            "initializer_range": init_std,
            "tie_word_embeddings": tied_embeddings,
            "bos_token_id": ids[END_OF_TEXT],
            "eos_token_id": ids[END_OF_TURN],
            "pad_token_id": ids[END_OF_TEXT],
        },
        vision_config={
            "depth": vision_depth,
            "hidden_size": vision_hidden_size,
            "intermediate_size": vision_ffn_size,
            "num_heads": vision_num_heads,
            "out_hidden_size": hidden_size,
            "fullatt_block_indexes": list(full_attention_blocks),
            "window_size": 112,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "initializer_range": init_std,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tied_embeddings,
    )
    _save_model(folder, config, ids, seed=seed, randomise=randomise_norms_and_biases)
    _save_processor(folder, tokenizer, max_pixels=max_pixels)


def mrope_section(head_dim: int) -> list[int]:
    """Frequencies for time, height and width, in the released 2 : 3 : 3; sums to head_dim / 2."""
    spatial = 3 * head_dim // 16
    return [head_dim // 2 - 2 * spatial, spatial, spatial]


def train_tokenizer(texts: Iterable[str], *, max_vocab: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen's special tokens and chat template; any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max_vocab,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The words of the chat template are in every prompt: each is one token.
    roles = ["system\n", "user\n", "assistant\n"] * 100
    tokenizer.train_from_iterator([*texts, *roles], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )


def _save_model(
    folder: Path, config: Qwen2_5_VLConfig, ids: dict[str, int], *, seed: int, randomise: bool
) -> None:
    define_torchvision_operators()
    from transformers import Qwen2_5_VLForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
        if randomise:
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms are 1 and biases 0: keep the centre, add noise
                    parameter.data += 0.1 * torch.randn_like(parameter)
    model.generation_config = GenerationConfig(
        bos_token_id=ids[END_OF_TEXT],
        eos_token_id=ids[END_OF_TURN],
        pad_token_id=ids[END_OF_TEXT],
    )
    model.save_pretrained(folder)


def _save_processor(folder: Path, tokenizer: PreTrainedTokenizerFast, *, max_pixels: int) -> None:
    define_torchvision_operators()
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    pixels = {"min_pixels": 56 * 56, "max_pixels": max_pixels}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**pixels),
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)
    # Released folders have preprocessor_config.json, and tools look for it; transformers 5 writes
    # the same content as a part of processor_config.json only.
    processor.image_processor.save_pretrained(folder)
