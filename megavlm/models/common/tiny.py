"""Tiny models: the sizes that can be chosen, and the parts of a folder that a family defines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megavlm.families import family


@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """Sizes of a tiny model. Options that are None by default exist only in some families
    (`TinyFamily.options`).

    full_attention_blocks: tower blocks without windows, all by default; the others have windows of
        112 pixels.
    head_dim: hidden_size / num_heads by default; with linear attention 64, of which a quarter gets
        rotary embeddings.
    linear_head_dim: Size of heads of keys and values in linear attention; 16 and 24 by default.
    deepstack_blocks: tower blocks whose output becomes a DeepStack level, by default the first
        three, or as many as there are tower blocks and language layers.
    position_table_side: the learned table has side x side positions; 8 by default.
    num_experts, experts_per_token, moe_ffn_size (MoE): 4, 2 and 3/8 of ffn_size by default, the
        last rounded up to a multiple of 16.
    dense_layers (MoE): layers with a dense MLP of ffn_size; the family's default.
    """

    hidden_size: int = 128
    num_layers: int = 3
    ffn_size: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None
    linear_head_dim: int | None = None
    tied_embeddings: bool = False
    vision_depth: int = 3
    vision_hidden_size: int = 96
    vision_ffn_size: int = 192
    vision_num_heads: int = 4
    full_attention_blocks: Sequence[int] | None = None
    deepstack_blocks: Sequence[int] | None = None
    position_table_side: int | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    moe_ffn_size: int | None = None
    dense_layers: Sequence[int] | None = None
    init_std: float = 0.02

    @property
    def expert_ffn_size(self) -> int:
        """Width of an expert."""
        return self.moe_ffn_size or -(-3 * self.ffn_size // 128) * 16


@dataclass(frozen=True, kw_only=True)
class TinyTokens:
    """Tokenizer of a tiny model, with the family's special tokens and chat template.

    eos: The tokenizer's. roles: Words of the template that become one token each.
    """

    special: tuple[str, ...]
    end_of_text: str
    eos: str
    chat_template: str
    roles: tuple[str, ...]
    # Added where texts have tool calls, as in most released tokenizers.
    tools: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True, kw_only=True)
class TinyFamily:
    """Parts of a tiny model's folder that a family defines.

    options: Names of the options of TinySizes that it has.
    config: Function of the sizes, the size of the vocabulary and the ids of the special tokens. It
        returns transformers' configuration, and raises ValueError for sizes that the family's
        checkpoints cannot hold.
    processor: Function of the configuration, the tokenizer and the number of pixels of the largest
        resized image (None: the family's default). It returns transformers' processor.
    has_original_form: Whether released files have the form that transformers calls original.
    transposes_experts: Whether released files stack experts as [E, in, out].
    """

    options: frozenset[str]
    tokens: TinyTokens
    config: Callable[[TinySizes, int, Mapping[str, int]], Any]
    processor: Callable[[Any, Any, int | None], Any]
    has_original_form: bool = True
    transposes_experts: bool = False


def tiny_family(model_type: str) -> TinyFamily:
    """Return the parts of a family's tiny model. Raises ValueError for an unknown family."""
    parts: TinyFamily = family(model_type).tiny()[model_type]
    return parts


def tiny_config(
    model_type: str, sizes: TinySizes, vocab_size: int, token_ids: Mapping[str, int]
) -> Any:
    """Return transformers' configuration of a family's tiny model.

    token_ids: ids of the special tokens. Raises ValueError for an unknown family, an option that
    the family does not have, or sizes that its checkpoints cannot hold.
    """
    parts = tiny_family(model_type)
    for field in fields(sizes):
        is_given = field.default is None and getattr(sizes, field.name) is not None
        if is_given and field.name not in parts.options:
            names = ", ".join(sorted(parts.options)) or "none"
            raise ValueError(f"{field.name}: {model_type} has no such option; it has {names}")
    return parts.config(sizes, vocab_size, token_ids)


def text_values(sizes: TinySizes, vocab_size: int) -> dict[str, Any]:
    """Return the values of a `text_config` that families share."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.ffn_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "initializer_range": sizes.init_std,
        "tie_word_embeddings": sizes.tied_embeddings,
    }


def turns_template(image: str, video: str) -> str:
    """Return the chat template of families whose turns stand between <|im_start|> and <|im_end|>.
    image, video: Text for an image and for a video.
    """
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}"
        "{% else %}{% for content in message['content'] %}"
        "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
        f"{image}"
        "{% elif content['type'] == 'video' or 'video' in content %}"
        f"{video}"
        "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}"
        "{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def marked_tokenizer(tokenizer: Any, marks: Mapping[str, str]) -> Any:
    """Return a tokenizer with the same tokens and attributes for some of them.

    marks: Maps the name that transformers' processor reads to the token.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        extra_special_tokens=dict(marks),
        chat_template=tokenizer.chat_template,
        model_max_length=tokenizer.model_max_length,
        clean_up_tokenization_spaces=False,
    )


# Options of models with experts.
EXPERT_OPTIONS = ("num_experts", "experts_per_token", "moe_ffn_size", "dense_layers")


def mrope_section(head_dim: int) -> list[int]:
    """Return the numbers of frequencies for time, height and width in the ratio 2 : 3 : 3 of
    released models with chunked M-RoPE. They sum to head_dim / 2.
    """
    spatial = 3 * head_dim // 16
    return [head_dim // 2 - 2 * spatial, spatial, spatial]


def interleaved_mrope_section(head_dim: int) -> list[int]:
    """Return the numbers of frequencies in the ratio 6 : 5 : 5 of released models with interleaved
    M-RoPE.
    """
    spatial = 5 * head_dim // 32
    return [head_dim // 2 - 2 * spatial, spatial, spatial]
