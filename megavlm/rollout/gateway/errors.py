"""Requests that the gateway refuses."""

import reprlib
from typing import Self

from pydantic import ValidationError


class BadRequest(ValueError):
    """A request that is answered with HTTP 400. The message is one sentence for the agent's author.

    code: OpenAI's name of the problem, if clients act on it.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code

    @classmethod
    def of(cls, error: ValidationError) -> Self:
        """Return the refusal of a body: its first key that is wrong, the value and the rule."""
        first = error.errors(include_url=False)[0]
        keys = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])
        value = "" if first["type"] == "missing" else f"={reprlib.repr(first['input'])}"
        rule = first["msg"].removeprefix("Value error, ")
        return cls(f"{''.join(keys).removeprefix('.') or 'the body'}{value}: {rule}")


class SessionEnded(Exception):
    """A request to a session whose episode has ended."""
