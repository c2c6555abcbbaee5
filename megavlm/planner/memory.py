"""Modelled GPU memory of a recipe, for each pipeline stage and a server.

Parameters are exact (`models.sizes`), and activations are those of the longest pack
(`activations`). With megatron-core's own layers, without fusions, the sum is within 0.5 % of what
one H200 allocated (docs/estimates.md). Not covered: activations of a trained tower and of a
separate critic.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.optimizer import Optimizer
from megavlm.config.schema import Config
from megavlm.families import family
from megavlm.inference.server_args import GPU_ARGS
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.logprobs import default_chunk_size
from megavlm.models.sizes import EqualRanks, ParameterSize, equal_ranks
from megavlm.parallel.mesh import Layout
from megavlm.planner.activations import activation_bytes
from megavlm.planner.weight_updates import server_layout, stored_bytes

GB = 1e9
GPU = 80 * GB
# Assumptions, to be replaced by measurements. OVERHEAD: CUDA context, NCCL's buffers, kernels'
# workspaces and fragmentation. SERVER_RESIDUE: memory that a server keeps when its weights, cache
# and graphs are released. GRAPHS: memory of its CUDA graphs. LEAST_CACHE: smallest KV cache with
# which a server is worth starting.
OVERHEAD, SERVER_RESIDUE, GRAPHS = 6 * GB, 3 * GB, 1 * GB
LEAST_CACHE = 5 * GB
BUDGET = 0.9  # usable share of a trainer's GPU: this model may be off by a tenth
SGLANG_FRACTION = 0.7  # SGLang's own choice for a model with a tower on a GPU of 80 GB


@dataclass(frozen=True)
class StageMemory:
    """Peak bytes on a GPU of a pipeline stage.

    step: Copies and offloaded state that are on the GPU only during the optimizer's step.
    activations: Activations of all microbatches in flight. logits: Logits of one chunk of the
    log-probs, and their gradients. features: Features of the step's images, kept for every pass.
    encoding: Peak of the vision tower's pass, before the update. servers: Memory that a colocated
    server keeps during training.
    """

    ranks: range
    weights: float
    gradients: float
    optimizer: float
    step: float
    activations: float
    logits: float
    features: float
    encoding: float
    servers: float = 0.0

    @property
    def total(self) -> float:
        states = self.weights + self.gradients + self.optimizer + self.features
        return states + max(self.activations + self.logits, self.encoding, self.step) + self.kept

    @property
    def kept(self) -> float:
        """Bytes that stay on the GPU in every phase."""
        return OVERHEAD + self.servers


@dataclass(frozen=True)
class ServerRankMemory:
    """Bytes on a GPU of a server. budget: Bytes for weights and cache together. others: The
    trainer's bytes if they share the GPU.
    """

    weights: float
    budget: float
    others: float = 0.0

    @property
    def total(self) -> float:
        return self.budget + SERVER_RESIDUE + GRAPHS + self.others

    @property
    def cache(self) -> float:
        return self.budget - self.weights


@dataclass(frozen=True)
class RunMemory:
    """Memory of a run's GPUs, each with `gpu` bytes. server: Memory of a server's GPU; None in a
    run without servers.
    """

    stages: list[StageMemory]
    server: ServerRankMemory | None
    colocate: bool
    gpu: float

    @classmethod
    def of(
        cls,
        config: Config,
        hf_config: Any,
        world_size: int,
        gpu: float = GPU,
        ranks: Iterable[EqualRanks] | None = None,
        server: ServerRankMemory | None = None,
    ) -> Self:
        """Return the memory of a recipe's run. hf_config: The configuration of transformers. ranks,
        server: Results of `trainer_ranks` and `server_memory`, if they are already known.

        Raises ValueError if the layout does not fit the model or the world size.
        """
        groups = trainer_ranks(config, hf_config, world_size) if ranks is None else ranks
        stages = [_stage(config, hf_config, group, world_size) for group in groups]
        if server is None and isinstance(config.algorithm, PolicyOptimization):
            server = server_memory(config, hf_config, gpu)
        return cls(stages, server, config.rollout.colocate, gpu)

    @property
    def fullest(self) -> float:
        """Return the bytes on the trainer's fullest GPU."""
        return max(stage.total for stage in self.stages)

    @property
    def away(self) -> float:
        """Bytes that a trainer's GPU moves to the host before colocated servers generate. Gradients
        are dropped, because they start from zero.
        """
        return max(stage.weights + stage.optimizer for stage in self.stages)

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each part that does not fit a GPU."""
        gpu, budget = self.gpu, BUDGET * self.gpu
        for stage in self.stages:
            if stage.total > budget:
                yield (
                    f"ranks {stage.ranks.start}-{stage.ranks.stop - 1} need "
                    f"{stage.total / GB:.0f} GB, and {budget / GB:.0f} are planned for on a GPU of "
                    f"{gpu / GB:.0f}"
                )
        if self.server is None:
            return
        if self.colocate:  # both copies of the weights during a push
            push = max(stage.weights + stage.kept for stage in self.stages) + self.server.weights
            if push > gpu:
                yield f"a push needs {push / GB:.0f} GB of {gpu / GB:.0f}"
        if self.server.total > gpu:
            yield f"a server's rank needs {self.server.total / GB:.0f} GB of {gpu / GB:.0f}"
        if self.server.cache < LEAST_CACHE:
            yield (
                f"a server's rank stores {self.server.weights / GB:.0f} GB of weights, which "
                f"leaves {self.server.cache / GB:.1f} GB for its cache, and "
                f"{LEAST_CACHE / GB:.0f} are needed"
            )


def trainer_ranks(config: Config, hf_config: Any, world_size: int) -> Iterator[EqualRanks]:
    """Yield the trainer's ranks with their parameters. They do not depend on context parallelism or
    recomputation.
    """
    options, layout = ModelOptions.from_config(config), Layout.from_config(config.parallel)
    lora = config.lora if config.lora.rank else None
    return equal_ranks(hf_config, layout, world_size, options, lora)


def _stage(config: Config, hf_config: Any, group: EqualRanks, world_size: int) -> StageMemory:
    stage = group.ranks.start // (world_size // config.parallel.pipeline)
    held = group.parameters
    trained = [x for x in held if x.trained]
    data = world_size // config.parallel.model_size
    is_first, is_last = stage == 0, group.ranks.stop == world_size
    kept, passing = activation_bytes(config, hf_config, held)
    features = (
        image_tokens(config, hf_config) * _images(config, data) * _feature_bytes(config, hf_config)
    )
    optimizer = sum(optimizer_bytes(x, config, world_size) for x in trained)
    in_step = config.optimizer.offload * optimizer
    gradients = sum(x.numel * gradient_bytes(x.dtype, config.optimizer) for x in trained)
    return StageMemory(
        ranks=group.ranks,
        weights=sum(x.bytes for x in held),
        gradients=float(gradients),
        optimizer=optimizer - in_step,
        step=in_step + sum(step_bytes(x, config, world_size) for x in trained),
        activations=_in_flight(config, stage) * kept + passing,
        logits=logits_bytes(config, hf_config, trained) if is_last else 0.0,
        features=min(features, config.model.features_mb * 2**20) if is_first else 0.0,
        encoding=encoding_bytes(config, hf_config, data) if is_first else 0.0,
        servers=SERVER_RESIDUE if config.rollout.colocate else 0.0,
    )


def gradient_bytes(dtype: torch.dtype, optimizer: Optimizer) -> int:
    """Return the bytes of one element of the gradient of a parameter of this dtype."""
    return 4 if optimizer.megatron_options["grad_reduce_in_fp32"] else dtype.itemsize


def optimizer_bytes(parameter: ParameterSize, config: Config, world_size: int) -> float:
    """Return the bytes of a rank's shard of Adam's state: two moments and, for a parameter in half
    precision, an fp32 copy, or with the precision-aware optimizer only the missing 16 bits. The
    state is sharded over the ranks that hold the parameter.
    """
    is_half = parameter.dtype.itemsize < 4
    is_aware = config.optimizer.megatron_options["use_precision_aware_optimizer"]
    copy = (2 if is_aware else 4) * is_half
    moments = sum(4 - 2 * is_rounded for is_rounded in _rounded_moments(config))
    return _shard(parameter, config, world_size) * (moments + copy)


def step_bytes(parameter: ParameterSize, config: Config, world_size: int) -> float:
    """Return the bytes of a rank's fp32 copies during the optimizer's step. Moments and gradients
    in bfloat16 are copied, except gradients with the precision-aware optimizer, which reads
    bfloat16.
    """
    copies = sum(_rounded_moments(config))
    if not config.optimizer.megatron_options["use_precision_aware_optimizer"]:
        copies += gradient_bytes(parameter.dtype, config.optimizer) < 4
    return _shard(parameter, config, world_size) * 4 * copies


def _rounded_moments(config: Config) -> tuple[bool, bool]:
    """Return for each of Adam's two moments whether it is kept in bfloat16."""
    options = config.optimizer.megatron_options
    return options["exp_avg_dtype"] == "bfloat16", options["exp_avg_sq_dtype"] == "bfloat16"


