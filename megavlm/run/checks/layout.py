"""Checks of a run's layout before it starts: the world size and the sizes in the model's
config.json must fit the axes. This module does not import megatron-core.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megavlm.config.algorithm import PolicyOptimization, replays_routing
from megavlm.config.parallel import check_world
from megavlm.config.schema import Config
from megavlm.families import family, language_values
from megavlm.inference.server_args import FP8_BLOCK
from megavlm.models.common.layout_rules import check_model_layout

Values = Mapping[str, Any]  # values of a config.json


def check_ranks(config: Config, world_size: int) -> None:
    """Raise ValueError if `world_size` ranks do not fit the axes of `parallel`, or if a
    data-parallel rank would get no work.
    """
    parallel = config.parallel
    size, data = parallel.model_size, parallel.data
    check_world(parallel, world_size)
    if data is not None and size * data != world_size:
        raise ValueError(
            f"parallel.data={data} x parallel.tensor x parallel.context x parallel.pipeline is "
            f"{size * data} ranks, but the world size is {world_size}: start {size * data} ranks, "
            "or set parallel.data=null to take what there is"
        )
    if missing := [rank for rank in config.run.profile_ranks if rank >= world_size]:
        raise ValueError(
            f"run.profile_ranks={list(config.run.profile_ranks)} names rank {missing[0]}, but the "
            f"run has ranks 0 to {world_size - 1}: choose among them"
        )
    algorithm, ranks = config.algorithm, world_size // size
    if isinstance(algorithm, PolicyOptimization):
        work = algorithm.prompts_per_step // algorithm.minibatches * algorithm.responses_per_prompt
        keys = "algorithm.prompts_per_step / algorithm.minibatches x algorithm.responses_per_prompt"
    else:
        work, keys = algorithm.batch_size, "algorithm.batch_size"
    if work < ranks:
        raise ValueError(
            f"{keys} is {work}, too few for {ranks} data-parallel ranks: "
            "raise it or start fewer ranks"
        )


def check_sizes(config: Config, values: Values, folder: Path) -> None:
    """Raise ValueError if the trainer's or the server's ranks cannot split the model in `folder`.

    values: The values of its config.json.
    """
    architecture = language_sizes(values, folder)
    parallel: Any = config.parallel  # has the fields of Layout and ModelOptions used below
    vocab_size = language_values(values).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise _incomplete(folder, "vocab_size")
    recompute = config.recompute
    check_model_layout(
        architecture,
        parallel,
        parallel,
        vocab_size=vocab_size,
        recompute_layers=recompute.layers if recompute.language == "full" else 1,
    )
    # Only attention heads must divide: the server replicates key-value heads and pads the
    # vocabulary.
    heads, ranks = architecture["num_attention_heads"], config.rollout.tensor_parallel
    if heads % ranks:
        raise ValueError(
            f"rollout.tensor_parallel={ranks} does not divide the model's "
            f"num_attention_heads={heads}: set rollout.tensor_parallel to a number that does"
        )
    _check_adapters(config, architecture)
    if config.rollout.quantization is not None:
        _check_blocks(config, architecture)
    if replays_routing(config.algorithm) and "num_moe_experts" not in architecture:
        raise ValueError(
            "algorithm.routing_replay=true replays the experts of tokens, but the model in "
            f"{folder} has no experts: set it to false"
        )


def language_sizes(values: Values, folder: Path) -> Values:
    """Return the sizes of the model in `folder` that the layout rules need, from its
    config.json.
    """
    try:
        return family(values["model_type"]).language_sizes(language_values(values))
    except KeyError as error:
        raise _incomplete(folder, error.args[0]) from error


def _check_adapters(config: Config, architecture: Values) -> None:
    """Raise ValueError if lora.targets names a component that the model does not have, or a
    component that its servers cannot adapt.
    """
    targets = config.lora.targets if config.lora.rank else ()
    experts = architecture.get("moe_layer_freq", [0])
    shared = architecture.get("moe_shared_expert_intermediate_size")
    linear = architecture.get("linear_attention_freq", [0])
    for component, there, kind in (
        ("language.experts", any(experts), "experts"),
        ("language.mlp", not all(experts) or shared, "layers without experts"),
        ("language.linear_attention", any(linear), "layers of linear attention"),
    ):
        if component in targets and not there:
            raise ValueError(
                f"lora.targets holds {component}, but the model has no {kind}: remove it"
            )
    if config.rollout.lora != "adapter" or not any(experts) or "language.mlp" not in targets:
        return
    if not shared:
        raise ValueError(
            "rollout.lora=adapter cannot serve lora.targets=language.mlp of a mixture of experts "
            "without shared experts, whose dense layers SGLang takes no adapters on: set "
            "rollout.lora=merged or take language.mlp out"
        )
    if "language.experts" not in targets:
        raise ValueError(
            "rollout.lora=adapter cannot serve lora.targets=language.mlp without language.experts, "
            "because SGLang adapts a layer's experts together with its shared expert: add "
            "language.experts, or set rollout.lora=merged"
        )


def _check_blocks(config: Config, architecture: Values) -> None:
    """Raise ValueError if a rank of the trainer or of a server would have a part of a block of
    quantised weights.
    """
    parallel, rollout = config.parallel, config.rollout
    tensor = {
        "parallel.tensor": parallel.tensor,
        "rollout.tensor_parallel": rollout.tensor_parallel,
    }
    served = max(1, rollout.tensor_parallel // int(rollout.server_args.get("ep_size") or 1))
    expert_tensor = {
        "parallel.expert_tensor": parallel.expert_tensor,
        "rollout.tensor_parallel / ep_size": served,
    }
    dim, groups = architecture["kv_channels"], architecture["num_query_groups"]
    gated = 2 if architecture.get("attention_output_gate") else 1
    rows = (architecture["num_attention_heads"] * gated + 2 * groups) * dim
    # Key-value heads that server ranks share are whole. The trainer's ranks cut the rows of all
    # groups together.
    sizes = {
        "head_dim": (dim, {}),
        "rows of queries, keys and values": (rows, {"parallel.tensor": parallel.tensor}),
    }
    if not all(architecture.get("moe_layer_freq", [0])):
        sizes["intermediate_size"] = architecture["ffn_hidden_size"], tensor
    if "num_moe_experts" in architecture:
        sizes["moe_intermediate_size"] = architecture["moe_ffn_hidden_size"], expert_tensor
    if shared := architecture.get("moe_shared_expert_intermediate_size"):
        sizes["shared_expert_intermediate_size"] = shared, tensor
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        if name in architecture:
            sizes[name] = architecture[name], {}
    for name, (size, axes) in sizes.items():
        for key, ranks in (axes or {"": 1}).items():
            if size % (FP8_BLOCK * ranks):
                over = f" over {key}={ranks}" if key else ""
                raise ValueError(
                    f"rollout.quantization=fp8 has a scale for {FP8_BLOCK} x {FP8_BLOCK} weights, "
                    f"but the model's {name}={size}{over} is {size / ranks:g}, no multiple of "
                    f"{FP8_BLOCK}: {f'lower {key}, or' if key else 'take another model, or'} set "
                    "rollout.quantization=null"
                )


def _incomplete(folder: Path, name: str) -> ValueError:
    path = folder / "config.json"
    return ValueError(f"{path} has no {name}: give a complete model folder")
