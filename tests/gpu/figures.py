"""Seconds, memory and FLOPs of a pass and an update, with each saving on and off.

    python -m tests.gpu.figures FAMILY

Prints a JSON object of rows by table; gpu.report writes them to tests/benchmarks/GPU.md.
"""

import json
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

from megavlm.data.packing import Pack, Tree, make_pack
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.logprobs import Scoring, default_chunk_size, token_scores
from megavlm.models.cost import ModelCost
from megavlm.models.registry import family
from megavlm.parallel import platform
from megavlm.parallel.mesh import build_mesh, init_distributed
from megavlm.training.forward_backward import compute_logprobs, forward_backward
from megavlm.training.losses import supervised_loss
from megavlm.training.step.vision_features import VisionFeatures
from tests.gpu import model, optimizers, shapes

Row = dict[str, Any]
REPEATS = 3


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
    return {"seconds": statistics.median(seconds), "gigabytes": peak_bytes() / 1e9}


def peak_bytes() -> int:
    if platform.has_gpu():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Bench:
    """Our model with the inputs of a family's update."""

    def __init__(self, config: Any, weights: dict[str, Any], options: ModelOptions) -> None:
        engine = model.has_transformer_engine() and platform.has_gpu()
        self._vision_ids = {config.image_token_id}
        self.trees, self.images = shapes.inputs(config, shapes.update_shape())
        self._chunks = model.ours(config, build_mesh(), weights, options, engine=engine)
        self._features = VisionFeatures.everywhere(self._chunks, self.images)
        self._pack = self.pack(self.trees)

    def pack(self, trees: list[Tree]) -> Pack:
        return make_pack(trees, vision_token_ids=self._vision_ids).to(platform.device())

    @property
    def num_tokens(self) -> int:
        return len(self._pack.token_ids)

    def encode(self) -> None:
        VisionFeatures.everywhere(self._chunks, self.images)

    def score(self) -> None:
        compute_logprobs(self._chunks, [self._pack], self._features, Scoring())

    def update(self, trees: list[Tree] | None = None) -> None:
        pack = self._pack if trees is None else self.pack(trees)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        loss = supervised_loss(pack.num_targets)
        forward_backward(self._chunks, [pack], self._features, Scoring(), loss)


def measure(name: str) -> dict[str, list[Row]]:
    """Return the rows of each table for a family's model."""
    config = shapes.model_config(name, shapes.update_shape())
    weights = {key: x.detach() for key, x in model.theirs(config).bfloat16().state_dict().items()}
    attention = "flash" if platform.has_gpu() else "sdpa"
    options = ModelOptions(dtype=torch.bfloat16, attention=attention)
    bench = Bench(config, weights, options)
    flops, tree = Flops(config, bench.images), bench.trees[0]
    forward = flops.language(bench.trees)
    vision, scored, updated = map(measured, (bench.encode, bench.score, bench.update))
    phases = (
        ("vision", vision, flops.vision()),
        ("log-probs", scored, forward),
        ("forward and backward", updated, 3 * forward),
    )
    shared = measured(partial(bench.update, [tree]))
    apart = measured(partial(bench.update, [*sequences(tree)]))
    tokens = bench.num_tokens
    del bench
    platform.free_cached_memory()
    full = measured(Bench(config, weights, replace(options, recompute="full")).update)
    steps = [*optimizers.savings(config, weights, measured)]
    platform.free_cached_memory()
    each = {**vision, "seconds": 3 * vision["seconds"]}
    return {
        "phases": [
            {"phase": phase, **row, **rates(row, tokens, work)} for phase, row, work in phases
        ],
        "savings": [
            {"saving": "prompt shared by its answers", "on": shared, "off": apart},
            {"saving": "images encoded once for three passes", "on": vision, "off": each},
            {"saving": "activations recomputed", "on": full, "off": updated},
            *steps,
        ],
        "chunks": [*chunk_rows(config.text_config.vocab_size, config.text_config.hidden_size)],
    }


def sequences(tree: Tree) -> Iterator[Tree]:
    """Yield each answer of a tree with a prompt of its own."""
    prompt = tree.segments[0]
    for answer in tree.segments[1:]:
        yield replace(tree, segments=(prompt, replace(answer, parent=0)))


class Flops:
    """Modelled FLOPs of a forward pass."""

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
        return sum(
            self._cost.per_patch * h * w + self._cost.per_patch_pair * (h * w) ** 2
            for _, h, w in (image.grid for image in self._images.values())
        )


def rates(row: Row, tokens: int, flops: float) -> Row:
    peak = platform.peak_flops()
    share = None if peak is None else flops / row["seconds"] / peak
    return {"tokens_per_second": tokens / row["seconds"], "mfu": share}


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
        logprobs, _ = token_scores(
            states, weight, ids, scoring=Scoring(), group=dist.group.WORLD, chunk_size=chunk
        )  # type: ignore[arg-type]
        logprobs.sum().backward()

    default = default_chunk_size(vocabulary, device.type)
    for chunk in sorted({default, *((16, 64) if shapes.is_tiny() else (512, 2048, 4096, 8192))}):
        row = measured(partial(work, chunk))
        yield {"chunk": chunk, "is_default": chunk == default, "targets": targets, **row}


def main() -> None:
    platform.install()
    init_distributed()
    print(json.dumps(measure(sys.argv[1])))


if __name__ == "__main__":
    main()
