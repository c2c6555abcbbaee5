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

    kl_estimator: Literal["k2", "k3", "unbiased"] = "unbiased"
    """Estimator of the KL divergence per token, as in `algorithm.kl_estimator`, with the teacher in
    place of the reference. The gradient of k2 and unbiased is that of the KL divergence at each
    token, where unbiased also holds after updates; k3 has another one."""

    concurrency: int = bounded(32, least=1)
    """Requests in flight to the teacher. A request has the responses to one prompt."""

    timeout: float = bounded(300.0, above=0)
    """Seconds that a request to the teacher may take."""
