"""Audio of prompts: clips are decoded, resampled and turned into log-mel frames. A family decides
how many tokens stand for a clip (`Family.audio`).
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from megavlm.data.media.audio_decoding import decode_audio
from megavlm.data.media.image_processing import (
    CPU,
    Grids,
    ImageCache,
    Medium,
    PatchFormat,
    ProcessedImage,
)


@dataclass(frozen=True, eq=False)
class ProcessedAudio(ProcessedImage):
    """A clip as log-mel frames, `pixels` [F, mel] float32. Records show its spectrogram.

    length: Number of tokens that its features replace.
    """

    medium: ClassVar[Medium] = "audio"

    length: int

    @property
    def grids(self) -> Grids:
        """One token after the other, each as many patches as an image's token."""
        return ((self.length, self.format.merge, self.format.merge),)

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Log-mel frames, their number of values, and the number of tokens."""
        return ((*self.pixels.shape, self.length),)

    def patches(self, device: torch.device = CPU) -> Tensor:
        """Return the tower's input [F, mel] float32 on a device."""
        return self.pixels.to(device, non_blocking=True)

    @property
    def contents(self) -> tuple[Tensor, ...]:
        assert not self.pixels.is_meta, "no frames are left"
        return (self.pixels,)

    @property
    def _picture(self) -> Tensor:
        """The spectrogram [mel, F, 3] uint8, low tones below."""
        # The extractor's values lie between about -1 and 1.5.
        grey = ((self.pixels.t().flip(0) + 1) * 100).clamp(0, 255).to(torch.uint8)
        return grey[..., None].expand(-1, -1, 3).contiguous()


class AudioProcessor:
    """Audio of a family's prompts.

    token_id: The token that a chat template writes for a clip, and that features replace.
    """

    def __init__(
        self,
        token_id: int,
        format_: PatchFormat,
        extractor: Any,
        count_tokens: Callable[[int], int],
        cache: ImageCache,
    ) -> None:
        """Store the arguments. extractor: transformers' WhisperFeatureExtractor. count_tokens:
        Returns the number of tokens of a number of log-mel frames.
        """
        self.token_id = token_id
        self._format, self._extractor, self._count = format_, extractor, count_tokens
        self._cache = cache

    def audio(self, data: bytes) -> ProcessedAudio:
        """Decode and process an encoded clip, or return it from the cache. Raises ValueError as
        `decode_audio` does.
        """
        digest = hashlib.sha256(data).digest()
        processed = self._cache.get(digest)
        if processed is None:
            processed = self._process(self._samples(data), digest)
            self._cache.put(digest, processed)
        assert isinstance(processed, ProcessedAudio)
        return processed

    def prompt_ids(self, num_tokens: int) -> list[int]:
        """Return the tokens of a prompt for a clip of so many tokens."""
        return [self.token_id] * num_tokens

    def prompt_length(self, data: bytes) -> int:
        """Return the number of tokens of a prompt for a clip. It is decoded, because not every
        format stores its length. Raises ValueError as `audio` does.
        """
        return self._count(len(self._samples(data)) // self._extractor.hop_length)

    def _samples(self, data: bytes) -> np.ndarray:
        rate: int = self._extractor.sampling_rate
        samples = decode_audio(data, rate)
        # The reflection at its ends needs half a window.
        if len(samples) <= self._extractor.n_fft // 2:
            raise ValueError(f"a clip of {len(samples) / rate:.3f} s is too short")
        return samples

    def _process(self, samples: np.ndarray, digest: bytes) -> ProcessedAudio:
        made = self._extractor(
            samples,
            sampling_rate=self._extractor.sampling_rate,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        frames = made["input_features"][0].t()[made["attention_mask"][0].bool()].contiguous()
        key = hashlib.sha256(b"audio:" + samples.tobytes()).hexdigest()
        return ProcessedAudio(
            key, frames, self._format, digest=digest, length=self._count(len(frames))
        )
