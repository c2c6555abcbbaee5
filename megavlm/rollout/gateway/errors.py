"""Requests that the gateway refuses."""


class BadRequest(ValueError):
    """A request that is answered with HTTP 400. The message is one sentence for the agent's author.

    code: OpenAI's name of the problem, if clients act on it.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class SessionEnded(Exception):
    """A request to a session whose episode has ended."""
