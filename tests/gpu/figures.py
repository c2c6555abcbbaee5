"""Seconds, memory and FLOPs of an update's phases, beside what `megavlm plan` models.

    python -m tests.gpu.figures 3b|7b

3b is the whole Qwen2.5-VL-3B, 7b the width of Qwen2.5-VL-7B with as many layers as fit. Layers are
Transformer Engine's where it is installed.
"""

import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megavlm.config.optimizer import Optimizer
from megavlm.data.packs.packing import Pack, make_pack
from megavlm.data.packs.trees import Tree
from megavlm.families import family
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.logprobs import Scoring, default_chunk_size, token_scores
from megavlm.models.cost import ModelCost
from megavlm.parallel import platform
from megavlm.parallel.mesh import build_mesh
from megavlm.planner.rates import Rates
from megavlm.training.forward_backward import compute_logprobs, forward_backward
from megavlm.training.losses import supervised_loss
from megavlm.training.optimizer import build_updater
from megavlm.training.step.vision_features import VisionFeatures
from tests.gpu import model, optimizers, shapes
from tests.gpu.lines import checking, report
from tests.gpu.parity import sequences

Row = dict[str, Any]
REPEATS = 3
MODELS = {"3b": "Qwen2.5-VL-3B", "7b": "Qwen2.5-VL-7B"}
# Bytes of a trained parameter: bf16, its fp32 gradient, and Adam's main weight and moments.
BYTES = 2 + 4 + 12
RECOMPUTED: dict[str, dict[str, Any]] = {
    "activations recomputed": {"recompute": "full"},
    "MLPs recomputed": {"recompute": "selective", "recompute_modules": ("mlp",)},
}
# Of the GPU, for weights and optimizer; the rest is for activations and log-probs.
SHARE = 0.6


def measured(work: Callable[[], object], repeats: int = REPEATS) -> Row:
    """Return the median seconds of `work` after a first run, and its peak of memory in GB."""
    work()
    if platform.has_gpu():
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        platform.synchronize()
        start = time.perf_counter()
        work()
        platform.synchronize()
        seconds.append(time.perf_counter() - start)
    row = {"seconds": statistics.median(seconds), "gigabytes": peak_bytes() / 1e9}
    if platform.has_gpu():  # fragments included
        row["reserved_gigabytes"] = torch.cuda.max_memory_reserved() / 1e9
    return row


def peak_bytes() -> int:
    if platform.has_gpu():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def num_layers(config: Any, gpu: float) -> int:
    """Return the number of layers of a configuration that fit on a GPU of `gpu` bytes."""
    text = config.text_config
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    attention = 2 * (text.num_attention_heads + text.num_key_value_heads) * head
    layer = text.hidden_size * (attention + 3 * text.intermediate_size)
    tables = 1 if config.tie_word_embeddings else 2
    outer = tables * text.vocab_size * text.hidden_size
    return max(1, min(text.num_hidden_layers, int((SHARE * gpu / BYTES - outer) / layer)))


def config_of(name: str) -> Any:
    """Return transformers' configuration, cut to the layers that fit."""
    config = shapes.config_of(MODELS[name])
    if platform.has_gpu():
        gpu = torch.cuda.get_device_properties(0).total_memory
        config.text_config.num_hidden_layers = num_layers(config, gpu)
        config.text_config.layer_types = None
    return config


class Bench:
    """Our model with the inputs of an update."""

    def __init__(self, config: Any, options: ModelOptions) -> None:
        self._vision_ids = {config.image_token_id}
        self.trees, self.images = shapes.inputs(config, shapes.update_shape())
        mesh = build_mesh()
        chunks = model.build(config, mesh, options, engine=model.has_transformer_engine())
        self._updater = build_updater(chunks, Optimizer(), mesh, num_steps=99)
        self._chunks = self._updater.chunks
        self._features = VisionFeatures.everywhere(self._chunks, self.images)
        self._pack = self.pack(self.trees)

    def close(self) -> None:
        """Let go of weights, gradients and optimizer."""
        model.let_go(self._chunks)

    def pack(self, trees: list[Tree]) -> Pack:
        return make_pack(trees, vision_token_ids=self._vision_ids).to(platform.device())

    @property
    def num_tokens(self) -> int:
        return len(self._pack.token_ids)

    def encode(self) -> None:
        VisionFeatures.everywhere(self._chunks, self.images)

    def score(self) -> None:
        compute_logprobs(self._chunks, [self._pack], self._features, Scoring())

    def accumulate(self, trees: list[Tree] | None = None) -> None:
        pack = self._pack if trees is None else self.pack(trees)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        loss = supervised_loss(pack.num_targets)
        forward_backward(self._chunks, [pack], self._features, Scoring(), loss)

    def step(self) -> None:
        self._updater.step()

    def update(self) -> None:
        loss = supervised_loss(self._pack.num_targets)
        self._updater.update([self._pack], self._features, loss, step=0)


