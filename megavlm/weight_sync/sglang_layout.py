"""Layout of an SGLang server's own parameters: their names, the HF tensors fused into them, and the
slice that each rank stores.

All functions are pure; tensors on the meta device give the shapes without using memory. The rules
follow the weight loaders in sglang 0.5.23 (models, layers/linear.py,
layers/vocab_parallel_embedding.py and layers/moe/fused_moe_triton/layer.py). A weight update
compares checksums with the running server, so a release with other rules is detected. Not covered:
MoE kernels that store their weights shuffled.

Shapes: E experts, H hidden size, I an expert's intermediate size.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.models.common.mapping import short_name
from megavlm.weight_sync.block_fp8 import is_quantised

VOCAB_MULTIPLE = 64  # embedding, head and learned positions are padded to it with zero rows
CPU_FFN_MULTIPLE = 32  # for each rank's width (configs/update_config.py)
VISION_MULTIPLE = 8  # the width of a gated vision MLP is padded to it, too
# Fused parameter -> its HF parts, in order.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
# HF name of a stack of experts -> SGLang's name.
EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
PADDED = re.compile(r"(model\.embed_tokens|lm_head|visual\.pos_embed)\.weight")
# A piece of a stack of experts: "NAME[first:end/number of experts]". A server's rank gets it as
# "NAME[first:end]", the rows within the rank's own stack.
PIECE = re.compile(r"(.+)\[(\d+):(\d+)/(\d+)\]")
# Linears that are sharded over ranks by output, and by input; the latter keep their bias whole.
OUTPUT_CUT = re.compile(
    r"visual\..*(mlp\.fc1|linear_fc1|merger(_list\.\d+)?\.mlp\.0)\.(weight|bias)"
    r"|(vision_tower\..*(mlp\.fc1|linear_1)|merger\..*linear_1)\.(weight|bias)"
    r"|audio_tower\..*\.fc1\.(weight|bias)"
    r"|model\.layers\.\d+\.linear_attn\.(A_log|dt_bias)"
)
AUDIO = "audio_tower."
TOWER = ("visual.", "vision_tower.", AUDIO)
# The last linear layers of a tower's attention.
TOWER_OUTPUT = (
    ".attn.proj.weight",
    ".attention.projection_layer.weight",
    ".self_attn.out_proj.weight",
)
INPUT_CUT = re.compile(
    r"(model|mtp)\.layers\.\d+\.((self_attn\.)?o_proj|linear_attn\.out_proj)\.weight"
    r"|(model|mtp)\.layers\.\d+\.mlp\.(shared_experts?\.)?down_proj\.weight"
    r"|visual\..*(attn\.proj|down_proj|mlp\.fc2|linear_fc2|merger(_list\.\d+)?\.mlp\.2)\.weight"
    r"|vision_tower\..*(attention\.projection_layer|self_attn\.out_proj|mlp\.fc2)\.weight"
    r"|(vision_tower|merger)\..*linear_2\.weight"
    r"|audio_tower\..*(self_attn\.out_proj|fc2)\.weight"
)


@dataclass(frozen=True)
class ServerLayout:
    """Layout of a server's weights over its ranks.

    expert_parallel: Number of groups of ranks that hold different experts; each expert is sharded
    over the ranks of its group. num_kv_heads: Key-value heads of the language model; ranks share a
    head if there are fewer heads than ranks. tied_embeddings: True if HF's files have no output
    head. linear_rows: Result of `linear_rows`. A model with Gated DeltaNet has no separate
    attention module in SGLang, and its stacks of experts in HF are not transposed. on_cpu: True for
    a CPU server, where SGLang pads the width of experts and of the MLPs of the language model and
    of an audio tower. whole_experts: True if its MoE kernels store experts in another order, so
    that the model's own loader must take whole ones. fp8: True if the weights of language layers
    are stored in block FP8. vision_head_dim: Size of an attention head of the vision tower; if
    ranks do not divide the heads, SGLang adds heads of zeros. audio_head_dim: The same of an audio
    tower. names: Result of the family's `server_names`.
    """

    tensor_parallel: int = 1
    expert_parallel: int = 1
    num_kv_heads: int = 1
    tied_embeddings: bool = False
    linear_rows: tuple[int, int] | None = None
    on_cpu: bool = False
    whole_experts: bool = False
    fp8: bool = False
    vision_head_dim: int = 1
    audio_head_dim: int = 1
    names: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        assert self.tensor_parallel % self.expert_parallel == 0, "SGLang refuses such a server"
        assert not (self.fp8 and self.whole_experts), "no loader takes quantised experts"

    def is_fp8(self, name: str) -> bool:
        """Return True for a parameter that is stored in block FP8."""
        return self.fp8 and is_quantised(name)

    def renamed(self, stored: str) -> str:
        """Return the server's name of a parameter of the family."""
        for pattern, name in self.names:
            stored = re.sub(pattern, name, stored)
        return stored

    def head_dim(self, name: str) -> int:
        """Return the size of an attention head of the tower that holds a tensor."""
        return self.audio_head_dim if name.startswith(AUDIO) else self.vision_head_dim

    @property
    def ffn_multiple(self) -> int:
        return CPU_FFN_MULTIPLE * self.tensor_parallel if self.on_cpu else 1

    @property
    def expert_tensor(self) -> int:
        return self.tensor_parallel // self.expert_parallel


