"""Log-probs and gradients by each kernel against transformers in fp32, on one packed tree.

    python -m tests.gpu.parity FAMILY tiny|wide [engine]

Reports a line for transformers in bf16 and for each variant of our model: attention backend,
precision, delta rule, frozen or trained tower. engine: with Transformer Engine's layers.
Errors of log-probs are root mean squares and maxima, in nats; errors of gradients are norms of the
difference over the norm, of all tensors together and of the worst one.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megavlm.data.packs.trees import Tree
from megavlm.models.common.attention_backends import BACKENDS
from megavlm.models.common.config import ModelOptions
from megavlm.models.linear_attention.delta_rule import backward_refusal
from megavlm.parallel import platform
from megavlm.parallel.mesh import build_mesh
from tests.gpu import model, shapes
from tests.gpu.lines import checking, report
from tests.gpu.model import Outcome

# Largest errors in fp32: of a log-prob, and of the gradient. fla's kernels multiply in TF32.
EXACT = (1e-4, 1e-3)
TF32 = (2e-2, 3e-2)
# In bf16, of transformers' own errors. A token whose best experts are nearly equal may go to
# others.
SPREAD, MIXTURE_SPREAD = 1.25, 2.5
# An answer that misses its parent's tokens has gradients that are wrong by more than this.
LEAST_GRADIENT_ERROR = 0.02

Errors = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One way to compute our model."""

    backend: str
    dtype: torch.dtype
    rule: str = "fla"
    trains_tower: bool = False

    def name(self, *, has_rule: bool) -> str:
        parts = [self.backend, str(self.dtype).removeprefix("torch.")]
        parts += [self.rule] * has_rule + ["tower trained"] * self.trains_tower
        return ", ".join(parts)

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the largest errors of a variant in fp32."""
        return TF32 if self.rule == "fla" and platform.has_gpu() else EXACT


def variants(*, has_rule: bool, engine: bool) -> Iterator[Variant]:
    """Yield what this machine can run. A CPU has no kernels but SDPA's, and fla refuses gradients
    with some versions of Triton.
    """
    has_kernel = has_rule and platform.has_gpu() and backward_refusal() is None
    rules = ("torch", "fla") if has_kernel else ("torch",)
    for dtype in (torch.float32, torch.bfloat16):
        for backend in BACKENDS:
            if not _runs(backend, dtype, engine=engine):
                continue
            for rule in rules if backend == "sdpa" else rules[-1:]:
                yield Variant(backend, dtype, rule)
        yield Variant("sdpa", dtype, rules[-1], trains_tower=True)


def _runs(backend: str, dtype: torch.dtype, *, engine: bool) -> bool:
    if backend == "sdpa":
        return True
    if not platform.has_gpu() or (backend == "transformer_engine" and not engine):
        return False
    if platform.device().type == "cpu":  # the GPU path on a CPU (tests/gpu_path)
        return backend == "flash" and dtype != torch.float32
    return backend == "flex" or dtype != torch.float32


def measure(family: str, level: str, *, engine: bool) -> None:
    """Report all variants of a family."""
    shape = shapes.parity_shape(level)
    config, mesh = shapes.parity_config(family, level), build_mesh()
    layers = getattr(config.text_config, "layer_types", None) or ()
    has_rule = "linear_attention" in layers
    prompt, answers = shapes.prompt_of(config, shape)
    (tree,), images = shapes.inputs(config, shape)
    reference = model.theirs(config)
    exact = model.their_outcome(reference, config, prompt, answers, exact=True)
    expected = model.as_ours(config, exact.gradients)
    reference.zero_grad(set_to_none=True)
    reference.bfloat16()
    found = model.their_outcome(reference, config, prompt, answers, exact=False)
    theirs = errors(
        replace(found, gradients=model.as_ours(config, found.gradients)), exact, expected
    )
    report("transformers, bfloat16", **theirs)
    weights = {name: x.detach().clone() for name, x in reference.state_dict().items()}
    del reference, found
    for variant in variants(has_rule=has_rule, engine=engine):
        name = variant.name(has_rule=has_rule)
        platform.free_cached_memory()
        with checking(name), model.delta_rule(variant.rule):
            options = ModelOptions(
                dtype=variant.dtype,
                attention=variant.backend,
                freeze_tower=not variant.trains_tower,
                freeze_merger=not variant.trains_tower,
            )
            chunks = model.ours(config, mesh, weights, options, engine=engine)
            vision_ids = {config.image_token_id}
            ours = model.our_outcome(chunks, [tree], images, vision_ids)
            apart = model.our_outcome(chunks, [*sequences(tree)], images, vision_ids)
            values = errors(ours, exact, expected)
            shared = errors(ours, apart, apart.gradients)
            values |= {"shared_max": shared["max"], "shared_gradient": shared["gradient"]}
            spread = MIXTURE_SPREAD if family.endswith("_moe") else SPREAD
            report(name, fault=fault_of(variant, values, theirs, spread), **values)
            model.let_go(chunks)
            del chunks


def sequences(tree: Tree) -> Iterator[Tree]:
    """Yield each answer of a tree with a prompt of its own."""
    prompt = tree.segments[0]
    for answer in tree.segments[1:]:
        yield replace(tree, segments=(prompt, replace(answer, parent=0)))


def errors(found: Outcome, exact: Outcome, expected: Mapping[Any, torch.Tensor]) -> Errors:
    """Return the errors of log-probs and of the gradients that `found` has."""
    gap = found.logprobs.float() - exact.logprobs.float()
    squares, worst, whole = 0.0, ("", 0.0), 0.0
    for name, gradient in found.gradients.items():
        truth = expected[name].to(gradient)
        error, size = float((gradient - truth).norm()), float(truth.norm())
        squares, whole = squares + error**2, whole + size**2
        if size and not error / size <= worst[1]:  # NaN is the worst
            worst = ("/".join(map(str, name)), error / size)
    return {
        "rms": float(gap.square().mean().sqrt()),
        "max": float(gap.abs().max()),
        "gradient": (squares / whole) ** 0.5,
        "worst": worst[1],
        "worst_tensor": worst[0],
    }


def fault_of(variant: Variant, found: Errors, theirs: Errors, spread: float = SPREAD) -> str | None:
    """Return a sentence if a variant is too far from transformers in fp32, or if a shared prompt
    changes its results. spread: of errors in bf16, over transformers' own.
    """
    if variant.dtype == torch.float32:
        most, gradient = variant.bounds
        bounds = {
            "max": most,
            "gradient": gradient,
            "shared_max": most,
            "shared_gradient": gradient,
        }
    else:
        allowed = spread * theirs["gradient"] + LEAST_GRADIENT_ERROR
        bounds = {
            "rms": spread * theirs["rms"],
            "gradient": allowed,
            "shared_max": 2 * spread * theirs["max"],
            "shared_gradient": 2 * allowed,
        }
    faults = [
        f"{x} is {found[x]:.1e}, at most {y:.1e}" for x, y in bounds.items() if not found[x] <= y
    ]
    return "; ".join(faults) or None


def main(arguments: Sequence[str]) -> None:
    model.prepare()
    family, level, *engine = arguments
    measure(family, level, engine=bool(engine))


if __name__ == "__main__":
    main(sys.argv[1:])
