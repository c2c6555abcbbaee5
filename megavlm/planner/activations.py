"""Modelled activations of a recipe: the tensors that autograd keeps of a layer.

They are counted for the longest pack by the method of arXiv 2205.05198, for grouped queries and
gated MLPs without dropout, and are within 3 % of what autograd keeps on a CPU. The delta rule of
linear attention is not part of that comparison: its values are those that flash-linear-attention's
kernel saves.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.schema import Config
from megavlm.families import family
from megavlm.models.common.config import ModelOptions
from megavlm.models.sizes import ParameterSize

EXPERT_IMBALANCE = 1.5  # assumed: tokens of the busiest expert rank over the mean
_CHUNK = 64  # tokens of a chunk in flash-linear-attention's kernel


def activation_bytes(
    config: Config, hf_config: Any, held: Iterable[ParameterSize]
) -> tuple[float, float]:
    """Return the bytes that autograd keeps of one microbatch (the longest pack) in the layers with
    these parameters, and the additional bytes while a part is recomputed.
    """
    options, recompute = ModelOptions.from_config(config), config.recompute
    architecture = family(hf_config.model_type).architecture(hf_config)
    layers = sorted({int(x.name.split(".layers.")[1].split(".")[0]) for x in held if _of_layer(x)})
    per_layer = [_layer_values(config, architecture, layer) for layer in layers]
    size = config.data.pack_tokens / config.parallel.context * options.dtype.itemsize
    hidden = architecture["hidden_size"] / _sequence_ranks(config)
    if recompute.language == "full":  # only the inputs of blocks are kept
        blocks = -(-len(layers) // recompute.layers)
        most = max(x.others + x.core + x.mlp for x in per_layer)
        return size * hidden * blocks, size * recompute.layers * most
    again = recompute.modules if recompute.language == "selective" else ()
    core, mlp = "core_attn" in again, bool({"mlp", "moe"} & set(again))
    kept = sum(
        x.others + (x.core_inputs if core else x.core) + (0.0 if mlp else x.mlp) for x in per_layer
    )
    return size * kept, size * max(max(core * x.core, mlp * x.mlp) for x in per_layer)


class _LayerValues(NamedTuple):
    """Values per token that autograd keeps in a layer. core: Values of core attention, or of Gated
    DeltaNet between its projections. core_inputs: Values that are kept in their place if core
    attention is recomputed. mlp: Values of the MLP. others: Values of norms and projections.
    """

    others: float
    core: float
    core_inputs: float
    mlp: float


def _layer_values(config: Config, architecture: dict[str, Any], layer: int) -> _LayerValues:
    none = [0] * architecture["num_layers"]
    is_linear = architecture.get("linear_attention_freq", none)[layer]
    has_experts = architecture.get("moe_layer_freq", none)[layer]
    # Input and output of both norms.
    norms = 2 * (_norm_inputs(config, architecture) + 1) * architecture["hidden_size"]
    if architecture.get("post_norms"):  # the input of two more, whose output is added
        norms += 2 * _norm_inputs(config, architecture) * architecture["hidden_size"]
    attention = _linear_values if is_linear else _attention_values
    others, core, core_inputs = attention(config, architecture)
    mlp = _expert_values if has_experts else _mlp_values
    return _LayerValues(
        norms / _sequence_ranks(config) + others, core, core_inputs, mlp(config, architecture)
    )


def _attention_values(config: Config, architecture: dict[str, Any]) -> tuple[float, float, float]:
    """Return the values that attention keeps: others, core and core_inputs of _LayerValues."""
    parallel, tensor = config.parallel, config.parallel.tensor
    head, groups = architecture["kv_channels"], architecture["num_query_groups"]
    has_norms, has_gate = (
        bool(architecture.get(x)) for x in ("qk_layernorm", "attention_output_gate")
    )
    query = head * architecture["num_attention_heads"] / tensor
    # With more tensor ranks than key-value heads, several ranks hold the same head.
    key = head * max(groups, tensor) / tensor
    copies = query * (tensor < groups)  # heads of several groups are copied
    # Queries and keys after the rotation, which keeps nothing of before; with context parallelism
    # also keys and values of all tokens.
    core = query + key
    if parallel.context > 1:
        core += 2 * parallel.context * key
    core_inputs = query + key if has_norms else copies
    # The fused projection, of which values and the norms' inputs are views. Ranks that share a
    # head gather it.
    gathered = tensor if tensor > groups else 1
    projection = (1 + has_gate) * query * gathered + 2 * key * gathered * groups / max(
        groups, tensor
    )
    others = query  # the output
    if parallel.context == 1 or has_norms:
        others += projection
    else:
        core_inputs += projection
    if has_norms:
        inputs = _norm_inputs(config, architecture)
        others += copies if inputs == 1 else inputs * (query + key)
    if has_gate:  # the gated output, and the gates
        others += query + copies
    return others, core, core_inputs


def _linear_values(config: Config, architecture: dict[str, Any]) -> tuple[float, float, float]:
    """Return the values that Gated DeltaNet keeps: others, core and core_inputs of _LayerValues.
    Context ranks share its heads and have all tokens, so that a rank's values per token of its own
    do not depend on them.
    """
    keys, values, heads = _linear_sizes(config, architecture)
    channels, wide = 2 * keys + values, _wide(config)
    # The convolution's input, once for each tap, and its output before the activation.
    core = (architecture["linear_conv_kernel_dim"] + 1) * channels
    # Write strength, and inputs and outputs of the softplus in the decay.
    core += (1 + 2 * wide) * heads
    core += _rule_values(config, architecture)
    # The norm's input and the gate before and after its activation, in fp32, a scale for each head,
    # and the normed values without and with their weight.
    core += (3 * wide + 2) * values + wide * heads
    return values, core, channels + values + 2 * heads


def _rule_values(config: Config, architecture: dict[str, Any]) -> float:
    """Return the values that the kernel of the delta rule saves (chunk_gated_delta_rule of fla-core
    0.6): normed queries and keys with their scales, values, the solved matrix of each chunk, decay,
    write strength, and the state at the start of each response.
    """
    keys, values, heads = _linear_sizes(config, architecture)
    wide, head = _wide(config), architecture["linear_key_head_dim"]
    saved = 2 * keys + values + (_CHUNK + wide + 1) * heads + wide * 2 * keys / head
    if isinstance(config.algorithm, PolicyOptimization):
        mean = config.rollout.max_new_tokens / 2  # tokens of a response, as in `work`
        saved += wide * values * head / mean
    return saved


def _linear_sizes(config: Config, architecture: dict[str, Any]) -> tuple[float, float, float]:
    """Return the sizes of all keys and of all values of a token, and the number of value heads, on
    a tensor rank.
    """
    keys = architecture["linear_num_key_heads"] * architecture["linear_key_head_dim"]
    heads = architecture["linear_num_value_heads"]
    values = heads * architecture["linear_value_head_dim"]
    tensor = config.parallel.tensor
    return keys / tensor, values / tensor, heads / tensor


def _mlp_values(config: Config, architecture: dict[str, Any]) -> float:
    # Gate and up projections and their product; without the fused kernel also two intermediates.
    inner = 3 if config.model.fusions else 5
    return float(inner * architecture["ffn_hidden_size"] / config.parallel.tensor)


def _expert_values(config: Config, architecture: dict[str, Any]) -> float:
    parallel, hidden = config.parallel, architecture["hidden_size"]
    # As in an MLP, and without the fused kernel the product before it is scaled by the expert's
    # probability.
    inner = 3 if config.model.fusions else 6
    expert = inner * architecture["moe_ffn_hidden_size"] / parallel.expert_tensor
    imbalance = EXPERT_IMBALANCE if parallel.expert > 1 else 1
    routed = architecture["moe_router_topk"] * imbalance / _sequence_ranks(config)
    values = routed * parallel.expert_tensor * (hidden + expert)
    if shared := architecture.get("moe_shared_expert_intermediate_size"):
        values += _mlp_values(config, architecture | {"ffn_hidden_size": shared})
        if architecture["moe_shared_expert_gate"]:  # the output before its gate
            values += hidden / _sequence_ranks(config)
    return float(values)


def _norm_inputs(config: Config, architecture: dict[str, Any]) -> int:
    """Return the number of values that stand for a value of a norm's input: megatron-core's own
    zero-centred norms keep it in fp32.
    """
    is_wide = architecture.get("layernorm_zero_centered_gamma") and not config.model.fusions
    return _wide(config) if is_wide else 1


def _wide(config: Config) -> int:
    """Return the number of the model's values that take as many bytes as one in fp32."""
    return 4 // ModelOptions.from_config(config).dtype.itemsize


def _sequence_ranks(config: Config) -> int:
    return config.parallel.tensor if config.parallel.sequence else 1


def _of_layer(parameter: ParameterSize) -> bool:
    return "decoder.layers." in parameter.name