def piece_name(stack: str, experts: Sequence[int], count: int) -> str:
    """Return the name of a piece: consecutive experts of a stack of `count` experts."""
    return f"{stack}[{experts[0]}:{experts[-1] + 1}/{count}]"


def begins_tensor(name: str) -> bool:
    """Return False for the second and later pieces of a stack of experts."""
    match = PIECE.fullmatch(name)
    return match is None or match[2] == "0"


def linear_rows(text: Any) -> tuple[int, int] | None:
    """Return the number of rows of Gated DeltaNet's keys (its queries have the same number) and of
    its values; None for a model without it. text: The text_config of transformers.
    """
    if getattr(text, "linear_num_key_heads", None) is None:
        return None
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    return keys, text.linear_num_value_heads * text.linear_value_head_dim


def vision_head_dim(vision: Any) -> int:
    """Return the size of an attention head of the tower. vision: The vision_config of
    transformers.
    """
    heads = getattr(vision, "num_heads", None) or vision.num_attention_heads
    size: int = getattr(vision, "embed_dim", None) or vision.hidden_size
    return size // heads


def audio_head_dim(hf_config: Any) -> int:
    """Return the size of an attention head of the audio tower, 1 without one."""
    audio = getattr(hf_config, "audio_config", None)
    return 1 if audio is None else audio.d_model // audio.encoder_attention_heads


def parameter_name(hf_name: str, layout: ServerLayout | None = None) -> str:
    """Return the name of the server's parameter that contains an HF tensor. Without a layout the
    name may differ from the server's, but the parts of one parameter still share it.
    """
    stored = _stored_name(hf_name, layout)
    return stored if layout is None else layout.renamed(stored)


def _stored_name(hf_name: str, layout: ServerLayout | None) -> str:
    """Return the name as in `parameter_name`, of families whose layers SGLang names as HF does."""
    name = short_name(hf_name.partition("[")[0])
    if layout is not None and layout.linear_rows and not name.startswith(TOWER):
        name = name.replace(".self_attn.", ".")
    module, _, kind = name.rpartition(".")
    parent, _, leaf = module.rpartition(".")
    if leaf == "experts":
        return f"{module}.{EXPERTS[kind]}"
    if leaf == "qkv":  # the tower's, which HF fuses too
        return f"{parent}.qkv_proj.{kind}"
    fused = next((fused for fused, parts in FUSED.items() if leaf in parts), None)
    return f"{parent}.{fused}.{kind}" if fused else name


def is_expert(stored: str) -> bool:
    """Return True for a stack of experts. Kernels on a GPU may store its rows in another order."""
    return stored.endswith((".w13_weight", ".w2_weight"))


