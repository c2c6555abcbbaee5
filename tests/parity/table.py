"""The parity matrix: which family, under which layout, computes which inputs with which options."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megavlm.models.common.config import ModelOptions
from megavlm.parallel.mesh import Layout

FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4v",
    "glm4v_moe",
    "internvl",
    "internvl_moe",  # of model_type internvl, too
    "minicpmv4_6",
    "qwen3_omni_moe",
)
HEARING = ("qwen3_omni_moe",)


@dataclass(frozen=True)
class Ranks:
    """A layout of `mesh` on `data` data ranks; `sequence`: with sequence parallelism."""

    mesh: Layout = field(default_factory=Layout)
    data: int = 1
    sequence: bool = False

    @property
    def world_size(self) -> int:
        return self.mesh.model_size * self.data


LAYOUTS = {
    "one rank": Ranks(),
    "TP2": Ranks(Layout(tensor=2)),
    "TP2+SP": Ranks(Layout(tensor=2), sequence=True),
    "TP4": Ranks(Layout(tensor=4)),
    "TP4+SP": Ranks(Layout(tensor=4), sequence=True),
    "PP2": Ranks(Layout(pipeline=2)),
    "PP4": Ranks(Layout(pipeline=4)),
    "PP2 virtual 2": Ranks(Layout(pipeline=2, virtual=2)),
    "CP2": Ranks(Layout(context=2)),
    "CP4": Ranks(Layout(context=4)),
    "DP2": Ranks(data=2),
    "DP4": Ranks(data=4),
    "TP2xPP2": Ranks(Layout(tensor=2, pipeline=2)),
    "TP2+SPxPP2": Ranks(Layout(tensor=2, pipeline=2), sequence=True),
    "TP2+SPxPP2 virtual 2": Ranks(Layout(tensor=2, pipeline=2, virtual=2), sequence=True),
    "TP2xCP2": Ranks(Layout(tensor=2, context=2)),
    "TP2+SPxCP2": Ranks(Layout(tensor=2, context=2), sequence=True),
    "PP2xCP2": Ranks(Layout(pipeline=2, context=2)),
    "PP2 virtual 2xCP2": Ranks(Layout(pipeline=2, virtual=2, context=2)),
    "CP2xDP2": Ranks(Layout(context=2), data=2),
    "PP2xDP2": Ranks(Layout(pipeline=2), data=2),
    "TP2xDP2": Ranks(Layout(tensor=2), data=2),
}
# Experts are cut over the ranks that the other axes leave. megatron-core trains experts under
# tensor parallelism with sequence parallelism only.
EXPERT_LAYOUTS = {
    "EP2": Ranks(Layout(expert=2), data=2),
    "EP4": Ranks(Layout(expert=4), data=4),
    "EP2 over CP2": Ranks(Layout(context=2, expert=2)),
    "EP2 over TP2+SP": Ranks(Layout(tensor=2, expert=2), sequence=True),
    "EP2xTP2+SP": Ranks(Layout(tensor=2, expert=2), data=2, sequence=True),
    "expert TP2+SP": Ranks(Layout(tensor=2, expert_tensor=2), sequence=True),
    "EP2xPP2": Ranks(Layout(pipeline=2, expert=2), data=2),
    "EP2xPP2 virtual 2": Ranks(Layout(pipeline=2, virtual=2, expert=2), data=2),
}
INPUTS = (
    "mixed",
    "one image",
    "several images",
    "sizes",
    "video",
    "text only",
    "straddling",
    "padding",
    "branches",
)
OPTIONS = {
    "": ModelOptions(freeze_tower=False, freeze_merger=False),
    "recompute full": ModelOptions(
        freeze_tower=False, freeze_merger=False, recompute="full", recompute_tower=True
    ),
    "recompute two layers": ModelOptions(
        freeze_tower=False, freeze_merger=False, recompute="full", recompute_layers=2
    ),
    "recompute selective": ModelOptions(
        freeze_tower=False,
        freeze_merger=False,
        recompute="selective",
        recompute_modules=("core_attn", "mlp"),
    ),
    "frozen tower": ModelOptions(freeze_merger=False),
    "frozen merger": ModelOptions(freeze_tower=False),
    "frozen tower and merger": ModelOptions(),
    "shared critic": ModelOptions(freeze_tower=False, freeze_merger=False, head="both"),
    "separate critic": ModelOptions(freeze_tower=False, freeze_merger=False, head="values"),
}


@dataclass(frozen=True)
class Case:
    """One line of the matrix. `tied`: whether embedding and output layer are one tensor."""

    family: str
    layout: str
    inputs: str = "mixed"
    options: str = ""
    tied: bool = False

    @property
    def ranks(self) -> Ranks:
        return (LAYOUTS | EXPERT_LAYOUTS)[self.layout]

    @property
    def is_possible(self) -> bool:
        """Regions of two layers need chunks of two; the models have four layers."""
        mesh = self.ranks.mesh
        return self.options != "recompute two layers" or mesh.pipeline * mesh.virtual <= 2

    @property
    def kind(self) -> tuple[str, ...]:
        """Axes that are cut, however many ranks they have. Sequence parallelism and virtual stages
        are told apart where no other axis is cut.
        """
        mesh = self.ranks.mesh
        cut = {
            "tensor": mesh.tensor > 1,
            "sequence": self.ranks.sequence,
            "pipeline": mesh.pipeline > 1,
            "virtual": mesh.virtual > 1,
            "context": mesh.context > 1,
            "expert": mesh.expert > 1,
            "expert tensor": mesh.expert_tensor > 1,
            "data": self.ranks.data > 1,
        }
        names = [name for name, is_cut in cut.items() if is_cut]
        if len(names) > 2:
            names = [name for name in names if name not in ("sequence", "virtual")]
        return tuple(names)

    def __str__(self) -> str:
        parts = [self.family, self.layout, self.inputs, self.options, "tied" if self.tied else ""]
        return ", ".join(part for part in parts if part)


def layouts(family: str) -> list[str]:
    """Those that the family can have."""
    if not family.endswith("_moe"):
        return list(LAYOUTS)
    dense = [n for n, ranks in LAYOUTS.items() if ranks.mesh.tensor == 1 or ranks.sequence]
    return [*dense, *EXPERT_LAYOUTS]


def everything() -> Iterator[Case]:
    """All that `make parity` runs: every layout with every input, and options where they matter."""
    for family in FAMILIES:
        for layout in layouts(family):
            for inputs in INPUTS:
                yield Case(family, layout, inputs)
            if family in HEARING:
                yield Case(family, layout, "audio")
            for options in OPTIONS:
                case = Case(family, layout, options=options)
                if options and case.is_possible:
                    yield case
            yield Case(family, layout, tied=True)


VARIANTS: list[dict[str, Any]] = [
    *({"inputs": name} for name in INPUTS[1:]),
    *({"options": name} for name in OPTIONS if name),
    {"tied": True},
]


def subset() -> Iterator[Case]:
    """What `make test-all` runs: every family under every layout, with inputs and options in turn.
    A case without images is followed by one with them.
    """
    variants = itertools.cycle([{}, *VARIANTS])
    for family in FAMILIES:
        for layout in layouts(family):
            cases = (Case(family, layout, **variant) for variant in variants)
            possible = (case for case in cases if case.is_possible)
            yield (case := next(possible))
            if family in HEARING:
                yield Case(family, layout, "audio")
            if case.inputs == "text only":
                yield next(possible)


def quick() -> list[Case]:
    """Return what `make test` runs: a layout of each kind; families, inputs and options in turn."""
    kinds = {Case("", layout).kind: layout for layout in reversed(LAYOUTS | EXPERT_LAYOUTS)}
    variants, cases = [*VARIANTS, {}], []
    for index, layout in enumerate(reversed(kinds.values())):
        able = [family for family in FAMILIES if layout in layouts(family)]
        family = able[index % len(able)]
        possible = (Case(family, layout, **variant) for variant in variants)
        chosen = next(case for case in possible if case.is_possible)
        cases.append(chosen)
        variants.sort(key=lambda variant: Case(family, layout, **variant) == chosen)  # in turn
    return [*cases, *(Case(family, "EP2 over TP2+SP", "audio") for family in HEARING)]
