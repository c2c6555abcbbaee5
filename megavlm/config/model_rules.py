"""Rules of and between the sections about the model: layout, attention, recomputation, adapters."""

from megavlm.config.schema import Config, LoRA, Parallel

# megatron-core's names; what needs no Transformer Engine.
RECOMPUTED_MODULES = {"core_attn", "mlp", "moe"}
# models.common.lora_targets', without importing megatron-core.
COMPONENTS = (
    "language.attention",
    "language.mlp",
    "language.experts",
    "vision.attention",
    "vision.mlp",
    "vision.merger",
)
LANGUAGE, VISION = "language_model.", "visual."
HALF_PRECISION = ("flash", "transformer_engine")  # kernels that take nothing else


def check_model(config: Config) -> None:
    _check_parallel(config.parallel)
    if config.model.dtype == "float32" and config.model.attention in HALF_PRECISION:
        raise ValueError(
            f"model.attention={config.model.attention} does not compute in model.dtype=float32: "
            "set model.dtype=bfloat16, or model.attention to sdpa, flex or auto"
        )
    unknown = set(config.recompute.modules) - RECOMPUTED_MODULES
    if unknown:
        raise ValueError(
            f"recompute.modules names {sorted(unknown)[0]}, which cannot be recomputed alone: "
            f"choose from {', '.join(sorted(RECOMPUTED_MODULES))}"
        )
    if config.lora.rank:
        _check_lora(config.lora, config)


def _check_parallel(parallel: Parallel) -> None:
    if parallel.sequence and parallel.tensor == 1:
        raise ValueError(
            "parallel.sequence=true splits activations over the tensor-parallel ranks, and "
            "parallel.tensor=1 has only one: set parallel.tensor above 1 or parallel.sequence=false"
        )
    if parallel.pipeline == 1:
        unused = {"virtual": 1, "first_stage_layers": None, "last_stage_layers": None}
        for key, default in unused.items():
            value = getattr(parallel, key)
            if value != default:
                raise ValueError(
                    f"parallel.{key}={value} is about pipeline stages, and parallel.pipeline=1 has "
                    "none: remove it or raise parallel.pipeline"
                )
    if parallel.data is not None and parallel.num_ranks % parallel.expert_ranks:
        raise ValueError(
            f"parallel.expert={parallel.expert} x parallel.expert_tensor={parallel.expert_tensor} "
            f"x parallel.pipeline={parallel.pipeline} does not divide the {parallel.num_ranks} "
            "ranks of the other axes: change one of them or raise parallel.data"
        )


def _check_lora(lora: LoRA, config: Config) -> None:
    if not (config.model.freeze_tower and config.model.freeze_merger):
        raise ValueError(
            f"lora.rank={lora.rank} trains adapters alone, so the tower cannot be trained "
            "itself: set model.freeze_tower=true and model.freeze_merger=true, and add "
            "vision.attention, vision.mlp or vision.merger to lora.targets to adapt it"
        )
    if not lora.targets:
        raise ValueError(
            f"lora.targets=[] leaves nothing to train with lora.rank={lora.rank}: "
            f"choose from {', '.join(COMPONENTS)}, or set lora.rank=0"
        )
    for target in lora.targets:
        if target not in COMPONENTS and not target.startswith((LANGUAGE, VISION)):
            raise ValueError(
                f"lora.targets holds {target!r}: choose from {', '.join(COMPONENTS)}, or give a "
                f"full path such as {LANGUAGE}decoder.layers.*.self_attention.linear_qkv"
            )
    in_tower = any(target.startswith(("vision.", VISION)) for target in lora.targets)
    if lora.dropout and in_tower and config.recompute.tower:
        raise ValueError(
            f"lora.dropout={lora.dropout} with adapters in the tower does not go with "
            "recompute.tower=true, which would drop other entries: set one of them to 0 and false"
        )