def hub_tensors(hf_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield HF tensors in the form that SGLang's own loader accepts. Experts come one by one, under
    the names that hub files of text models use, because the loader does not accept a piece of a
    stack.
    """
    for name, tensor in hf_tensors:
        if (match := PIECE.fullmatch(name)) is None:
            yield name, tensor
            continue
        module, _, kind = match[1].rpartition(".")
        for expert, row in enumerate(tensor.transpose(1, 2), int(match[2])):
            leaves = FUSED.get(kind, (kind,))
            for leaf, part in zip(leaves, row.chunk(len(leaves)), strict=True):
                yield f"{module}.{expert}.{leaf}.weight", part


def server_tensors(
    hf_tensors: Mapping[str, Tensor], layout: ServerLayout, rank: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and slices of the parameters that rank `rank` of a server stores of these HF
    tensors.

    Parts of one fused parameter must come together, as in one mapping entry; pieces of a stack of
    experts need not. Tensors are views unless parts are joined or padded.
    """
    for stored, tensor in _stored_tensors(hf_tensors, layout, rank):
        yield layout.renamed(stored), tensor


def _stored_tensors(
    hf_tensors: Mapping[str, Tensor], layout: ServerLayout, rank: int
) -> Iterator[tuple[str, Tensor]]:
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for hf_name, tensor in hf_tensors.items():
        name = _stored_name(hf_name, layout)
        groups.setdefault(name, []).append((short_name(hf_name), tensor))
    size = layout.tensor_parallel
    for stored, parts in groups.items():
        name, tensor = parts[0]
        if len(parts) > 1 and not is_expert(stored):
            leaves = {name.split(".")[-2]: tensor for name, tensor in parts}
            fused = FUSED[stored.split(".")[-2]]
            yield stored, _fused(stored, [leaves[leaf] for leaf in fused], layout, rank)
        elif ".experts." in name:
            for piece, experts in parts:
                yield from _experts(stored, piece, experts, layout, rank)
        elif name.endswith(".gate_up_proj.weight"):  # HF fuses them, too
            yield stored, _fused(stored, [*tensor.chunk(2)], layout, rank)
        elif ".attn.qkv." in name:  # the tower has as many key heads as query heads
            heads = layout.vision_head_dim * size
            yield stored, _cut([_pad(part, heads) for part in tensor.chunk(3)], rank, size)
        elif PADDED.fullmatch(name):
            yield name, _pad(tensor, _vocab_multiple(len(tensor), size)).chunk(size)[rank]
        elif name.endswith(".linear_attn.conv1d.weight"):
            yield name, _cut(_linear_parts(tensor, layout), rank, size)
        elif OUTPUT_CUT.fullmatch(name):
            if name.startswith(AUDIO):
                tensor = _pad(tensor, layout.ffn_multiple)
            yield name, tensor.chunk(size)[rank]
        elif INPUT_CUT.fullmatch(name):
            if ".down_proj." in name or (name.startswith(AUDIO) and ".fc2." in name):
                tensor = _pad(tensor, _ffn_multiple(name, layout), dim=1)
            elif name.endswith(TOWER_OUTPUT):
                tensor = _pad(tensor, layout.head_dim(name) * size, dim=1)
            yield stored, tensor.chunk(size, dim=1)[rank]
        elif name.startswith(TOWER) and name.endswith((".q_norm.weight", ".k_norm.weight")):
            yield stored, _pad(tensor, layout.vision_head_dim * size)  # over all heads together
        else:
            yield stored, tensor


def _fused(name: str, parts: list[Tensor], layout: ServerLayout, rank: int) -> Tensor:
    size = layout.tensor_parallel
    if ".gate_up_proj." in name:
        multiple = _ffn_multiple(name, layout)
        return _cut([_pad(part, multiple) for part in parts], rank, size)
    if ".in_proj_qkvz." in name:
        return _cut([*_linear_parts(parts[0], layout), *parts[1:]], rank, size)
    if ".in_proj_ba." in name:
        return _cut(parts, rank, size)
    if name.startswith(TOWER):  # with as many key heads as query heads
        return _cut([_pad(part, layout.head_dim(name) * size) for part in parts], rank, size)
    query, *others = parts
    heads = min(layout.num_kv_heads, size)
    place = rank * heads // size
    return torch.cat([query.chunk(size)[rank], *(part.chunk(heads)[place] for part in others)])


def _experts(
    stored: str, name: str, stack: Tensor, layout: ServerLayout, rank: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield gate_up_proj [E, H, 2I] as [E, 2I, H], gate above up, or down_proj [E, I, H] as [E, H,
    I]; for a piece of the stack only the rows that the rank stores, if any. Whole stacks of a model
    with Gated DeltaNet already have that form.

    An expert is sharded over consecutive ranks, and these groups of ranks hold the experts in
    order.
    """
    match = PIECE.fullmatch(name)
    first, end, count = map(int, match.groups()[1:]) if match else (0, len(stack), len(stack))
    mine = count // layout.expert_parallel
    start = rank // layout.expert_tensor * mine  # the first expert of this rank
    low, high = max(first, start), min(end, start + mine)
    if low >= high:
        return
    rows = stack[low - first : high - first]
    if match or layout.linear_rows is None:
        rows = rows.transpose(1, 2)
    stored = f"{stored}[{low - start}:{high - start}]" if match else stored
    place, size = rank % layout.expert_tensor, layout.expert_tensor
    if stored.partition("[")[0].endswith(EXPERTS["down_proj"]):
        yield stored, _pad(rows, layout.ffn_multiple, dim=2).chunk(size, dim=2)[place]
    elif size == 1 and rows.shape[1] // 2 % layout.ffn_multiple == 0:
        yield stored, rows
    else:
        halves = [_pad(half, layout.ffn_multiple, dim=1) for half in rows.chunk(2, dim=1)]
        yield stored, _cut(halves, place, size, dim=1)


def _linear_parts(tensor: Tensor, layout: ServerLayout) -> list[Tensor]:
    """Split a tensor [keys + keys + values, ...] into Gated DeltaNet's queries, keys and values."""
    assert layout.linear_rows is not None, "the layout is of a model without Gated DeltaNet"
    keys, values = layout.linear_rows
    return list(tensor.split([keys, keys, values]))


def _ffn_multiple(name: str, layout: ServerLayout) -> int:
    return VISION_MULTIPLE if name.startswith("visual.") else layout.ffn_multiple


def _cut(parts: Sequence[Tensor], rank: int, size: int, dim: int = 0) -> Tensor:
    return torch.cat([part.chunk(size, dim)[rank] for part in parts], dim)


def _vocab_multiple(rows: int, size: int) -> int:
    padded = rows + -rows % VOCAB_MULTIPLE
    return VOCAB_MULTIPLE * (size if padded % size else 1)


def _pad(tensor: Tensor, multiple: int, dim: int = 0) -> Tensor:
    """Pad with zeros at the end of `dim`, up to a multiple of `multiple`."""
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return tensor
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing])
