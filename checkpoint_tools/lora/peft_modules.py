"""Conversion between adapters of projections and the modules of PEFT.

A linear is a module in both formats. transformers 5 stacks experts into parameters, gate above up,
so PEFT has one pair of twice the rank for both:

    A = [A of gate; A of up]        B = [B of gate, 0; 0, B of up]

On import, pairs of this form are split again. For any other pair, gate and up both get the whole A.
Modules of single experts (`...mlp.experts.3.gate_proj`), as before transformers 5, are read and
written as well.

A checkpoint has one rank R and one scale for all modules. Modules with other values are converted
exactly: A and B are padded with zeros up to R, the largest rank, and training leaves the zeros
unchanged; B is multiplied by the ratio of the scales. A ratio that is a power of two is exact in
bf16 and fp32, but not in fp16, whose range of exponents is too small. With any other ratio, and in
fp16 with any ratio but 1, the adapters become fp32, so that B is rounded once, to fp32. The common
scale is positive, as in a recipe: a negative scale changes the sign of B.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import groupby
from math import copysign, frexp, sqrt
from statistics import mode

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint_tools.lora.adapters import AdapterPairs, Pair, Projection, module_name
from checkpoint_tools.lora.peft_config import Scale
from checkpoint_tools.lora.peft_folder import PeftFolder, PeftModule, common_dtype
from checkpoint_tools.safetensors_io import Spec

Split = Callable[[Tensor, Tensor], Pair]


def to_modules(adapters: AdapterPairs, *, separate: bool = False) -> list[PeftModule]:
    """Return the PEFT modules of adapters, for transformers 5. Tensors are read on access.

    separate: A module for each expert's projection, as servers read them, and not one for a stack.
    """
    if separate:
        return [_linear(adapters, projection) for projection in adapters.projections()]
    modules = []
    stacks = {_stack(projection) for projection in adapters.projections()}
    for projections in adapters.linears.values():
        if projections[0].expert is None:
            modules += [_linear(adapters, projection) for projection in projections]
        else:
            modules.append(_experts(adapters, projections, stacks))
    return modules


def to_adapters(peft: PeftFolder, whole: Mapping[str, list[Projection]]) -> AdapterPairs:
    """Return the adapters of a PEFT folder for a model with the linears `whole`.

    Projections without an adapter get zeros if they are in the same linear as an adapted one.
    Raises ValueError for an adapter that does not fit the model.
    """
    projections = {module_name(one.module): one for group in whole.values() for one in group}
    is_split = all(_is_split(module) for module in peft.modules if _holds_two(module))
    sources: dict[Projection, _Source] = {}
    for module in peft.modules:
        for name, source in _sources(module, projections, is_split):
            if name not in projections:
                raise ValueError(
                    f"{peft.path} adapts {module.name}, but training can only adapt the linear "
                    f"layers of a model: merge it into its model with peft "
                    f"(merge_and_unload) and import that instead."
                )
            _check_shape(peft, source, projections[name])
            sources[projections[name]] = source
    rank = max(source.rank for source in sources.values())
    chosen = mode(source.module.scale.square for source in sources.values())
    (scale, *_) = (s.module.scale for s in sources.values() if s.module.scale.square == chosen)
    squares = {one: source.module.scale.square / chosen for one, source in sources.items()}
    ratios = {
        one: copysign(sqrt(squares[one]), source.module.scale.alpha)
        for one, source in sources.items()
    }
    dtype = common_dtype(peft.modules)
    is_fp16 = dtype == torch.float16
    if not all(one == 1 or (_is_power_of_four(one) and not is_fp16) for one in squares.values()):
        dtype = torch.promote_types(dtype, torch.float32)

    def read(projection: Projection) -> Pair:
        source = sources.get(projection)
        if source is None:
            zeros = torch.zeros(rank, 1, dtype=dtype)
            return zeros.expand(-1, projection.columns), zeros.t().expand(projection.rows, -1)
        a, b = source.split(*source.module.read())
        if ratios[projection] != 1:
            b = b.double() * ratios[projection]
        missing = rank - source.rank
        return F.pad(a, (0, 0, 0, missing)).to(dtype), F.pad(b, (0, missing)).to(dtype)

    adapted = {
        linear: group for linear, group in whole.items() if not sources.keys().isdisjoint(group)
    }
    alpha, base = abs(scale.alpha_for(rank)), peft.config.base
    return AdapterPairs(peft.path, rank, alpha, dtype, adapted, read, base)


@dataclass(frozen=True)
class _Source:
    """Source of a projection's pair. split: function that extracts it from the pair of the module.
    rank, rows, columns: sizes of the result.
    """

    module: PeftModule
    rank: int
    rows: int
    columns: int
    split: Split


def _linear(adapters: AdapterPairs, projection: Projection) -> PeftModule:
    rank, name = adapters.rank, projection.module
    return PeftModule(
        name,
        name,
        Scale(adapters.alpha, rank, False),
        Spec(adapters.dtype, (rank, projection.columns)),
        Spec(adapters.dtype, (projection.rows, rank)),
        partial(_in_dtype, adapters, projection),
    )


def _in_dtype(adapters: AdapterPairs, projection: Projection) -> Pair:
    a, b = adapters.read(projection)
    return a.to(adapters.dtype), b.to(adapters.dtype)


def _experts(
    adapters: AdapterPairs, projections: Sequence[Projection], stacks: set[str | None]
) -> PeftModule:
    experts = [list(group) for _, group in groupby(projections, key=lambda one: one.expert)]
    parts = experts[0]
    rank = adapters.rank * len(parts)
    name = _stack(parts[0])
    assert name is not None
    place, _, kind = name.rpartition(".")
    if kind == "gate_up_proj" and f"{place}.down_proj" in stacks:
        place += ".base_layer"

    def read() -> Pair:
        pairs = [[_in_dtype(adapters, projection) for projection in group] for group in experts]
        a = torch.cat([a for group in pairs for a, _ in group])
        b = torch.stack([torch.block_diag(*[b for _, b in group]) for group in pairs], dim=2)
        return a, b.flatten(1)

    rows = sum(projection.rows for projection in parts)
    return PeftModule(
        name,
        place,
        Scale(adapters.alpha * len(parts), rank, False),
        Spec(adapters.dtype, (rank * len(experts), parts[0].columns)),
        Spec(adapters.dtype, (rows, rank * len(experts))),
        read,
    )


def _stack(projection: Projection) -> str | None:
    """Return the parameter of transformers 5 that holds an expert's projection."""
    if projection.expert is None:
        return None
    layer = projection.module.split(".experts.")[0]
    kind = "down_proj" if projection.part == "down_proj" else "gate_up_proj"
    return f"{layer}.experts.{kind}"


