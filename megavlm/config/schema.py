"""The configuration: one dataclass per section, with each key's type, default and range."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megavlm.config.algorithms import ALGORITHMS, GRPO, PPO, SFT, Algorithm, PolicyOptimization
from megavlm.config.bounds import bounded
from megavlm.config.environments import Curriculum, Environment, Reward

MISSING: Any = "???"
__all__ = ["ALGORITHMS", "GRPO", "PPO", "SFT", "PolicyOptimization"]  # imported from here


@dataclass(frozen=True, kw_only=True)
class Run:
    """`resume` auto: go on from the latest checkpoint in `dir`. `summary`: tables at the end."""

    dir: str = MISSING
    seed: int = bounded(0, least=0, most=2**63 - 1)
    resume: Literal["auto", "never"] = "auto"
    summary: bool = True


@dataclass(frozen=True, kw_only=True)
class Model:
    """`folder` is a HuggingFace folder: architecture, tokenizer, processor and, unless
    `checkpoint` names a Megatron checkpoint to start from, weights. `attention`: the kernel of
    the core attention; auto takes flash for bfloat16 on a GPU, else sdpa."""

    folder: str = MISSING
    checkpoint: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["auto", "sdpa", "flash", "flex", "transformer_engine"] = "auto"
    freeze_tower: bool = True
    freeze_merger: bool = True


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Adapters of `rank` on `targets`; rank 0 trains the weights themselves. A target is
    language.attention, language.mlp, language.experts, vision.attention, vision.mlp,
    vision.merger, or the full path of a linear, in which * matches anything."""

    rank: int = bounded(0, least=0)
    alpha: float = bounded(32.0, above=0)
    dropout: float = bounded(0.0, least=0, below=1)
    targets: tuple[str, ...] = ("language.attention", "language.mlp")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Ranks per axis. `sequence`: activations are split over the tensor axis. `virtual`: chunks of
    layers per pipeline stage. `expert` and `expert_tensor` divide the ranks of a stage for
    experts alone. `data` null: what the world size leaves; `megavlm train` then starts one.
    `first_stage_layers`, `last_stage_layers`: where an even split is not wanted."""

    tensor: int = bounded(1, least=1)
    sequence: bool = False
    context: int = bounded(1, least=1)
    pipeline: int = bounded(1, least=1)
    virtual: int = bounded(1, least=1)
    first_stage_layers: int | None = bounded(None, least=1)
    last_stage_layers: int | None = bounded(None, least=1)
    expert: int = bounded(1, least=1)
    expert_tensor: int = bounded(1, least=1)
    data: int | None = bounded(None, least=1)

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model and share one microbatch."""
        return self.tensor * self.context * self.pipeline

    @property
    def num_ranks(self) -> int:
        data = self.data or 1
        while self.data is None and (self.model_size * data) % self.expert_ranks:
            data += 1
        return self.model_size * data

    @property
    def expert_ranks(self) -> int:
        """The smallest number of ranks that the experts' axes and the pipeline make."""
        return self.expert * self.expert_tensor * self.pipeline


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Activations that are computed again in backward instead of kept. selective: those of
    `modules`; full: everything but the inputs of every `layers` layers. `tower`: of each block
    of the vision tower."""

    language: Literal["none", "selective", "full"] = "none"
    modules: tuple[str, ...] = ("core_attn",)
    layers: int = bounded(1, least=1)
    tower: bool = False


@dataclass(frozen=True, kw_only=True)
class Data:
    """Parquet, JSONL and CSV files, here or at any URL that fsspec knows, and their columns; a key
    that is null says that there is no such column. An entry of the files is one data set, and may
    be a glob; `train_weights` gives each its share of the prompts (none: all rows are one set).
    `question` is asked of every row where `prompt_key` is null. `extra_keys`: further columns,
    which environments and rewards get. Pixels are of one image after resizing; `pack_tokens` is
    the longest packed row of one forward. `bad_samples`, `long_prompts`: whether a row that cannot
    be used, or has more than `max_prompt_tokens`, ends the run or is left out and counted.
    `workers`: processes that make prompts ahead; 0 makes them when they are needed."""

    train_files: tuple[str, ...] = ()
    test_files: tuple[str, ...] = ()
    train_weights: tuple[float, ...] = bounded((), above=0)
    prompt_key: str | None = "problem"
    question: str | None = None
    answer_key: str | None = "answer"
    image_keys: tuple[str, ...] = ("images",)
    video_key: str | None = None
    category_key: str | None = "task"
    extra_keys: tuple[str, ...] = ()
    system_prompt: str | None = None
    min_pixels: int | None = bounded(None, least=1)
    max_pixels: int | None = bounded(None, least=1)
    max_prompt_tokens: int = bounded(1024, least=1)
    pack_tokens: int = bounded(4096, least=1)
    bad_samples: Literal["refuse", "skip"] = "refuse"
    long_prompts: Literal["refuse", "skip"] = "refuse"
    workers: int = bounded(0, least=0)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """`managed`: megavlm starts and stops `servers` SGLang servers, at ports from `port` on (null:
    free ones), on `gpus` of this machine (none: those after the trainer's), or with `colocate` on
    the trainer's own, each side releasing its memory to the other in turn. `external`: `urls` of
    running ones; with `router`, the address of an sglang-router before them, requests go there.
    A managed server that dies is started again, `max_restarts` times; the run stops when fewer than
    `min_servers` can be left. Timeouts in seconds; `concurrency` is prompts in flight at a server;
    `oversample` draws so many times the prompts of a step and finishes the slow ones in later
    steps; `server_args` are further options of `sglang.launch_server`, by their long names.
    `pause`: what becomes of requests in flight when weights are pushed: they end (abort), start
    over under the new weights (retract), or go on with what the old ones computed (in_place).
    `lora`: adapters are sent merged into the weights that they change, or as adapters."""

    mode: Literal["managed", "external"] = "managed"
    servers: int = bounded(1, least=1)
    min_servers: int = bounded(1, least=1)
    max_restarts: int = bounded(3, least=0)
    urls: tuple[str, ...] = ()
    router: str | None = None
    port: int | None = bounded(None, least=1, most=65535)
    tensor_parallel: int = bounded(1, least=1)
    gpus: tuple[int, ...] = bounded((), least=0)
    colocate: bool = False
    temperature: float = bounded(1.0, above=0)
    top_p: float = bounded(1.0, above=0, most=1)
    max_new_tokens: int = bounded(4, least=1)
    suppress_special_tokens: bool = True
    oversample: float = bounded(1.0, least=1)
    start_timeout: float = bounded(300, above=0)
    request_timeout: float = bounded(300, above=0)
    concurrency: int = bounded(64, least=1)
    sync: Literal["tensor", "distributed", "disk"] = "tensor"
    pause: Literal["abort", "retract", "in_place"] = "abort"
    lora: Literal["merged", "adapter"] = "merged"
    server_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW. `clip_grad` is the largest gradient norm; 0 turns clipping off."""

    lr: float = bounded(1e-6, above=0)
    min_lr: float = bounded(0.0, least=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = bounded(0, least=0)
    betas: tuple[float, float] = bounded((0.9, 0.95), least=0, below=1)
    eps: float = bounded(1e-8, above=0)
    weight_decay: float = bounded(0.01, least=0)
    clip_grad: float = bounded(1.0, least=0)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """On the test files every `every` steps (0: never), before the first and after the last;
    `limit` rows at most. `sampled` and `shuffled` add accuracy when sampling, and with images
    shuffled between questions.

    Of `megavlm evaluate`: `model` and `baseline` are a checkpoint, a HuggingFace folder or an
    adapter's (null: the recipe's model, and none); `samples` responses to each question (1 is
    greedy, more are drawn at rollout.temperature), `episodes` in all at most, of each
    model: `episodes` // `samples` questions, and at least one."""

    every: int = bounded(0, least=0)
    before: bool = False
    after: bool = False
    limit: int | None = bounded(None, least=1)
    sampled: bool = True
    shuffled: bool = True
    model: str | None = None
    baseline: str | None = None
    samples: int = bounded(1, least=1)
    episodes: int | None = bounded(None, least=1)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Every `every` steps (0: after the last one only). `async_save`: training goes on while files
    are written, for one copy of a rank's shards in host memory. `step` resumes from that step, not
    from the latest. `keep_last` null keeps all steps; a number keeps so many, and besides them
    multiples of `keep_every` and the best by `best_metric`: a name of metrics.jsonl (its mean since
    the last checkpoint), or evaluation/ with greedy, sampled, valid, blind or shuffled.
    `export_hf` also writes a HuggingFace folder at the end; `verify_export` compares transformers'
    logits on it with the trainer's."""

    every: int = bounded(0, least=0)
    async_save: bool = True
    step: int | None = bounded(None, least=0)
    keep_last: int | None = bounded(None, least=1)
    keep_every: int | None = bounded(None, least=1)
    best_metric: str | None = None
    best_mode: Literal["max", "min"] = "max"
    export_hf: bool = False
    verify_export: bool = False


@dataclass(frozen=True, kw_only=True)
class Config:
    run: Run
    model: Model
    lora: LoRA
    parallel: Parallel
    recompute: Recompute
    data: Data
    algorithm: Algorithm
    environment: Environment
    reward: Reward
    curriculum: Curriculum
    rollout: Rollout
    optimizer: Optimizer
    evaluation: Evaluation
    checkpoint: Checkpoint

    def to_dict(self) -> dict[str, Any]:
        """Plain values, sections in the order above, tuples as tuples."""
        return asdict(self)
