"""Core attention over context ranks equals one rank: outputs, and gradients of query, key and
value.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType

from megavlm.data.packs.packing import make_pack
from megavlm.models.common.attention import TreeAttention
from megavlm.models.common.config import LanguageConfig
from megavlm.models.common.pack_layout import PackLayout
from tests.support.forests import FORESTS, forest
from tests.support.fork import launch

pytestmark = pytest.mark.distributed
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
# A prompt and responses, two turns of branches, segments with fewer tokens than there are chunks.
SHAPES = [
    [(40, -1), (13, 0), (9, 0), (3, 0)],
    *FORESTS["two turns"],
    *FORESTS["single tokens"],
]
MULTIPLE = 24  # so that the pack is the same for every number of ranks


def attend(context_size: int, tensor_size: int) -> tuple[torch.Tensor, ...]:
    """This rank's heads of this rank's tokens: pack index of the tokens, output, and gradients of
    query, key and value.
    """
    tensor_rank = dist.get_rank() % tensor_size
    groups = [
        dist.new_group(list(range(first, dist.get_world_size(), tensor_size)))
        for first in range(tensor_size)
    ]
    group = groups[tensor_rank]
    config = LanguageConfig(
        num_layers=1,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        context_parallel_size=context_size,
        tensor_model_parallel_size=tensor_size,
    )
    attention = TreeAttention(
        config, 1, AttnMaskType.causal, "self", pg_collection=SimpleNamespace(cp=group)
    )
    multiple = MULTIPLE // context_size
    pack = make_pack(
        forest(SHAPES), vision_token_ids=(), multiple=multiple, context_size=context_size
    )
    part = pack.part(group.rank())
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS):
        whole = torch.randn(pack.num_tokens, 1, heads, HEAD_DIM, generator=generator)
        mine = slice(tensor_rank * heads // tensor_size, (tensor_rank + 1) * heads // tensor_size)
        tensors.append(whole[part.token_index, :, mine])
    *inputs, gradient = tensors
    for x in inputs:
        x.requires_grad_()
    output = attention(*inputs, None, packed_seq_params=PackLayout.of(part)).view_as(gradient)
    return part.token_index, output, *torch.autograd.grad(output, inputs, gradient)


def whole(ranks: list[tuple[np.ndarray, ...]], tensor_size: int) -> list[np.ndarray]:
    """Output and gradients of all tokens and heads, in pack order."""
    per_tensor_rank = []
    for tensor_rank in range(tensor_size):
        mine = ranks[tensor_rank::tensor_size]
        order = np.argsort(np.concatenate([index for index, *_ in mine]))
        per_tensor_rank.append(
            [np.concatenate(x)[order] for x in list(zip(*mine, strict=True))[1:]]
        )
    return [np.concatenate(x, axis=2) for x in zip(*per_tensor_rank, strict=True)]


@pytest.mark.parametrize(("context_size", "tensor_size"), [(2, 1), (4, 1), (2, 2)])
def test_context_ranks_equal_one(context_size: int, tensor_size: int) -> None:
    expected = whole(launch(1, attend, 1, 1), 1)
    ours = whole(launch(context_size * tensor_size, attend, context_size, tensor_size), tensor_size)
    for name, x, y in zip(("output", "query", "key", "value"), ours, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6 * np.abs(y).max(), err_msg=name)
