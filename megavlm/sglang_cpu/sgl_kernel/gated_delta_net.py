"""PyTorch implementations of the `sgl_kernel` functions that SGLang's Qwen3.5 calls on a CPU.

They are written for tests: the recurrence runs token by token. SGLang's pools have, for each
request's slot, the last inputs of the convolution [slots, channels, W - 1] and the states [slots,
heads, V, K]. The sequences of a batch are padded to the longest; a padding token does not change
the state.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve prompts. x: [channels, T]. weight: [channels, W]. Returns [channels, T]."""
    outputs = []
    sizes = query_start_loc.diff().tolist()
    for row, own in enumerate(x.split(sizes, dim=1)):
        slot = cache_indices[row]
        past = conv_states[slot] * has_initial_state[row]
        window = torch.cat([past.to(own), own], dim=1)
        outputs.append(_convolve(window[None], weight, bias, activation)[0])
        conv_states[slot] = window[:, -past.shape[1] :].to(conv_states)
    return torch.cat(outputs, dim=1)


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    conv_state_indices: Tensor,
    intermediate_conv_window: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Convolve one more token of each of B requests. x: [B, channels]. Returns the same shape.

    With `intermediate_conv_window` [requests, t, channels, W - 1] they are t drafts, [B, channels,
    t]. Their windows are written to its first rows, and the slots keep theirs.
    """
    slots = conv_state_indices.long()
    tokens = x if intermediate_conv_window is not None else x[:, :, None]
    window = torch.cat([conv_states[slots].to(x), tokens], dim=2)
    if intermediate_conv_window is None:
        conv_states[slots] = window[:, :, 1:].to(conv_states)
    else:
        windows = window[:, :, 1:].unfold(2, conv_states.shape[2], 1).transpose(1, 2)
        intermediate_conv_window[: len(x)] = windows.to(conv_states)
    output = _convolve(window, weight, bias, activation).view(x.shape)
    return torch.empty_like(x).copy_(output)  # SGLang views it, and relies on the strides of x


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Run the delta rule over prompts, and update the slots of `initial_state`. q, k: [1, T, key
    heads, K]. v: [1, T, heads, V]. g (log decay), beta: [1, T, heads]. Returns the output [1, T,
    heads, V].
    """
    assert use_qk_l2norm_in_kernel
    sizes = cu_seqlens.diff().tolist()
    inputs = (pad_sequence(x[0].float().split(sizes), batch_first=True) for x in (q, k, v, g, beta))
    output = _delta_rule(tuple(inputs), initial_state, initial_state_indices.long())
    rows = [row[:size] for row, size in zip(output, sizes, strict=True)]
    return torch.cat(rows)[None].to(v), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool,
    intermediate_states_buffer: Tensor | None = None,
    cache_steps: int = 1,
    **_: Any,
) -> Tensor:
    """Run the delta rule for `cache_steps` more tokens of each of B requests, one if they are no
    drafts. q, k: [1, B x tokens, key heads, K]. The states after each draft are written to the
    first rows of `intermediate_states_buffer` [requests, tokens, ..], and the slots keep theirs.
    """
    assert use_qk_l2norm_in_kernel
    decay, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    inputs = tuple(x[0].float().unflatten(0, (-1, cache_steps)) for x in (q, k, v, decay, beta))
    slots = initial_state_indices[: len(inputs[0])].long()
    output = _delta_rule(inputs, initial_state_source, slots, intermediate_states_buffer)
    return output.flatten(0, 1)[None].to(v)


def fused_gdn_gating_cpu(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log decay and beta (write strength), both fp32 [1, T, heads]."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int
) -> tuple[Tensor, ...]:
    """Split the projections [T, ..] into [q, k, v], z [T, heads, V], b and a."""
    values = num_v_heads * v_dim
    mixed, z = qkvz.split([2 * num_k_heads * k_dim + values, values], dim=-1)
    parts = (mixed, z.unflatten(-1, (num_v_heads, -1)), *ba.chunk(2, dim=-1))
    return tuple(part.contiguous() for part in parts)


def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, z: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of x over its last dim, gated by silu(z)."""
    normed = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (normed * F.silu(z.float())).to(x)


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Return the zero-centered RMS norms of the heads of q and k, [heads x T, head_dim]."""
    return _zero_centred_norm(q, q_weight, eps), _zero_centred_norm(k, k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as fused_qk_gemma_rmsnorm_cpu, for heads with query and gate. Also returns the gates [T,
    heads x D].
    """
    q, gate = q_gate.unflatten(-1, (num_heads, -1)).chunk(2, dim=-1)
    norms = fused_qk_gemma_rmsnorm_cpu(
        q.reshape(-1, head_dim), k.reshape(-1, head_dim), q_weight, k_weight, eps, head_dim
    )
    return *norms, gate.flatten(-2)


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiply x by sigmoid(gate) in place."""
    x *= gate.reshape(x.shape).sigmoid()


def _convolve(window: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    assert activation in ("silu", "swish")
    return F.silu(F.conv1d(window, weight[:, None], bias, groups=len(weight)))


def _delta_rule(
    inputs: tuple[Tensor, ...], states: Tensor, slots: Tensor, by_token: Tensor | None = None
) -> Tensor:
    """Run B sequences of t tokens from their states, and update the states, or with `by_token` [..,
    t, heads, V, K] write the states after each token there. inputs: q, k [B, t, key heads, K], v
    [B, t, heads, V], log decay and beta [B, t, heads]. Returns [B, t, heads, V].
    """
    q, k, v, decay, beta = inputs
    copies = v.shape[2] // k.shape[2]
    q, k = (
        (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(copies, 2)
        for x in (q, k)
    )
    q, decay, outputs = q * q.shape[-1] ** -0.5, decay.exp(), []
    state = states[slots].float()  # [B, heads, V, K]
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None]
        recalled = (state @ k[:, t, :, :, None])[..., 0]
        write = (v[:, t] - recalled) * beta[:, t, :, None]
        state = state + write[..., None] * k[:, t, :, None]
        outputs.append((state @ q[:, t, :, :, None])[..., 0])
        if by_token is not None:
            by_token[: len(slots), t] = state.to(by_token)
    if by_token is None:
        states[slots] = state.to(states)
    return torch.stack(outputs, dim=1)


def _zero_centred_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    heads = x.reshape(-1, len(weight)).float()
    return F.rms_norm(heads, heads.shape[-1:], 1 + weight.float(), eps).to(x)


OPERATORS = (  # SGLang looks them up as torch.ops.sgl_kernel.NAME
    fused_gdn_gating_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_rmsnorm_gated_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_sigmoid_mul_cpu,
)


def install() -> None:
    """Set the operators as attributes of torch.ops.sgl_kernel, where SGLang looks them up."""
    for function in OPERATORS:
        setattr(torch.ops.sgl_kernel, function.__name__, function)
