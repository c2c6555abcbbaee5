"""Adapters with the pairs of `lora_reference`: on the chunks of a model, and merged into a folder's
tensors.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from megavlm.config.lora import LoRA
from megavlm.models.common.lora import adapters, add_adapters
from megavlm.models.common.model import VisionLanguageModel
from tests.support.lora_reference import ALPHA, RANK, SCALE, pair, projections
from tests.support.lora_runs import cut, whole_sizes


@torch.no_grad()
def add_pairs(chunks: Iterable[VisionLanguageModel], targets: tuple[str, ...]) -> None:
    for chunk in chunks:
        add_adapters(chunk, LoRA(rank=RANK, alpha=ALPHA, targets=targets))
        for name, layer in adapters(chunk):
            for part, a, b in layer.pairs():
                whole = pair((name, part.name), *whole_sizes(layer, a, b))
                for mine, given in zip((a, b), cut(layer, *whole), strict=True):
                    mine.copy_(given)


def merged(folder: Path, targets: Sequence[str]) -> tuple[dict[str, Tensor], set[str]]:
    """The folder's tensors with scale B A added, and the names of those that it was added to."""
    tensors = load_file(folder / "model.safetensors")
    by_short_name = {name.replace("language_model.", ""): name for name in tensors}
    by_short_name |= {name.removeprefix("model."): name for name in tensors}
    adapted = set()
    for part, projection in projections(AutoConfig.from_pretrained(folder), targets).items():
        name = by_short_name[projection.hf]
        # `projection` sees a stack of experts as transformers holds it in memory
        stacked = projection.expert is not None
        weight = projection.of(tensors[name].transpose(1, 2) if stacked else tensors[name])
        a, b = pair(part, *weight.shape)
        weight += SCALE * b @ a
        adapted.add(name)
    return tensors, adapted
