"""Mapping of Qwen3-Omni's thinker between hub tensors and this model's tensors."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megavlm.models.common.mapping import Entry, joined, same
from megavlm.models.common.mapping_parts import weight_and_bias
from megavlm.models.qwen3_omni.config import CONVOLUTIONS, halved
from megavlm.models.qwen3_vl.mapping import text_entries, tower_entries

# Names of the mergers' modules in Qwen3-VL and here.
MERGERS = (
    (".deepstack_merger_list.", ".merger_list."),
    (".norm.", ".ln_q."),
    (".linear_fc1.", ".mlp.0."),
    (".linear_fc2.", ".mlp.2."),
)


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor. `config` is transformers' Qwen3OmniMoeThinkerConfig."""
    entries = [
        *_tower(config.vision_config),
        *_audio(config.audio_config),
        *text_entries(config, "model", separate=True),
    ]
    return [replace(entry, hf=tuple(f"thinker.{name}" for name in entry.hf)) for entry in entries]


def _tower(vision: Any) -> Iterator[Entry]:
    for entry in tower_entries(vision, num_levels=len(vision.deepstack_visual_indexes)):
        (name,) = entry.hf
        name = name.removeprefix("model.")
        if "merger" in name:
            for ours, theirs in MERGERS:
                name = name.replace(ours, theirs)
        yield replace(entry, hf=(name,))


def _audio(audio: Any) -> Iterator[Entry]:
    size, channels = audio.d_model, audio.downsample_hidden_size
    megatron, hf = "visual.audio", "audio_tower"
    rows = halved(audio.num_mel_bins)
    for number, inputs in enumerate((1, channels, channels), 1):
        convolution, shape = f"conv2d{number}", (channels, inputs, 3, 3)
        weight = same(f"{megatron}.{convolution}.weight", f"{hf}.{convolution}.weight", shape)
        # Each convolution halves time and frequency; one row of the last's outputs is a token.
        yield replace(weight, share=float(rows * 4 ** (CONVOLUTIONS - number)))
        yield same(f"{megatron}.{convolution}.bias", f"{hf}.{convolution}.bias", (channels,))
    yield same(f"{megatron}.conv_out.weight", f"{hf}.conv_out.weight", (size, channels * rows))
    for index in range(audio.encoder_layers):
        yield from _block(f"{megatron}.blocks.{index}", f"{hf}.layers.{index}", audio)
    yield from weight_and_bias(f"{megatron}.post_layernorm", f"{hf}.ln_post", size)
    for name, rows in (("proj1", size), ("proj2", audio.output_dim)):
        yield from weight_and_bias(f"visual.audio_merger.{name}", f"{hf}.{name}", rows, size)


def _block(megatron: str, hf: str, audio: Any) -> Iterator[Entry]:
    size, ffn = audio.d_model, audio.encoder_ffn_dim
    yield from weight_and_bias(f"{megatron}.norm1", f"{hf}.self_attn_layer_norm", size)
    for kind, shape in (("weight", (size, size)), ("bias", (size,))):
        names = [f"{hf}.self_attn.{x}_proj.{kind}" for x in "qkv"]
        yield joined(f"{megatron}.attn.qkv.{kind}", names, shape)
    yield from weight_and_bias(f"{megatron}.attn.out_proj", f"{hf}.self_attn.out_proj", size, size)
    yield from weight_and_bias(f"{megatron}.norm2", f"{hf}.final_layer_norm", size)
    yield from weight_and_bias(f"{megatron}.mlp.fc1", f"{hf}.fc1", ffn, size)
    yield from weight_and_bias(f"{megatron}.mlp.fc2", f"{hf}.fc2", size, ffn)
