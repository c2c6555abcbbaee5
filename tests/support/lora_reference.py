"""A whole model's adapters, by transformers: its projections' weights with scale B A added.

The gradient of a merged weight gives those of its pair: dA = scale B^T dW, dB = scale dW A^T.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megavlm.families import family
from megavlm.models.common.lora_linear import stable_seed
from megavlm.models.common.mapping import short_name
from tests.parity.inputs import inputs_of
from tests.parity.reference import Reference
from tests.parity.table import HEARING

RANK, ALPHA = 3, 4.5
SCALE = ALPHA / RANK

COMPONENTS = {
    "language.attention": r"language_model\..*self_attention\.linear_(qkv|proj)",
    "language.linear_attention": r"language_model\..*self_attention\.(in|out)_proj",
    "language.mlp": r"language_model\.decoder\.layers\.\d+\.mlp\.(shared_experts\.)?linear_fc[12]",
    "language.experts": r"language_model\..*\.mlp\.experts\.experts\.linear_fc[12]",
    "vision.attention": r"visual\.(audio\.)?blocks\.\d+\.attn\..*",
    "vision.mlp": r"visual\.(audio\.)?blocks\.\d+\.mlp\..*",
    "vision.merger": r"visual\.((window_|audio_)?merger|deepstack_merger_list\.\d+)\."
    r"(mlp\.\d|linear_\w*\d|\w*proj\d?|attn\.\w+)",
}
Name = tuple[str, str]  # of an adapted linear and of a projection in it


@dataclass(frozen=True)
class Projection:
    """One HF projection of an adapted linear: all of an HF parameter, or an expert's row of a
    stack, or gate or up in it.
    """

    hf: str
    expert: int | None = None
    half: int | None = None

    def of(self, parameter: Tensor) -> Tensor:
        """Its [rows, columns] of the parameter (or of the parameter's gradient)."""
        matrix = parameter if self.expert is None else parameter[self.expert]
        return matrix if self.half is None else matrix.chunk(2)[self.half]


def projections(config: Any, targets: Sequence[str]) -> dict[Name, Projection]:
    """What `targets` adapt, read off the mapping. transformers stacks experts in memory, gate on
    top of up.
    """
    found: dict[Name, Projection] = {}
    for entry in family(config.model_type).mapping(config):
        path = entry.megatron.removesuffix(".weight")
        if path == entry.megatron or not any(re.fullmatch(COMPONENTS[t], path) for t in targets):
            continue
        if entry.expert is None:
            for hf in entry.hf:
                found[path, hf.split(".")[-2]] = Projection(short_name(hf))
            continue
        path = path.replace("experts.experts", f"experts.{entry.expert}")
        (hf,) = entry.hf
        if "gate_up" in hf:
            found[path, "gate_proj"] = Projection(short_name(hf), entry.expert, half=0)
            found[path, "up_proj"] = Projection(short_name(hf), entry.expert, half=1)
        else:
            found[path, "down_proj"] = Projection(short_name(hf), entry.expert)
    return found


def pair(name: Name, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A [rank, columns] and B [rows, rank] of a projection, the same in every process."""
    generator = torch.Generator().manual_seed(stable_seed("/".join(name)))
    a = torch.randn(RANK, columns, generator=generator) / columns**0.5
    return a, 0.1 * torch.randn(rows, RANK, generator=generator)


def heard(config: Any) -> str:
    """Inputs with audio, for a model with an audio tower."""
    return "audio" if config.model_type in HEARING else "mixed"


def expect(folder: Path, targets: Sequence[str]) -> dict[str, Any]:
    """Logits by sequence and response, and gradients (dA, dB) by adapted linear and projection."""
    reference = Reference(folder)
    parameters = {short_name(name): p for name, p in reference.model.named_parameters()}
    adapted = projections(reference.config, targets)
    with torch.no_grad():
        for weight, a, b, _ in _pairs(adapted, parameters):
            weight += SCALE * b @ a
    cases = inputs_of(folder).sequences(heard(reference.config))
    with torch.no_grad():
        scores = [[reference.scores(case.prompt, r) for r in case.responses] for case in cases]
    reference.gradients(cases)
    gradients = {}
    for _, a, b, (name, projection, parameter) in _pairs(adapted, parameters):
        gradient = projection.of(parameter.grad)
        gradients[name] = (SCALE * b.t() @ gradient, SCALE * gradient @ a.t())
    return {
        "logits": [[score.logits for score in row] for row in scores],
        "gradients": gradients,
    }


def _pairs(
    adapted: dict[Name, Projection], parameters: dict[str, nn.Parameter]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Any]]:
    for name, projection in adapted.items():
        parameter = parameters[projection.hf]
        weight = projection.of(parameter)
        yield weight, *pair(name, *weight.shape), (name, projection, parameter)