def _holds_two(module: PeftModule) -> bool:
    return module.is_stack and module.name.endswith(".gate_up_proj")


def _is_split(module: PeftModule) -> bool:
    """Return True if gate and up each use one half of the rank, with zeros in the other half."""
    rank, (rows, columns) = module.scale.rank, module.b.shape
    if rank % 2 or rows % 2:
        return False
    _, b = module.read()
    gate, up = b.view(2, rows // 2, 2, columns // 2).transpose(1, 2)
    return not gate[1].any() and not up[0].any()


def _sources(
    module: PeftModule, projections: Mapping[str, Projection], is_split: bool
) -> Iterator[tuple[str, _Source]]:
    """Yield name and source of each projection that a module adapts."""
    rank, (rows, _), (a_rows, columns) = module.scale.rank, module.b.shape, module.a.shape
    layer, _, kind = module.name.rpartition(".")
    experts, first = a_rows // rank, projections.get(f"{layer}.0.down_proj")
    if not module.is_stack or first is None or first.num_experts != experts:
        yield module.name, _Source(module, rank, rows, columns, lambda a, b: (a, b))
        return
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    ranks = 2 if len(parts) > 1 and is_split else 1
    for expert in range(experts):
        for index, part in enumerate(parts):
            split = partial(_split, experts, expert, len(parts), ranks, index)
            source = _Source(module, rank // ranks, rows // len(parts), columns, split)
            yield f"{layer}.{expert}.{part}", source


def _split(
    experts: int, expert: int, parts: int, ranks: int, index: int, a: Tensor, b: Tensor
) -> Pair:
    """Extract an expert's part: rows of B, and if `ranks` > 1 also rows of A and columns of B."""
    a = a.view(experts, -1, a.size(1))[expert]
    b = b.view(b.size(0), -1, experts)[:, :, expert].chunk(parts)[index]
    if ranks > 1:
        a, b = a.chunk(ranks)[index], b.chunk(ranks, dim=1)[index]
    return a, b


def _check_shape(peft: PeftFolder, source: _Source, projection: Projection) -> None:
    found, expected = (
        (source.rows, source.columns),
        (projection.rows, projection.columns),
    )
    if found != expected:
        raise ValueError(
            f"{peft.path} adapts {projection.module} as {found[0]} x {found[1]}; the model's is "
            f"{expected[0]} x {expected[1]}."
        )


def _is_power_of_four(square: Fraction) -> bool:
    mantissa, exponent = frexp(square)
    return Fraction(float(square)) == square and mantissa == 0.5 and exponent % 2 == 1
