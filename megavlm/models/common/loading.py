"""Loading of HuggingFace weights: the source is checked against a mapping, and each rank copies its
slices.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megavlm.families import UNTRAINED
from megavlm.models.common.hf_source import HFFolder, StateDict
from megavlm.models.common.mapping import Entry, Shape, shard_tensor, short_name
from megavlm.parallel.mesh import Mesh

Form = Literal["hub", "memory"]
HUB: Form = "hub"
MEMORY: Form = "memory"

EMBEDDING = "model.embed_tokens.weight"  # a short name
HEAD = "lm_head.weight"

# The critic's value head is not loaded: HF models have none, and it starts at zero.
VALUE_HEAD = "value_head."


class HubTensors:
    """Source of HF tensors, checked against a mapping's names and shapes.

    Names. Hub files of Qwen2-VL and Qwen2.5-VL have `visual.*` and `model.layers.*`. Hub files of
    Qwen3-VL, and models of transformers 5 in memory, have `model.visual.*` and
    `model.language_model.layers.*`. Both are read.

    Experts. They have one of three forms:

    - HUB: stacked as in hub files of Qwen3-VL, `gate_up_proj` [E, H, 2I] and `down_proj` [E, I, H].
    - MEMORY: stacked as in models of transformers 5 in memory, [E, 2I, H] and [E, H, I]. Hub files
      of Qwen3.5, and folders of Qwen3-VL that transformers 5 saved, have this form, too.
    - Separate: one tensor per expert, `experts.3.gate_proj.weight` [I, H], as in hub files of
      GLM-4.6V. Names show this form.

    `form` tells HUB and MEMORY apart; None infers it from the shapes. At least one of the two
    stacks is not square, so that a wrong form is always detected, and refused.
    """

    def __init__(
        self, entries: Sequence[Entry], source: Mapping[str, Tensor], form: Form | None = HUB
    ) -> None:
        """Check the source. Raises ValueError with the name of a tensor that is missing, unknown,
        or of another shape.
        """
        self._source = source if isinstance(source, HFFolder) else StateDict(source)
        self._names: dict[str, str] = {}  # short name -> name in the source
        mapped = {name.split(".")[0] for entry in entries for name in entry.hf}
        left_out = tuple(prefix for prefix in UNTRAINED if prefix[:-1] not in mapped)
        for name in source:
            if name.startswith(left_out):
                continue
            other = self._names.setdefault(short_name(name), name)
            if other != name:
                raise ValueError(
                    f"{self._source} holds one tensor under two names: {other} and {name}."
                )
        found = (re.match(r"(.+\.experts)\.\d+\.", name) for name in self._names)
        self._unstacked = {match[1] for match in found if match}
        self._check_names(entries)
        self.form: Form = form or self._form_of(entries)
        for entry in entries:
            self._check_shapes(entry)

    def read(self, entry: Entry) -> Tensor:
        """Read the full Megatron tensor of an entry. If experts are stacked, only this entry's
        expert is read.
        """
        if entry.expert is None:
            return entry.to_megatron([self._source[self._names[short_name(x)]] for x in entry.hf])
        return entry.to_megatron([self._expert(entry, x, entry.expert) for x in entry.hf])

    def dtype(self, entries: Iterable[Entry]) -> torch.dtype:
        """Return the dtype of the source tensors of one key's entries. Raises ValueError if their
        dtypes differ.
        """
        names = {self._names[short]: None for entry in entries for short in self._parts(entry)}
        dtypes = {self._source.dtype(name) for name in names}
        if len(dtypes) > 1:
            raise ValueError(f"{', '.join(names)} make one tensor, but have different dtypes.")
        return dtypes.pop()

    def _expert(self, entry: Entry, stack: str, expert: int) -> Tensor:
        """Read one expert's row of a stack, in the HUB form."""
        if self._is_stacked(stack):
            row = self._source.row(self._names[short_name(stack)], expert)
            is_hub = self.form == HUB
        else:
            ones = _one_expert(short_name(stack), expert)
            row, is_hub = torch.cat([self._source[self._names[name]] for name in ones]), False
        return row.t() if entry.transposed and not is_hub else row

    def _is_stacked(self, stack: str) -> bool:
        short = short_name(stack)
        return short in self._names or short.rpartition(".")[0] not in self._unstacked

    def _parts(self, entry: Entry) -> list[str]:
        """Return the short names of the source tensors that an entry is made of."""
        parts: list[str] = []
        for name in entry.hf:
            if entry.expert is None or self._is_stacked(name):
                parts.append(short_name(name))
            else:
                parts += _one_expert(short_name(name), entry.expert)
        return parts

    def _check_names(self, entries: Sequence[Entry]) -> None:
        hub = {short_name(name): name for entry in entries for name in entry.hf}
        expected = {
            short: hub.get(short, short) for entry in entries for short in self._parts(entry)
        }
        missing = [name for short, name in expected.items() if short not in self._names]
        if missing:
            raise ValueError(
                f"{self._source} has no tensor {missing[0]}{_and_more(missing)}, "
                f"but its config.json needs it."
            )
        unknown = [name for short, name in self._names.items() if short not in expected]
        if HEAD in unknown:  # tied embeddings, written twice
            self._check_tied()
            unknown.remove(HEAD)
        if unknown:
            raise ValueError(
                f"{unknown[0]}{_and_more(unknown)} in {self._source.where(unknown[0])} is not a "
                f"tensor of the model that its config.json describes."
            )

    def _check_tied(self) -> None:
        if has_own_head(self._source):
            raise ValueError(
                f"{HEAD} in {self._source.where(HEAD)} differs from "
                f"{self._names[EMBEDDING]}, but config.json ties them: set tie_word_embeddings to "
                f"false, in text_config too, or remove {HEAD}."
            )

    def _check_shapes(self, entry: Entry) -> None:
        for name, shape in zip(entry.hf, entry.hf_shapes, strict=True):
            if entry.expert is None:
                self._check_shape(short_name(name), shape)
            elif not self._is_stacked(name):
                _, rows, columns = stack_shape(entry, shape, MEMORY)
                ones = _one_expert(short_name(name), entry.expert)
                for one in ones:
                    self._check_shape(one, (rows // len(ones), columns))
            elif entry.expert == 0:
                forms = {form: stack_shape(entry, shape, form) for form in (HUB, MEMORY)}
                self._check_stack(self._names[short_name(name)], forms)

    def _form_of(self, entries: Iterable[Entry]) -> Form:
        """Return MEMORY if the shapes of all stacks have this form, else HUB."""
        stacks = [
            self._source.shape(self._names[short_name(name)]) == stack_shape(entry, shape, MEMORY)
            for entry in entries
            if entry.expert == 0 and entry.transposed
            for name, shape in zip(entry.hf, entry.hf_shapes, strict=True)
            if self._is_stacked(name)
        ]
        return MEMORY if stacks and all(stacks) else HUB

    def _check_shape(self, short: str, expected: Shape) -> None:
        name = self._names[short]
        if self._source.shape(name) != expected:
            raise ValueError(
                f"{name} in {self._source.where(name)} has shape {self._source.shape(name)}; "
                f"config.json makes it {expected}."
            )

    def _check_stack(self, name: str, forms: dict[Form, Shape]) -> None:
        shape = self._source.shape(name)
        if shape == forms[self.form]:
            return
        others = [form for form in forms if forms[form] == shape]
        hint = (
            f" That is the form of megavlm-convert import --experts {others[0]}." if others else ""
        )
        raise ValueError(
            f"{name} in {self._source.where(name)} has shape {shape}; "
            f"config.json makes it {forms[self.form]}.{hint}"
        )


def has_own_head(source: Mapping[str, Tensor]) -> bool:
    """Return True if the source has an embedding and a head that differs from it."""
    names = {short_name(name): name for name in source}
    if not {EMBEDDING, HEAD} <= names.keys():
        return False
    return not torch.equal(source[names[HEAD]], source[names[EMBEDDING]])


@dataclass(frozen=True)
class LocalTensor:
    """Tensor of the model on this rank. `key` and `expert` identify its entry.

    key: Key of the sharded state dict.
    expert: For a tensor of an expert, the expert's number in the whole model.
    """

    key: str
    expert: int | None
    data: Tensor


@torch.no_grad()
def load_hf(
    model: MegatronModule,
    entries: Sequence[Entry],
    source: Mapping[str, Tensor],
    mesh: Mesh,
    form: Form = HUB,
) -> None:
    """Copy this rank's slices of HF tensors into the model's tensors, in place, in the model's
    dtype.

    entries: The mapping of the whole model. Each tensor of `model.sharded_state_dict()` must have
        an entry; a pipeline stage holds only some of the entries' tensors.
    source: An HFFolder or a state dict.
    form: Form of stacked experts, as in HubTensors.

    A value head is not changed. Raises ValueError with the name of a tensor that is missing,
    unknown, or of another shape.
    """
    tensors = HubTensors(entries, source, form)
    table = {(entry.megatron, entry.expert): entry for entry in entries}
    for target in local_tensors(model):
        if target.key.startswith(VALUE_HEAD):
            continue
        entry = table.get((target.key, target.expert))
        assert entry is not None, f"the mapping has no entry for the model's {target.key}"
        shard = shard_tensor(entry, tensors.read(entry), *mesh.place(entry.shard.axis))
        if shard.shape != target.data.shape:
            raise ValueError(
                f"{target.key}: the model holds {tuple(target.data.shape)} on this rank, "
                f"and {', '.join(entry.hf)} give {tuple(shard.shape)}."
            )
        target.data.copy_(shard)


def local_tensors(model: MegatronModule) -> list[LocalTensor]:
    """Return the model's tensors on this rank.

    `_extra_state` objects (Transformer Engine's fp8 states) are left out, since HF has none.
    """
    # With non_homogeneous_layers each layer has its own keys; otherwise layers would be stacked.
    state = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    return [
        LocalTensor(value.key, _expert_number(value), value.data)
        for value in state.values()
        if isinstance(value, ShardedTensor | ShardedTensorFactory)
    ]


def _expert_number(value: ShardedTensor | ShardedTensorFactory) -> int | None:
    """Return the expert's number, or None for a tensor that is not an expert's. megatron-core
    stacks experts, and nothing else, along a prepended axis.
    """
    tensor = value.build()[0] if isinstance(value, ShardedTensorFactory) else value
    return tensor.global_offset[0] if tensor.prepend_axis_num else None


def stack_shape(entry: Entry, shape: Shape, form: Form) -> Shape:
    """Return the shape that a stack of the entry has in `form`. `shape` is its shape on the hub."""
    if form == HUB or not entry.transposed:
        return shape
    count, rows, columns = shape
    return count, columns, rows


def written_shapes(entry: Entry, form: Form) -> dict[str, Shape]:
    """Return the names and shapes of an entry's tensors in files of `form`: hub files of some
    families hold each expert's tensors separately.
    """
    shapes = {
        name: stack_shape(entry, shape, form)
        for name, shape in zip(entry.hf, entry.hf_shapes, strict=True)
    }
    if not (entry.separate and form == HUB):
        return shapes
    assert entry.expert is not None and not entry.transposed
    separate: dict[str, Shape] = {}
    for stack, (_, rows, columns) in shapes.items():
        ones = _one_expert(stack, entry.expert)
        separate |= dict.fromkeys(ones, (rows // len(ones), columns))
    return separate


def _one_expert(stack: str, expert: int) -> list[str]:
    """Return the names of one expert's tensors if experts are not stacked."""
    layer, _, kind = stack.rpartition(".")
    projections = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    return [f"{layer}.{expert}.{projection}.weight" for projection in projections]


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
