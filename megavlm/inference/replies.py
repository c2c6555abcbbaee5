"""What servers answer to questions about themselves."""

from typing import Any

import httpx


def json_object(reply: httpx.Response) -> dict[str, Any]:
    """Raises ValueError for an answer that is no JSON object."""
    answer = reply.json()
    if not isinstance(answer, dict):
        raise ValueError(f"{str(answer)[:100]!r} is no JSON object")
    return answer
