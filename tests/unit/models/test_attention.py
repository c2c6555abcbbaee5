"""Every backend on packs of trees equals separate sequences, outputs and gradients, on all context
ranks together. Where a kernel needs a GPU, it alone is replaced by a written-out one.
"""

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention import flex_attention, varlen

from megavlm.data.packs.packing import make_pack
from megavlm.models.common import attention_backends
from megavlm.models.common.attention import TreeAttention
from megavlm.models.common.attention_backends import BACKENDS, choose_backend
from megavlm.models.common.config import LanguageConfig
from megavlm.models.common.pack_layout import (
    PADDING,
    CausalSequence,
    PackLayout,
    SequenceBatch,
    causal_sequences,
    similar,
)
from megavlm.models.common.rotary import RotaryTables, rotate
from megavlm.parallel import platform
from tests.support import kernels as gpu_kernels
from tests.support.forests import (
    FORESTS,
    Shape,
    forest,
    random_shape,
    separate_sequences,
)
from tests.support.operators import Operators

SCALE, HEAD_DIM = 0.3, 8


def replace_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", gpu_kernels.varlen_attn)
    module: Any = ModuleType("transformer_engine.pytorch")
    module.DotProductAttention = gpu_kernels.DotProductAttention
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GPU kernels replaced; FlexAttention in its plain form, whose gradients it refuses on a CPU
    for want of a compiled one.
    """
    monkeypatch.setattr(gpu_kernels, "DTYPES", {torch.float64})
    replace_kernels(monkeypatch)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    yield
    attention_backends._transformer_engine_attention.cache_clear()


def inputs(num_tokens: int, heads: int, kv_heads: int) -> list[Tensor]:
    """Query, key, value, and the gradient of the output."""
    generator = torch.Generator().manual_seed(num_tokens)
    tensors = [
        torch.randn(num_tokens, n, HEAD_DIM, dtype=torch.float64, generator=generator)
        for n in (heads, kv_heads, kv_heads, heads)
    ]
    return [*(x.requires_grad_() for x in tensors[:3]), tensors[3]]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of numbers of order one."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max()) if ours.numel() else 0.0


def from_separate_sequences(
    name: str, shapes: list[Shape], context_size: int, heads: int = 4, kv_heads: int = 2
) -> float:
    """Return the largest difference of outputs and gradients from those of separate sequences."""
    pack = make_pack(forest(shapes), vision_token_ids=(), multiple=3, context_size=context_size)
    query, key, value, gradient = inputs(pack.num_tokens, heads, kv_heads)
    expected = separate_sequences(shapes, query, key, value, SCALE)
    parts = [pack.part(rank) for rank in range(context_size)]
    outputs = [
        BACKENDS[name](query[part.token_index], key, value, PackLayout.of(part), SCALE)
        for part in parts
    ]
    assert all(len(output) == pack.num_tokens // context_size for output in outputs)
    ours = torch.cat(outputs)[parts[0].gather_index]
    pairs = zip(
        (ours, *torch.autograd.grad(ours, (query, key, value), gradient)),
        (expected, *torch.autograd.grad(expected, (query, key, value), gradient)),
        strict=True,
    )
    return max(difference(x, y) for x, y in pairs)


@pytest.mark.parametrize("context_size", [1, 4])
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shapes", FORESTS.values(), ids=FORESTS)
def test_trees_equal_separate_sequences(
    kernels: None, name: str, shapes: list[Shape], context_size: int
) -> None:
    assert from_separate_sequences(name, shapes, context_size) < 1e-9


@pytest.mark.parametrize("context_size", [1, 4])
@pytest.mark.parametrize("name", ["flash", "transformer_engine"])
@pytest.mark.parametrize("shapes", FORESTS.values(), ids=FORESTS)
def test_kernels_get_what_they_take(
    monkeypatch: pytest.MonkeyPatch, name: str, shapes: list[Shape], context_size: int
) -> None:
    """In bfloat16 they refuse whatever the real ones refuse; the numbers are exact but for the
    rounding of the output.
    """
    replace_kernels(monkeypatch)
    pack = make_pack(forest(shapes), vision_token_ids=(), context_size=context_size)
    query, key, value, _ = (x.detach().bfloat16() for x in inputs(pack.num_tokens, 4, 2))
    expected = separate_sequences(shapes, query, key, value, SCALE)
    for part in (pack.part(rank) for rank in range(context_size)):
        layout = PackLayout.of(part)
        output = BACKENDS[name](query[part.token_index], key, value, layout, SCALE)
        assert output.dtype == torch.bfloat16 and output.equal(expected[part.token_index])
    attention_backends._transformer_engine_attention.cache_clear()


def test_written_out_kernels_have_the_real_signatures() -> None:
    def form(function: Any) -> list[tuple[Any, ...]]:
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters if p.name != "self"]

    # Each torch adds arguments; 2.11 is the oldest.
    theirs = form(varlen.varlen_attn)
    names = {name for name, *_ in theirs}
    assert [x for x in form(gpu_kernels.varlen_attn) if x[0] in names] == theirs
    if not importlib.util.find_spec("transformer_engine"):
        return  # a GPU machine compares the other
    from transformer_engine.pytorch import DotProductAttention

    for method in ("__init__", "forward"):
        ours, theirs = (
            getattr(c, method) for c in (gpu_kernels.DotProductAttention, DotProductAttention)
        )
        assert form(ours) == form(theirs)


@pytest.mark.parametrize("name", BACKENDS)
def test_random_trees_equal_separate_sequences(kernels: None, name: str) -> None:
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        shapes = [random_shape(generator) for _ in range(1 + seed % 3)]
        assert from_separate_sequences(name, shapes, 1 + seed) < 1e-9, seed


@pytest.mark.parametrize("name", BACKENDS)
def test_as_many_key_heads_as_heads(kernels: None, name: str) -> None:
    shapes = FORESTS["two turns"]
    assert from_separate_sequences(name, shapes, 2, heads=3, kv_heads=3) < 1e-9


@pytest.mark.parametrize("name", BACKENDS)
def test_neither_siblings_nor_other_trees_are_seen(kernels: None, name: str) -> None:
    """Their keys and values may be anything, to the last bit."""
    pack = make_pack(forest([[(5, -1), (3, 0), (4, 0)], [(6, -1)]]), vision_token_ids=())
    query, key, value, _ = (x.detach() for x in inputs(pack.num_tokens, 4, 2))
    before = BACKENDS[name](query, key, value, PackLayout.of(pack), SCALE)
    key[8:12], value[8:12] = 50.0, -50.0  # the second response
    after = BACKENDS[name](query, key, value, PackLayout.of(pack), SCALE)
    assert before[:8].equal(after[:8]) and before[12:].equal(after[12:])
    assert not before[8:12].isclose(after[8:12]).any()


def test_what_layers_share_is_made_once(kernels: None) -> None:
    pack = make_pack(forest(FORESTS["two turns"]), vision_token_ids=())
    layout = PackLayout.of(pack)
    query, key, value, _ = inputs(pack.num_tokens, 4, 2)
    made = []
    for _ in range(2):
        for name in BACKENDS:
            BACKENDS[name](query, key, value, layout, SCALE)
        made.append((layout.batches, layout.sequences, layout.block_mask))
    assert all(x is y for x, y in zip(*made, strict=True)) and made[0][2] is not None


def test_batches_are_padded_little() -> None:
    sizes = [(32, 57), (32, 57), (8, 33), (30, 55), (100, 900)]
    assert [*similar([])] == []
    found = list(similar(sizes))
    assert sorted(row for rows in found for row in rows) == list(range(len(sizes)))
    assert [0, 1] in [sorted({0, 1} & {*rows}) for rows in found] and [4] in found
    for rows in found:
        padded = max(sizes[row][0] for row in rows) * max(sizes[row][1] for row in rows)
        assert padded * len(rows) <= PADDING * sum(sizes[row][0] * sizes[row][1] for row in rows)


@pytest.mark.parametrize("name", ["one sequence", "one response"])
def test_a_sequence_needs_neither_mask_nor_gathered_keys(name: str) -> None:
    pack = make_pack(forest(FORESTS[name]), vision_token_ids=())
    layout = PackLayout.of(pack)
    batches, order = layout.batches
    whole = slice(0, pack.num_tokens)
    assert batches == [SequenceBatch(whole, whole, None)] and order is None, "nothing is copied"
    assert layout.sequences.key_index is None and layout.sequences.query_bounds.tolist() == [
        0,
        pack.num_tokens,
    ]


def test_runs_that_go_on_are_one_sequence() -> None:
    pack = make_pack(forest([[(4, -1), (2, 0), (3, 0)], [(5, -1)]]), vision_token_ids=())
    assert causal_sequences(pack.runs, pack.parents, pack.segment_bounds) == [
        CausalSequence(6, ((0, 4), (4, 6))),  # the prompt and its first response
        CausalSequence(3, ((0, 4), (6, 9))),
        CausalSequence(5, ((9, 14),)),
    ]


def test_core_attention_contract() -> None:
    """[t, 1, heads, D] in, [t, 1, heads x D] out; scaled by the head size by default."""
    shapes = FORESTS["several trees"]
    pack = make_pack(forest(shapes), vision_token_ids=())
    attention = TreeAttention(
        LanguageConfig(num_layers=1, hidden_size=32, num_attention_heads=4, kv_channels=HEAD_DIM),
        1,
        AttnMaskType.causal,
        "self",
        cp_comm_type=None,
        pg_collection=SimpleNamespace(cp=SimpleNamespace(size=lambda: 1)),
    )
    query, key, value, _ = inputs(pack.num_tokens, 4, 2)
    output = attention(
        *(x.unsqueeze(1) for x in (query, key, value)), None, packed_seq_params=PackLayout.of(pack)
    )
    assert output.shape == (pack.num_tokens, 1, 4 * HEAD_DIM)
    expected = separate_sequences(shapes, query, key, value, HEAD_DIM**-0.5)
    assert difference(output.view_as(query), expected) < 1e-9


@pytest.mark.parametrize("name", ["flash", "flex", "transformer_engine"])
def test_a_gpu_kernel_is_refused_on_a_cpu(name: str) -> None:
    with pytest.raises(ValueError, match=f"model.attention: {name} needs a GPU; use sdpa"):
        choose_backend(name, torch.bfloat16)


def test_sdpa_runs_anywhere() -> None:
    assert choose_backend("sdpa", torch.float32) is BACKENDS["sdpa"]


def test_choice_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    assert choose_backend("flash", torch.bfloat16) is BACKENDS["flash"]
    assert choose_backend("flex", torch.float32) is BACKENDS["flex"]
    with pytest.raises(ValueError, match=r"model\.attention=flash does not compute in"):
        choose_backend("flash", torch.float32)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="transformer_engine is not installed"):
        choose_backend("transformer_engine", torch.bfloat16)


def turned(angles: int, *, ours: bool) -> tuple[list[Tensor], list[int]]:
    """Return turned queries and keys with their gradients, and the operators of both passes."""
    query, key, _, gradient = inputs(30, 4, 2)
    turns = gradient[:, :1, :angles].detach() * 9
    with Operators() as forward:
        if ours:
            query, key = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key))
            outputs = [*rotate(query, key, RotaryTables(turns.cos(), turns.sin()))]
        else:
            whole = torch.cat([turns, turns], -1)
            outputs = [_apply_rotary_pos_emb_bshd(x, whole) for x in (query, key)]
    with Operators() as backward:
        gradients = torch.autograd.grad(outputs, (query, key), [gradient, gradient[:, :2]])
    return [*outputs, *gradients], [forward.counts.total(), backward.counts.total()]


@pytest.mark.parametrize("angles", [4, 3])
def test_a_rotation_is_megatron_core_s_in_few_operators(angles: int) -> None:
    """Of whole heads, and of the first six of eight dimensions."""
    (expected, many), (found, few) = (turned(angles, ours=ours) for ours in (False, True))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    is_partial = angles < HEAD_DIM // 2
    assert few == [8 + is_partial, 4 + is_partial], "with two copies and two tables"
    assert many[0] > 2 * few[0] and many[1] > 3 * few[1]
