"""Reads a PEFT folder: adapter_config.json and the pairs in adapter_model.safetensors."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_tools.lora.adapters import Pair, module_name
from checkpoint_tools.lora.peft_config import PeftConfig, Scale, read_peft_config
from checkpoint_tools.safetensors_io import Spec, read_spans
from megavlm.checkpointing.folder import PEFT_CONFIG
from megavlm.models.common.hf_source import open_safetensors
from megavlm.models.common.mapping import Shape

PEFT_TENSORS = "adapter_model.safetensors"
_KEY_PREFIX = "base_model.model."
# Stacks of experts, in the order in which PEFT wraps them: each one around the one before.
STACKS = ("gate_up_proj", "down_proj")
_KEY = re.compile(r"(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
# Number of tensors kept in memory. Some belong to several experts, and each expert reads the whole
# tensor.
_KEPT_TENSORS = 4


@dataclass(frozen=True)
class PeftModule:
    """Adapted module of transformers 5, or adapted parameter: a stack of experts such as
    `...mlp.experts.down_proj`.

    place: prefix of the tensors' names. a, b: dtypes and shapes of A [rank, columns] and
    B [rows, rank]. For a stack of E experts, A is [E * rank, columns] with the rows of each expert
    next to each other, and B is [rows, rank * E] with the columns of each expert at a stride of E.
    """

    name: str
    place: str
    scale: Scale
    a: Spec
    b: Spec
    read: Callable[[], Pair]

    @property
    def is_stack(self) -> bool:
        return self.name.endswith(tuple(f".experts.{stack}" for stack in STACKS))

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def tensors(self) -> Iterator[tuple[str, Spec]]:
        """Yield names and specs of the tensors in the file of a PEFT folder."""
        yield f"{_KEY_PREFIX}{self.place}.lora_A.weight", self.a
        yield f"{_KEY_PREFIX}{self.place}.lora_B.weight", self.b


@dataclass(frozen=True)
class PeftFolder:
    path: Path
    config: PeftConfig
    modules: tuple[PeftModule, ...]


def is_peft_folder(path: Path) -> bool:
    return (path / PEFT_CONFIG).is_file() and not (path / "config.json").is_file()


def is_one_expert(module: PeftModule) -> bool:
    """Return True for the module of one expert, which servers read, and not of a stack."""
    return re.search(r"\.experts\.\d+\.", module.name) is not None


def open_peft(path: Path) -> PeftFolder:
    """Open a PEFT folder.

    Raises ValueError if it is incomplete or damaged, or holds more than pairs (A, B).
    """
    config = read_peft_config(path)
    file = path / PEFT_TENSORS
    if not file.is_file():
        raise ValueError(
            f"{path} has no {PEFT_TENSORS}; pickled adapters (.bin) can run code when read: "
            f"convert them to safetensors."
        )
    source = open_safetensors(file)
    spans = read_spans(file)
    halves: dict[str, dict[str, str]] = {}
    for key in spans:
        match = _KEY.fullmatch(key)
        if match is None:
            raise ValueError(
                f"{file} holds {key}, but it is not part of a pair of LoRA matrices: merge these "
                f"adapters into their model with peft (merge_and_unload) and import that instead."
            )
        pair = halves.setdefault(match[1].removeprefix(_KEY_PREFIX), {})
        if pair.setdefault(match[2], key) != key:
            raise ValueError(f"{file} holds two adapters for {match[1]}: {pair[match[2]]}, {key}.")
    tensor = lru_cache(_KEPT_TENSORS)(source.get_tensor)
    modules: dict[str, PeftModule] = {}
    for place, pair in halves.items():
        if len(pair) < 2:
            raise ValueError(
                f"{file} holds {', '.join(pair.values())} without the other of the pair."
            )
        a, b = (
            Spec(spans[key].dtype, tuple(source.get_slice(key).get_shape()))
            for key in (pair["A"], pair["B"])
        )
        name = _target(place, config)
        scale = config.scale(name)
        # The prefix of a name depends on the class that was adapted; module_name removes it.
        module = PeftModule(
            module_name(name),
            module_name(place),
            scale,
            a,
            b,
            partial(_read, tensor, pair["A"], pair["B"]),
        )
        _check_pair(file, module)
        if (other := modules.setdefault(module.name, module)) is not module:
            raise ValueError(
                f"{file} holds two adapters for {module.name}: {other.place}, {place}."
            )
    if not modules:
        raise ValueError(f"{file} holds no adapters.")
    return PeftFolder(path, config, tuple(modules.values()))


def _read(tensor: Callable[[str], Tensor], a: str, b: str) -> Pair:
    return tensor(a), tensor(b)


def _target(place: str, config: PeftConfig) -> str:
    """Return the module or parameter that tensors with this name adapt. PEFT wraps the adapters of
    several parameters of one module around each other, and only the depth distinguishes them.
    """
    name = re.sub(r"(\.base_layer)+$", "", place)
    if not name.endswith(".experts"):
        return place
    stacks = [stack for stack in STACKS if config.targets_parameter(f"{name}.{stack}")]
    depth = place.count(".base_layer")
    if depth >= len(stacks):
        raise ValueError(
            f"{config.path} names {len(stacks)} stacks of experts in target_parameters, but the "
            f"folder holds {place}."
        )
    return f"{name}.{stacks[::-1][depth]}"


def _check_pair(file: Path, module: PeftModule) -> None:
    """Check that the matrices have the rank of the configuration."""
    rank, a, b = module.scale.rank, module.a.shape, module.b.shape
    fits = len(a) == len(b) == 2 and a[0] == b[1]
    if module.is_stack:
        fits = fits and a[0] % rank == 0
    elif fits:
        fits = a[0] == rank
    if not fits or not (module.a.dtype.is_floating_point and module.b.dtype.is_floating_point):
        raise ValueError(
            f"{file} holds {module.place} with A {_form(module.a)} and B {_form(module.b)}, but "
            f"{PEFT_CONFIG} sets its rank to {rank}."
        )


def _form(spec: Spec) -> str:
    return f"{_dims(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"


def _dims(shape: Shape) -> str:
    return " x ".join(map(str, shape))


def common_dtype(modules: tuple[PeftModule, ...]) -> torch.dtype:
    """Return a dtype that represents the values of all modules exactly."""
    dtype = modules[0].a.dtype
    for module in modules:
        dtype = torch.promote_types(dtype, torch.promote_types(module.a.dtype, module.b.dtype))
    return dtype
