"""Attention of a vision tower on a CPU, image by image.

SGLang 0.5.23 uses one dense [T, T] mask over the T patches of all images in a batch, so that time
and memory grow with the square of the batch. An image, or a window of an image, attends only to
itself, so one call per segment gives the same result.
"""

from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention import vision
from torch import Tensor

BACKEND = "sdpa"  # the backend that SGLang chooses on a CPU


class SegmentAttention(vision.VisionSdpaAttention):
    """SGLang's own attention, replaced for a flattened batch without a mask of its own."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bsz: int,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the attention output [T, heads, head size]; q, k and v have the same shape.

        cu_seqlens: [S + 1], number of patches before each segment.
        """
        segmented = self.flatten_batch and isinstance(cu_seqlens, Tensor)
        if not segmented or attention_mask is not None or self.softmax_in_single_precision:
            return super().forward(q, k, v, bsz, cu_seqlens, attention_mask, **kwargs)
        assert bsz == 1, "a flattened batch is one sequence"
        assert cu_seqlens is not None and int(cu_seqlens[-1]) == len(q), "segments hold all patches"
        lengths = (end - start for start, end in pairwise(cu_seqlens.tolist()))
        runs = [(length, len(list(equal))) for length, equal in groupby(lengths)]
        # Consecutive segments of equal length are batched in one call.
        parts = [(length, length * count) for length, count in runs if length]
        splits = [tensor.split([size for _, size in parts]) for tensor in (q, k, v)]
        outputs = []
        for (length, _), *qkv in zip(parts, *splits, strict=True):
            q, k, v = (part.unflatten(0, (-1, length)).transpose(1, 2) for part in qkv)
            output = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)


def install(module: Any) -> None:
    """Make SGLang's vision towers use SegmentAttention. module: layers.attention.vision."""
    assert module.QKV_BACKEND_IMPL[BACKEND] is module.VisionSdpaAttention
    module.QKV_BACKEND_IMPL[BACKEND] = SegmentAttention
