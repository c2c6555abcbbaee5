"""Images of noise, and both processors of a model folder, each made once."""

import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from megavlm.data.processor import Processor, Prompt
from megavlm.families import family_of
from megavlm.model_config import model_config
from megavlm.parallel.torchvision_ops import define_torchvision_operators
from tests.conftest import DATA


def encode(image: Image.Image, format_: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format_, **options)
    return file.getvalue()


def image(size: tuple[int, int], mode: str = "RGB", seed: int = 0, **options: object) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    format_ = "JPEG" if mode == "CMYK" else "PNG"
    return encode(Image.fromarray(noise).convert(mode), format_, **options)


@cache
def auto_processor(folder: Path) -> Any:
    define_torchvision_operators()
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder)


def chat_text(folder: Path, question: str) -> str:
    """The prompt of a question, with the template's own marks of images, videos and audio."""
    parts = [part for part in re.split("(<image>|<video>|<audio>)", question) if part]
    content = [
        {"type": part[1:-1]} if re.fullmatch("<[a-z]+>", part) else {"type": "text", "text": part}
        for part in parts
    ]
    text: str = auto_processor(folder).apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    return text


@cache
def our_processor(folder: Path) -> Processor:
    return Processor(folder, DATA, family_of(folder))


def pixel_values(folder: Path, prompt: Prompt) -> Tensor:
    """Images of a prompt as transformers' processor returns them: patches, or whole tiles."""
    config = model_config(folder)
    inputs: dict[str, Tensor] = family_of(folder).model_inputs(
        config, prompt.token_ids, prompt.positions, prompt.images
    )
    return inputs["pixel_values"]
