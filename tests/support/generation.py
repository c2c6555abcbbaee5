"""Generation by a client, from outside its runner."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from megavlm.inference.client import RolloutClient
from megavlm.inference.protocol import Response, is_complete


def generate(
    client: RolloutClient,
    prompts: Sequence[Any],
    *,
    begun: Sequence[Sequence[Response]] | None = None,
    refit: Callable[[], object] | None = None,
    **options: Any,
) -> list[list[Response]]:
    """Return what RolloutClient.generate returns. begun: Responses to each prompt so far."""

    async def push() -> None:
        assert refit is not None
        refit()

    groups = None if begun is None else [list(group) for group in begun]
    how = {"groups": groups, "refit": refit and push}
    return client.run(client.generate(prompts, **how, **options))


def generate_some(
    client: RolloutClient,
    prompts: Sequence[Any],
    enough: int,
    begun: Sequence[Sequence[Response]] | None = None,
    after: float = 0.0,
    **options: Any,
) -> list[list[Response]]:
    """Pause when `enough` groups are complete and `after` seconds have passed, and return the
    responses so far.
    """
    groups = [list(group) for group in begun or [()] * len(prompts)]

    async def until_enough() -> None:
        task = asyncio.create_task(client.generate(prompts, groups=groups, **options))
        await asyncio.wait({task}, timeout=after)
        while sum(map(is_complete, groups)) < enough:
            await asyncio.wait({task}, timeout=0.01)
            assert not task.done()
        await client.pause()
        task.cancel()
        await asyncio.wait({task})

    client.run(until_enough())
    return groups
