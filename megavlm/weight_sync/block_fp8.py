"""Block FP8, the form in which SGLang's servers store quantised weights: numbers in e4m3, and one
float32 scale for each block of 128 x 128.

SGLang 0.5.23 computes such scales in `per_block_cast_to_fp8` (layers/quantization/fp8_utils.py).
The numbers here are the same, bit by bit. A scale is a power of two, so that a weight is its number
in e4m3 times an exact factor.
"""

import re

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.inference.server_args import FP8_BLOCK as BLOCK

VALUES, SCALES = torch.float8_e4m3fn, torch.float32
SUFFIX = "_scale_inv"  # of the parameter with the scales of another one
LARGEST = 448.0  # of e4m3
LEAST = 1e-4  # a block's largest weight counts as at least this, so that no scale is zero

# The linear layers of the language model but for the output head, routers, gates of shared experts
# and `in_proj_ba` of Gated DeltaNet (see NOT_QUANTISED).
_QUANTISED = re.compile(
    r"(language_model\.)?model\.layers\.\d+\.(.+\.)?"
    r"((qkv_proj|o_proj|gate_up_proj|down_proj|in_proj_qkvz|out_proj)\.weight|w13_weight|w2_weight)"
)


def is_quantised(name: str) -> bool:
    """Return True for a parameter of the server that a quantised one stores in block FP8."""
    return _QUANTISED.fullmatch(name) is not None


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a weight's scales. shape: [..., R, C]."""
    *stack, rows, columns = shape
    return (*stack, -(-rows // BLOCK), -(-columns // BLOCK))


def scales(weight: Tensor) -> Tensor:
    """Return the scales of a weight [R, C]: of each block, the least power of two by which its
    largest number must be divided to fit e4m3.
    """
    largest = _blocks(weight).abs().amax(dim=(1, 3)).float().clamp(min=LEAST)
    # Adding the largest mantissa carries into the exponent of what is no power of two.
    bits = (largest / LARGEST).view(torch.int32) + 0x7FFFFF
    return (bits >> 23 << 23).view(SCALES)


def values(weight: Tensor) -> Tensor:
    """Return the numbers of a weight [R, C] in e4m3, divided by the scales of their blocks."""
    factors = (1.0 / scales(weight))[:, None, :, None]
    scaled = (_blocks(weight) * factors).to(VALUES)
    return scaled.flatten(2).flatten(0, 1)[: weight.shape[0], : weight.shape[1]]


def _blocks(weight: Tensor) -> Tensor:
    """Return a weight [R, C] as [blocks, 128, blocks, 128], padded with zeros."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