class Flops:
    """Modelled FLOPs of a forward pass, as `megavlm plan` counts them."""

    def __init__(self, config: Any, images: Any) -> None:
        parts = family(config.model_type)
        entries = parts.mapping(config)
        self._cost = ModelCost.of(entries, parts.architecture(config))
        self._images = images
        text = config.text_config
        self._output = 2.0 * text.vocab_size * text.hidden_size

    def language(self, trees: list[Tree]) -> float:
        targets = sum(len(s.token_ids) for tree in trees for s in tree.segments if s.is_target)
        texts = [Tree(tuple(replace(part, images=()) for part in tree.segments)) for tree in trees]
        layers = sum(self._cost.tree(text, self._images) for text in texts)
        return layers + targets * self._output

    def vision(self) -> float:
        return sum(self._cost.image(image.grids) for image in self._images.values())


def measure(name: str) -> None:
    """Report the phases of an update, and what the savings save."""
    config = config_of(name)
    attention = "flash" if platform.has_gpu() else "sdpa"
    options = ModelOptions(dtype=torch.bfloat16, attention=attention)
    bench = Bench(config, options)
    layers = config.text_config.num_hidden_layers
    report(
        "model",
        release=MODELS[name],
        layers=layers,
        tokens=bench.num_tokens,
        engine=model.has_transformer_engine(),
    )
    phases(bench, Flops(config, bench.images))
    if name == "3b":
        with checking("prompt shared by its answers"):
            tree = bench.trees[0]
            on = measured(partial(bench.accumulate, [tree]))
            off = measured(partial(bench.accumulate, [*sequences(tree)]))
            report("saving", saving="prompt shared by its answers", on=on, off=off)
        with checking("activations recomputed"):
            off = measured(bench.accumulate)
            for saving, keys in RECOMPUTED.items():
                bench.close()
                del bench
                release()
                bench = Bench(config, replace(options, **keys))
                report("saving", saving=saving, on=measured(bench.accumulate), off=off)
        bench.close()
        del bench
        release()
        with checking("chunks of log-probs"):
            text = config.text_config
            for row in chunk_rows(text.vocab_size, text.hidden_size):
                report("chunk", **row)
        release()
        with checking("savings of the optimizer"):
            for row in optimizers.savings(config, measured):
                report("saving", **row)


def release() -> None:
    gc.collect()
    platform.free_cached_memory()


def phases(bench: Bench, flops: Flops) -> None:
    """Report each phase: measured, and its seconds by the rates of `megavlm plan`."""
    rates, forward = Rates(), flops.language(bench.trees)
    for phase, work, amount, rate in (
        ("vision", bench.encode, flops.vision(), rates.encoder),
        ("log-probs", bench.score, forward, rates.flops),
        ("forward and backward", bench.accumulate, 3 * forward, rates.flops),
        ("optimizer step", bench.step, 0.0, rates.flops),
        ("update", bench.update, 3 * forward, rates.flops),
    ):
        with checking(phase):
            row = measured(work)
            peak = platform.peak_flops()
            report(
                "phase",
                phase=phase,
                **row,
                modelled_seconds=amount / rate if amount else None,
                tokens_per_second=bench.num_tokens / row["seconds"],
                mfu=amount / row["seconds"] / peak if peak and amount else None,
            )


def chunk_rows(vocabulary: int, hidden: int) -> Iterator[Row]:
    """Yield the cost of log-probs and their gradients for each size of a chunk."""
    targets = 64 if shapes.is_tiny() else 8192
    device, dtype = platform.device(), torch.bfloat16
    generator = torch.Generator(device.type).manual_seed(0)
    states = torch.randn(targets, hidden, generator=generator, device=device, dtype=dtype)
    weight = torch.randn(vocabulary, hidden, generator=generator, device=device, dtype=dtype) / 50
    ids = torch.randint(vocabulary, (targets,), generator=generator, device=device)
    states.requires_grad_()
    weight.requires_grad_()

    def work(chunk: int) -> None:
        states.grad = weight.grad = None
        logprobs, *_ = token_scores(
            states, weight, ids, scoring=Scoring(), group=dist.group.WORLD, chunk_size=chunk
        )  # type: ignore[arg-type]
        logprobs.sum().backward()

    default = default_chunk_size(vocabulary, device.type)
    for chunk in sorted({default, *((16, 64) if shapes.is_tiny() else (512, 2048, 4096, 8192))}):
        row = measured(partial(work, chunk))
        yield {"chunk": chunk, "is_default": chunk == default, "targets": targets, **row}


def main() -> None:
    model.prepare()
    measure(sys.argv[1])


if __name__ == "__main__":
    main()
