"""Checks of a run's layout before it starts: the world size fits the axes, and so do the sizes in
the model folder's config.json. Nothing here imports megatron-core.
"""

from pathlib import Path
from typing import Any

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.schema import Config
from megavlm.models.common.layout_rules import check_model_layout

Values = dict[str, Any]  # of a config.json


def check_ranks(config: Config, world_size: int) -> None:
    """Raise ValueError if `world_size` ranks do not fit the axes of `parallel`, or a data-parallel
    rank would get no work.
    """
    parallel = config.parallel
    size, data = parallel.model_size, parallel.data
    axes = " x ".join(
        f"parallel.{axis}={getattr(parallel, axis)}"
        for axis in ("tensor", "context", "pipeline")
        if axis == "tensor" or getattr(parallel, axis) > 1
    )
    if world_size % size:
        raise ValueError(
            f"{axes} does not divide the world size {world_size}: "
            f"start a multiple of {size} ranks or change the layout"
        )
    if data is not None and size * data != world_size:
        raise ValueError(
            f"{axes} x parallel.data={data} is {size * data} ranks, but the "
            f"world size is {world_size}: start {size * data} ranks, or set parallel.data=null "
            "to take what there is"
        )
    if world_size % parallel.expert_ranks:
        raise ValueError(
            f"parallel.expert={parallel.expert} x parallel.expert_tensor={parallel.expert_tensor} "
            f"x parallel.pipeline={parallel.pipeline} does not divide the world size {world_size}: "
            f"start a multiple of {parallel.expert_ranks} ranks or change the layout"
        )
    algorithm, ranks = config.algorithm, world_size // size
    if isinstance(algorithm, PolicyOptimization):
        work = algorithm.prompts_per_step // algorithm.minibatches
        keys = "algorithm.prompts_per_step / algorithm.minibatches"
    else:
        work, keys = algorithm.batch_size, "algorithm.batch_size"
    if work < ranks:
        raise ValueError(
            f"{keys} is {work}, too few for {ranks} data-parallel ranks: "
            "raise it or start fewer ranks"
        )


def check_sizes(config: Config, values: Values, folder: Path) -> None:
    """Raise ValueError if the trainer's or the server's ranks cannot split the model in `folder`.

    values: its config.json.
    """
    text = values.get("text_config") or values  # older folders have the text keys at the top
    architecture = architecture_of(text, folder)
    parallel: Any = config.parallel  # has the fields of Layout and of ModelOptions used below
    vocab_size = _count(text, "vocab_size", folder)
    recompute = config.recompute
    check_model_layout(
        architecture,
        parallel,
        parallel,
        vocab_size=vocab_size,
        recompute_layers=recompute.layers if recompute.language == "full" else 1,
    )
    # The server repeats key-value heads and pads the vocabulary.
    heads, ranks = architecture["num_attention_heads"], config.rollout.tensor_parallel
    if heads % ranks:
        raise ValueError(
            f"rollout.tensor_parallel={ranks} does not divide the model's "
            f"num_attention_heads={heads}: set rollout.tensor_parallel to a number that does"
        )
    _check_adapters(config, architecture)


def architecture_of(text: Values, folder: Path) -> Values:
    """Return the values that layout rules need, named as in a family's `architecture`."""

    def count(name: str) -> int:
        return _count(text, name, folder)

    heads = count("num_attention_heads")
    architecture: Values = {
        "num_layers": count("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_query_groups": count("num_key_value_heads"),
        "ffn_hidden_size": count("intermediate_size"),
        "kv_channels": text.get("head_dim") or count("hidden_size") // heads,
    }
    # transformers 5 writes another name than the hub's files have.
    name = "num_local_experts" if "num_local_experts" in text else "num_experts"
    if text.get(name):
        dense, step = text.get("mlp_only_layers") or (), text.get("decoder_sparse_step") or 1
        architecture |= {
            "num_moe_experts": count(name),
            "moe_ffn_hidden_size": count("moe_intermediate_size"),
            "moe_layer_freq": [
                int(index not in dense and (index + 1) % step == 0)
                for index in range(architecture["num_layers"])
            ],
        }
    return architecture


def _check_adapters(config: Config, architecture: Values) -> None:
    """Raise ValueError if lora.targets names a component that the model does not have."""
    has_experts = architecture.get("moe_layer_freq", [0])
    for component, there in (
        ("language.experts", any(has_experts)),
        ("language.mlp", not all(has_experts)),
    ):
        if config.lora.rank and component in config.lora.targets and not there:
            kind = "experts" if component == "language.experts" else "layers without experts"
            raise ValueError(
                f"lora.targets holds {component}, but the model has no {kind}: remove it"
            )


def _count(values: Values, name: str, folder: Path) -> int:
    count = values.get(name)
    if not isinstance(count, int):
        raise ValueError(f"{folder / 'config.json'} has no {name}: give a complete model folder")
    return count
