"""Towers of Qwen3-Omni's thinker: Qwen3-VL's tower for images and videos, and an audio tower."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megavlm.data.media.audio import ProcessedAudio
from megavlm.data.media.image_processing import ProcessedImage
from megavlm.models.qwen3_omni.audio import AudioTower, Projector
from megavlm.models.qwen3_vl.vision import VisionTower as ImageTower

# Linear layers of Qwen3-VL's mergers, and their names on the hub.
MERGER_LINEARS = {"linear_fc1": "0", "linear_fc2": "2"}


class VisionTower(ImageTower):
    """Tower of Qwen3-VL with an audio tower beside it. The DeepStack levels of audio are zero,
    since the language model adds none to its tokens.
    """

    def __init__(self, hf_config: Any) -> None:
        """Build the towers from transformers' Qwen3OmniMoeThinkerConfig."""
        super().__init__(hf_config)
        self.audio = AudioTower(hf_config.audio_config)
        self.audio_merger = Projector(hf_config.audio_config)

    def projections(self, linear: str) -> tuple[str, ...]:
        if linear.startswith("audio.") and linear.endswith(".qkv"):
            return "q_proj", "k_proj", "v_proj"
        if "merger" in linear and (name := linear.rpartition(".")[2]) in MERGER_LINEARS:
            return (MERGER_LINEARS[name],)
        return super().projections(linear)

    def encode(self, images: Sequence[ProcessedImage]) -> Tensor:
        clips = [image for image in images if isinstance(image, ProcessedAudio)]
        if not clips:
            return super().encode(images)
        device = self.audio.conv_out.weight.device
        heard = self.audio([clip.patches(device) for clip in clips], self.run_block)
        heard = self.audio_merger(heard)
        heard = torch.cat([heard, heard.new_zeros(len(heard), self.num_levels * heard.size(1))], 1)
        seen = [image for image in images if not isinstance(image, ProcessedAudio)]
        shown = super().encode(seen) if seen else heard[:0]
        parts = {
            False: iter(shown.split([image.num_tokens for image in seen])),
            True: iter(heard.split([clip.num_tokens for clip in clips])),
        }
        return torch.cat([next(parts[isinstance(image, ProcessedAudio)]) for image in images])
