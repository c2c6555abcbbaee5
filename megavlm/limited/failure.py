"""Failures of calls that leave the trainer's process."""

from typing import Literal

FailureKind = Literal["timeout", "memory", "output", "exception", "value", "crash", "remote"]


class CallFailure(Exception):
    """Failure of a call of a user's function or of a service: a limit, an exception, or an answer
    of another form.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