def _shard(parameter: ParameterSize, config: Config, world_size: int) -> float:
    """Return the number of a parameter's elements whose optimizer state is on one rank."""
    parallel = config.parallel
    is_expert = ".experts." in parameter.name
    ranks = parallel.expert_ranks if is_expert else parallel.tensor * parallel.pipeline
    return parameter.numel / (world_size // ranks)


def _in_flight(config: Config, stage: int) -> float:
    """Return the number of microbatches whose activations a stage holds (arXiv 2104.04473)."""
    stages, virtual = config.parallel.pipeline, config.parallel.virtual
    if virtual == 1:
        return stages - stage
    return stages * (1 + (stages - 1) / (stages * virtual))


def logits_bytes(config: Config, hf_config: Any, trained: Iterable[ParameterSize]) -> float:
    """Return the bytes for computing log-probs: two chunks of logits in fp32, the hidden states of
    all targets with their gradient, and the gradient of a trained output layer in fp32. In half
    precision, a chunk and a gradient of the model's precision come to these.
    """
    itemsize = ModelOptions.from_config(config).dtype.itemsize
    half = itemsize if itemsize < 4 else 0
    text = hf_config.text_config
    vocabulary = text.vocab_size // config.parallel.tensor
    tokens = config.data.pack_tokens / config.parallel.context
    chunk = min(default_chunk_size(vocabulary, "cuda"), tokens)
    has_gradient = any(x.component in ("embedding", "output") for x in trained)
    gradient = vocabulary * text.hidden_size * (4 + half) * has_gradient
    hidden = 2 * tokens * text.hidden_size * itemsize
    return chunk * vocabulary * (2 * 4 + half) + gradient + hidden


def image_tokens(config: Config, hf_config: Any) -> float:
    """Return the maximum tokens of an image; without data.max_pixels it is the longest prompt."""
    most = config.data.max_prompt_tokens
    if config.data.max_pixels is None:
        return most
    patch = family(hf_config.model_type).patch_sizes(hf_config)
    return min(most, config.data.max_pixels / (patch.side * patch.merge) ** 2)


def _images(config: Config, data_ranks: int) -> int:
    """Return the number of images per step on a data rank, with one image per prompt."""
    algorithm = config.algorithm
    if not isinstance(algorithm, PolicyOptimization):
        return -(-algorithm.batch_size // data_ranks)
    return -(-algorithm.prompts_per_step // data_ranks)


def _feature_bytes(config: Config, hf_config: Any) -> float:
    architecture = family(hf_config.model_type).architecture(hf_config)
    levels = 1 + architecture.get("deepstack_levels", 0)
    itemsize = ModelOptions.from_config(config).dtype.itemsize
    return float(levels * architecture["hidden_size"] * itemsize)


def encoding_bytes(config: Config, hf_config: Any, data_ranks: int) -> float:
    """Return the peak bytes of a frozen tower's pass over the images that a rank encodes at once:
    the outputs of one block's matrices for every patch, and the patches in fp32.
    """
    parts = family(hf_config.model_type)
    entries, patch = parts.mapping(hf_config), parts.patch_sizes(hf_config)
    outputs = sum(
        x.hf_shapes[0][0]
        for x in entries
        if x.megatron.startswith("visual.blocks.0.") and len(x.hf_shapes[0]) > 1
    )
    pixels = 3 * patch.frames * patch.side**2
    shared_by = config.parallel.tensor * config.parallel.context
    images = -(-_images(config, data_ranks) // shared_by)
    tokens = min(images * image_tokens(config, hf_config), config.data.pack_tokens)
    patches = tokens * patch.merge**2
    itemsize = ModelOptions.from_config(config).dtype.itemsize
    return float(patches * (outputs * itemsize + pixels * 4))


def server_memory(config: Config, hf_config: Any, gpu: float) -> ServerRankMemory:
    """Return the memory of a server's fullest rank while it generates, on a GPU of `gpu` bytes."""
    servers = server_layout(config, hf_config)
    parts = family(hf_config.model_type)
    drafts = None not in (parts.draft_head, config.rollout.draft_algorithm)
    entries = parts.mapping(hf_config, draft_head=drafts)
    itemsize = ModelOptions.from_config(config).dtype.itemsize
    given: dict[str, Any] = {**GPU_ARGS, **config.rollout.server_args}
    fraction = float(given["mem_fraction_static"] or SGLANG_FRACTION)
    others = OVERHEAD if config.rollout.colocate else 0.0
    return ServerRankMemory(max(stored_bytes(entries, servers, itemsize)), fraction * gpu, others)
