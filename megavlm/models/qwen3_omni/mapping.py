"""Mapping of Qwen3-Omni's thinker between hub tensors and this model's tensors."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from megavlm.models.common.mapping import Entry
from megavlm.models.common.mapping_parts import tower
from megavlm.models.qwen3_omni.audio import AudioTower, Projector
from megavlm.models.qwen3_omni.config import CONVOLUTIONS, halved
from megavlm.models.qwen3_vl.mapping import text_entries
from megavlm.models.qwen3_vl.vision import VisionTower as ImageTower

# Names of the mergers' modules in Qwen3-VL and here.
MERGERS = (
    (".deepstack_merger_list.", ".merger_list."),
    (".norm.", ".ln_q."),
    (".linear_fc1.", ".mlp.0."),
    (".linear_fc2.", ".mlp.2."),
)


# Parts of the audio tower's names here and on the hub.
AUDIO = (
    (".audio_merger.", "."),
    (".audio.", "."),
    (".blocks.", ".layers."),
    (".attn.qkv.", ".self_attn.?_proj."),
    (".attn.", ".self_attn."),
    (".norm1.", ".self_attn_layer_norm."),
    (".norm2.", ".final_layer_norm."),
    (".mlp.", "."),
    (".post_layernorm.", ".ln_post."),
)


def mapping(config: Any) -> list[Entry]:
    """Return an entry for every tensor. `config` is transformers' Qwen3OmniMoeThinkerConfig."""
    entries = [*_tower(config), *_audio(config), *text_entries(config, "model", separate=True)]
    return [replace(entry, hf=tuple(f"thinker.{name}" for name in entry.hf)) for entry in entries]


def _tower(config: Any) -> Iterator[Entry]:
    for entry in tower("visual", ImageTower, config):
        (name,) = entry.hf
        if "merger" in name:
            for ours, theirs in MERGERS:
                name = name.replace(ours, theirs)
        yield replace(entry, hf=(name,))


def _audio(config: Any) -> Iterator[Entry]:
    rows = halved(config.audio_config.num_mel_bins)
    shares = {
        # Each convolution halves time and frequency; one row of the last's outputs is a token.
        f"visual.audio.conv2d{number}.weight": float(rows * 4 ** (CONVOLUTIONS - number))
        for number in range(1, CONVOLUTIONS + 1)
    }
    for entry in tower("audio_tower", _audio_modules, config, names=AUDIO):
        yield replace(entry, share=shares.get(entry.megatron, 1.0))


def _audio_modules(config: Any) -> nn.Module:
    """Return the modules that Qwen3-VL's tower lacks, by their names in `VisionTower`."""
    audio = config.audio_config
    return nn.ModuleDict({"audio": AudioTower(audio), "audio_merger": Projector(audio)})
