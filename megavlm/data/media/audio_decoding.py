"""Encoded clips of audio from the cells of a column, and their decoding by PyAV, an optional
package.
"""

import struct
from io import BytesIO
from typing import Any

import numpy as np

from megavlm.data.media.image_sources import DataFolder, check_keys, is_url, media_bytes

RATE = 16_000  # samples a second to which a clip is decoded where only its content is checked
FLOAT = 3  # WAV's number for samples in float32

# FFmpeg's readers of files that hold a whole clip. A playlist would name other files and URLs.
FORMATS = "wav,flac,mp3,ogg,mov,matroska,aac"
MAX_SECONDS = 2400  # limit of a clip: 40 minutes, as the released models of Qwen3-Omni take


def decode_audio(data: bytes, rate: int) -> np.ndarray:
    """Decode a clip to one channel of float32 samples between -1 and 1, `rate` a second.

    Raises ValueError for bytes that are not audio in one of FORMATS, and for a clip above
    MAX_SECONDS. Also raises ValueError if PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise ValueError(
            "audio needs PyAV, but it is not installed: pip install 'megavlm[video]'"
        ) from error
    try:
        options = {"format_whitelist": FORMATS}
        with av.open(BytesIO(data), mode="r", options=options) as container:
            if not container.streams.audio:
                raise ValueError("the file has no sound")
            # Channels are averaged here: FFmpeg's mono is louder by up to 3 dB.
            resampler = av.AudioResampler(format="fltp", rate=rate)
            parts, number = [], 0
            for frame in container.decode(container.streams.audio[0]):
                for part in resampler.resample(frame):
                    parts.append(part.to_ndarray().mean(0))
                    number += len(parts[-1])
                if number > MAX_SECONDS * rate:
                    raise ValueError(f"a clip is longer than {MAX_SECONDS} s; cut it in parts")
            parts += [part.to_ndarray().mean(0) for part in resampler.resample(None)]
    except av.FFmpegError as error:
        raise ValueError(
            f"not audio that can be decoded, in one of {FORMATS.replace(',', ', ')} "
            f"({error.strerror})"
        ) from error
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def check_audio(data: bytes) -> None:
    """Raise ValueError for a clip that cannot be decoded."""
    decode_audio(data, RATE)


def audio_bytes(value: Any, folder: DataFolder) -> bytes:
    """Return the encoded clip of a cell, without decoding it: a struct of `array`, samples between
    -1 and 1, and `sampling_rate`, as a WAV file; or a file in any form that an image may have.

    Raises ValueError for anything else.
    """
    if not _has_samples(value):
        return media_bytes(value, folder, "audio")
    check_keys(value, ("array", "sampling_rate", "path"), "audio")
    rate, samples = value.get("sampling_rate"), np.asarray(value["array"], np.float32)
    if not isinstance(rate, int) or rate < 1 or samples.ndim != 1:
        raise ValueError(
            f"a clip of audio has samples of shape {samples.shape} and sampling_rate={rate!r}; it "
            "must have one channel, and a whole number of samples a second"
        )
    header = struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + samples.nbytes, b"WAVE", b"fmt ", 16, FLOAT, 1, rate,
        4 * rate, 4, 32, b"data", samples.nbytes,
    )  # fmt: skip
    return header + samples.tobytes()


def is_fetched_audio(value: object) -> bool:
    """Return True if the clip of a cell must be fetched over http(s). Raises ValueError as `is_url`
    does.
    """
    return not _has_samples(value) and is_url(value, "audio")


def _has_samples(value: object) -> bool:
    return isinstance(value, dict) and value.get("array") is not None
