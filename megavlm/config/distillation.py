"""The `distillation` section: a teacher that scores what the policy samples."""

from dataclasses import dataclass
from typing import Literal

from megavlm.config.section import Section, bounded


@dataclass(frozen=True, kw_only=True)
class Distillation(Section):
    """On-policy distillation (arXiv 2306.13649): a teacher gives the log-prob of each token that
    the policy samples, and their KL divergence is part of the loss.
    """

    urls: tuple[str, ...] = ()
    """SGLang servers of the teacher, such as http://node:30000, which share its requests. It has
    the policy's tokenizer, and images of as many tokens. Empty: no teacher. A key of the servers is
    in the environment variable MEGAVLM_TEACHER_API_KEY."""

    coefficient: float = bounded(1.0, above=0)
    """Coefficient of the KL divergence of the policy from the teacher in the loss. To learn from
    only the teacher, set `reward.name` to zero and `algorithm.kl_coefficient` to 0."""

    divergence: Literal["sampled", "forward_topk"] = "sampled"
    """Divergence in the loss. `sampled` is the reverse KL divergence, estimated from each sampled
    token (`distillation.kl_estimator`). `forward_topk` is the forward one at each token: the sum of
    p log(p / q) over the teacher's `distillation.top_k` likeliest tokens, with all others as one,
    where p is the teacher's probability and q the policy's (arXiv 2306.13649, section 3)."""

    top_k: int = bounded(0, least=0)
    """Tokens of the teacher at each position with `distillation.divergence: forward_topk`, which
    needs a value. A token has 8 bytes in memory and 11 in the server's answer. The metric
    `teacher_rest` is the probability of all others."""

    kl_estimator: Literal["k2", "k3", "unbiased"] = "unbiased"
    """Estimator of the KL divergence per sampled token, as in `algorithm.kl_estimator`, with the
    teacher in place of the reference. The gradient of k2 and unbiased is that of the KL divergence
    at each token, where unbiased also holds after updates; k3 has another one."""

    concurrency: int = bounded(32, least=1)
    """Requests in flight to the teacher. A request has the responses to one prompt."""

    timeout: float = bounded(300.0, above=0)
    """Seconds that a request to the teacher may take."""

    @property
    def is_forward(self) -> bool:
        """True if the loss needs the teacher's likeliest tokens at each position."""
        return self.divergence == "forward_topk"

    def check(self) -> None:
        if self.is_forward and not self.top_k:
            raise ValueError(
                "distillation.divergence=forward_topk is over the teacher's likeliest tokens, but "
                "distillation.top_k=0: set it to their number, for example 64"
            )
        if self.top_k and not self.is_forward:
            raise ValueError(
                f"distillation.top_k={self.top_k} has no effect with distillation.divergence="
                f"{self.divergence}: set that to forward_topk, or remove it"
            )
