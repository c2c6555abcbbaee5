"""The `distillation` section: teachers that score what the policy samples."""

import math
import re
from dataclasses import dataclass, field
from string import Formatter
from typing import Literal

from megavlm.config.section import Section, bounded

_LABEL = re.compile(r"[A-Za-z_][\w-]*")


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """One of the teachers."""

    urls: tuple[str, ...] = ()
    """SGLang servers of the teacher, such as http://node:30000, which share its requests. It has
    the policy's tokenizer; its images may have another number of tokens. A key of the servers is in
    the environment variable MEGAVLM_TEACHER_API_KEY. Empty: the teacher is the policy itself, on
    the rollout servers and with the weights that sampled; it needs a `hint`."""

    rows: tuple[str, ...] = ()
    """Values of the column `data.category_key` whose rows the teacher scores. No two teachers may
    have the same. Empty: the rows that no other teacher has."""

    weight: float = 1.0
    """Factor of `distillation.coefficient` in the rows that the teacher scores; above 0."""

    hint: str | None = None
    """Text that only the teacher reads, at the end of the last message before a response: {answer}
    stands for the reference answer, {NAME} for a column of `data.extra_keys`. A row in which one of
    them is empty is not scored."""

    @property
    def is_policy(self) -> bool:
        """True if the teacher is the policy itself."""
        return not self.urls

    @property
    def columns(self) -> tuple[str, ...]:
        """Names in braces in the hint."""
        return tuple(
            name for _, name, _, _ in Formatter().parse(self.hint or "") if name is not None
        )


@dataclass(frozen=True, kw_only=True)
class Distillation(Section):
    """On-policy distillation (arXiv 2306.13649): teachers give the log-prob of each token that the
    policy samples, and the KL divergence from the teacher of a row is part of the loss.
    """

    teachers: dict[str, TeacherConfig] = field(default_factory=dict)
    """Teachers by name. A row has one teacher, or none, and is then trained on by its reward
    only."""

    coefficient: float = bounded(1.0, above=0)
    """Coefficient of the KL divergence of the policy from the teacher in the loss. To learn from
    only teachers, set `reward.name` to zero and `algorithm.kl_coefficient` to 0."""

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
    """Requests in flight to each teacher. A request has the responses to one prompt. Requests to
    the policy itself count in `rollout.concurrency`."""

    timeout: float = bounded(300.0, above=0)
    """Seconds that a request to a teacher may take, and that it waits for a teacher whose servers
    are all lost."""

    @property
    def is_forward(self) -> bool:
        """True if the loss needs the teacher's likeliest tokens at each position."""
        return self.divergence == "forward_topk"

    def teacher_of(self, category: str) -> str | None:
        """Return the name of the teacher of the rows of a category, or None if they have none."""
        named = {row: name for name, teacher in self.teachers.items() for row in teacher.rows}
        others = (name for name, teacher in self.teachers.items() if not teacher.rows)
        return named.get(category) or next(others, None)

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
        self._check_teachers()

    def _check_teachers(self) -> None:
        owners: dict[str | None, str] = {}
        for name, teacher in self.teachers.items():
            key = f"distillation.teachers.{name}"
            if not _LABEL.fullmatch(name):
                raise ValueError(
                    f"distillation.teachers has the name {name!r}: use letters, digits, _ and -"
                )
            for url in teacher.urls:
                if not url.startswith(("http://", "https://")):
                    raise ValueError(
                        f"{key}.urls has {url!r}, but that is not a URL: write http://HOST:PORT"
                    )
            if not (math.isfinite(teacher.weight) and teacher.weight > 0):
                raise ValueError(f"{key}.weight={teacher.weight} must be a number above 0")
            if teacher.is_policy and not teacher.hint:
                raise ValueError(
                    f"{key} has no urls, so that it is the policy itself, which learns nothing "
                    f"without a hint: set {key}.urls or {key}.hint"
                )
            try:
                list(Formatter().parse(teacher.hint or ""))
            except ValueError as error:
                raise ValueError(
                    f"{key}.hint={teacher.hint!r} does not name its columns ({error}): write "
                    "{answer}, and {{ for a brace"
                ) from error
            for row in teacher.rows or (None,):
                if row in owners:
                    what = "no rows" if row is None else f"the rows {row!r}"
                    raise ValueError(
                        f"{key} and distillation.teachers.{owners[row]} both have {what}, but a "
                        "row has one teacher: change distillation.teachers.*.rows"
                    )
                owners[row] = name
