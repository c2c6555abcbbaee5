"""Failures of calls that leave the trainer's process."""

from typing import Literal

FailureKind = Literal["timeout", "memory", "output", "exception", "value", "crash", "remote"]


class CallFailure(Exception):
    """Failure of a call to a user's function or to a service: a limit was exceeded, an exception
    was raised, or the answer has the wrong form.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message
