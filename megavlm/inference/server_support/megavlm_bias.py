"""One logit bias for all requests of a batch, in each rank of a server.

A run's requests all suppress the same few hundred tokens by `logit_bias`. SGLang makes a dense
matrix [batch, vocabulary] in fp32 of it, adds it to the logits at each token, and copies it
whenever a request ends or joins: 0.6 GB for 1,024 requests and a vocabulary of 152k. Here requests
with equal biases share one, which is added to its own columns only.

SGLang loads this module as a plugin (megavlm_plugins.dist-info). Speculative decoding repeats the
matrix for the tokens that it verifies, and keeps it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Bias = Mapping[str, float]


class SharedBias:
    """A bias of `size` requests, in place of SGLang's matrix [size, vocabulary]."""

    def __init__(self, bias: Bias, size: int, vocab_size: int, device: Any) -> None:
        self.bias, self.size, self.vocab_size = bias, size, vocab_size
        by_token = {int(token): value for token, value in bias.items()}
        self.tokens = torch.tensor(list(by_token), device=device)
        self.values = torch.tensor(list(by_token.values()), device=device)

    def __getitem__(self, kept: Tensor) -> "SharedBias":
        return self._of(len(kept))

    def dense(self) -> Tensor:
        """Return SGLang's matrix."""
        dense = torch.zeros(self.size, self.vocab_size, device=self.tokens.device)
        dense[:, self.tokens] = self.values
        return dense

    def merged(self, other: "SharedBias") -> "SharedBias | Tensor":
        """Return the bias of both batches."""
        if self.bias == other.bias:
            return self._of(self.size + other.size)
        return torch.cat([self.dense(), other.dense()])

    def _of(self, size: int) -> "SharedBias":
        made = object.__new__(SharedBias)
        vars(made).update(vars(self), size=size)
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), options: Any = None
    ) -> Any:
        """Add the bias to the logits, as SGLang does with its bias matrix."""
        assert function is Tensor.add_ and not options, "SGLang only adds it to logits"
        logits, shared = args
        values = shared.values.to(logits.dtype)
        return logits.index_add_(1, shared.tokens, values.expand(len(logits), -1))


def shared_bias(biases: Sequence[Bias | None]) -> Bias | None:
    """Return the bias that all requests have, or None if they differ or have none."""
    first = biases[0] if biases else None
    return first if first and all(bias == first for bias in biases) else None


def merging(merge: Callable[..., Any]) -> Callable[..., Any]:
    """Return SGLang's merge_bias_tensor, extended by shared biases."""

    def merge_biases(left: Any, right: Any, *rest: Any) -> Any:
        if isinstance(left, SharedBias) and isinstance(right, SharedBias):
            return left.merged(right)
        left, right = (x.dense() if isinstance(x, SharedBias) else x for x in (left, right))
        return merge(left, right, *rest)

    return merge_biases


def install() -> None:
    """Make SGLang share the bias of a batch whose requests have the same."""
    from sglang.srt.sampling import sampling_batch_info

    info = sampling_batch_info.SamplingBatchInfo
    make = info.from_schedule_batch.__func__

    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        parameters = [request.sampling_params for request in batch.reqs]
        bias = shared_bias([one.logit_bias for one in parameters])
        if bias is None or not batch.spec_algorithm.is_none():
            return make(cls, batch, vocab_size)
        for one in parameters:
            one.logit_bias = None
        try:
            made = make(cls, batch, vocab_size)
        finally:
            for one in parameters:
                one.logit_bias = bias
        made.logit_bias = SharedBias(bias, len(parameters), vocab_size, batch.device)
        return made

    sampling_batch_info.merge_bias_tensor = merging(sampling_batch_info.merge_bias_tensor)
    info.from_schedule_batch = classmethod(from_schedule_batch)
