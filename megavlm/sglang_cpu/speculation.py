"""Speculative decoding on a CPU: the parts of SGLang for which it has kernels of GPUs, or of CPUs
with AMX, only. Drafts are chains (speculative_eagle_topk=1); see also sgl_kernel/draft_chains.py.
"""

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megavlm.sglang_cpu.sgl_kernel.draft_chains import verify_tree_greedy_cpu
else:  # megavlm need not be importable in a server
    from sgl_kernel.draft_chains import verify_tree_greedy_cpu


def sample_at_temperature(module: Any) -> None:
    """Sample the target's tokens where SGLang takes the likeliest on a CPU, whatever the
    temperature. module: eagle_utils.
    """
    module._verify_uses_greedy = lambda *, is_all_greedy, **_: is_all_greedy
    module.tree_speculative_sampling_target_only = sample_chain


def sample_chain(*, target_probs: Tensor, **verification: Any) -> None:
    """Sample the target's token at every place of the chains, and accept the drafts that equal it.
    This is rejection sampling: a draft is accepted with its probability under the target, and the
    token in place of a rejected one follows the target's distribution without it. target_probs: [B,
    width, V].
    """
    tokens = torch.multinomial(target_probs.flatten(0, 1), 1).view(target_probs.shape[:2])
    verify_tree_greedy_cpu(target_predict=tokens, **verification)


def draft_by_own_attention(module: Any) -> None:
    """Let the draft model attend by its own `torch_native` backend. module: draft_utils."""
    module.DraftBackendFactory.create_draft_extend_backend = lambda factory: None
    module.DraftBackendFactory.create_decode_backend = draft_steps


def draft_steps(factory: Any) -> Any:
    """Return the backends of a chain's drafts after the first one."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    runner, count = factory.draft_model_runner, factory.speculative_num_steps - 1
    if count < 1:
        return None
    backends = [TorchNativeAttnBackend(runner) for _ in range(count)]
    for step, backend in enumerate(backends):
        backend.drafts = step + 1

    def init_forward_metadata(forward_batch: Any) -> None:
        for backend in backends:
            backend.init_forward_metadata(forward_batch)

    return SimpleNamespace(attn_backends=backends, init_forward_metadata=init_forward_metadata)


def chains(forward_batch: Any, drafts: int) -> Any:
    """Return a batch whose lengths include its drafts, as attention over the cache needs it."""
    if not drafts and not forward_batch.forward_mode.is_target_verify():
        return forward_batch
    batch = copy.copy(forward_batch)
    if not drafts:
        drafts = forward_batch.spec_info.draft_token_num
        batch.extend_prefix_lens = forward_batch.seq_lens
        batch.extend_seq_lens = torch.full_like(forward_batch.seq_lens, drafts)
    batch.seq_lens = forward_batch.seq_lens + drafts
    return batch


def keep_accepted_states(module: Any) -> None:
    """Give each request the recurrent states of its last accepted token. module:
    hybrid_linear_attn_backend.
    """

    def scatter(
        caches: Any, slots: Tensor, steps: Tensor, tracked: Any, tracked_steps: Any, **_: Any
    ) -> None:
        assert tracked is None, "on a CPU, prefixes keep no states of their own"
        windows = zip(caches.conv, caches.intermediate_conv_window, strict=True)
        for kept, by_step in [(caches.temporal, caches.intermediate_ssm), *windows]:
            kept[:, slots.long()] = by_step[:, torch.arange(len(steps)), steps.long()]

    module.scatter_mamba_states_after_mtp_verify = scatter
