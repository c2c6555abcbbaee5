"""Episodes whose calls branch, made of token ids and images."""

from collections.abc import Sequence

import numpy as np

from megavlm.config.environment import EnvironmentConfig
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.environments.base import Observation
from megavlm.inference.protocol import Response
from megavlm.rewards.base import Score
from megavlm.rollout.observations import ObservationRenderer
from megavlm.rollout.trajectory import Episode, Group
from tests.support.responses import make_response


def respond(seed: int, size: int, limit: int = 250) -> Response:
    """Return a response of random tokens."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, limit, size)
    return make_response(ids, [-0.01 * i - seed for i in range(size)])


def episode(*calls: tuple[Prompt, Response]) -> Episode:
    """Return a played episode."""
    played = Episode(calls[0][0])
    for prompt, said in calls:
        played.next_prompt = prompt
        played.add_turn(said, "", 1.0, Score(0.0, False), None)
    return played


def branching_group(processor: Processor, images: Sequence[bytes], row: Row | None = None) -> Group:
    """Return two episodes with a branch of every kind: in the prompt, at an image, in an
    observation, after a response and within one. images: Four images, of which the first and the
    last have one size. row: A row of the first two.
    """
    rows = [
        row or Row(0, "<image>One 1<image>two 2", "", tuple(images[:2]), "", "branches"),
        Row(0, "<image>See <image>", "", tuple(images[1:3]), "", "branches"),
        Row(0, "<image>", "", tuple(images[3:]), "", "branches"),
    ]
    start, shown, other = map(processor.prompt, rows)
    first, second = start.images

    def prompt(ids: Sequence[int], *images_: object) -> Prompt:
        return processor.with_images(rows[0], ids, images_)  # type: ignore[arg-type]

    ids, said = start.short_ids, respond(1, 5)
    known = said.token_ids.tolist()
    seen = (*ids, *known, *shown.short_ids)
    return Group(
        start,
        episodes=[
            episode(
                (start, said),
                (prompt(seen, first, second, *shown.images), respond(2, 4)),
                # in the observation, before its second image
                (prompt((*seen[:-7], 3, 4), first, second, shown.images[0]), respond(3, 6)),
                # another image of the same size, and what follows it
                (prompt(ids, other.images[0], second), respond(4, 3)),
                # within the first response
                (
                    prompt((*ids, *known[:2], 9, 8, 7), first, second),
                    respond(5, 2),
                ),
                (start, respond(6, 1)),
            ),
            episode(
                (prompt((*ids[:-3], 5, 6), first, second), respond(7, 4)),
                (prompt((*ids[:-3], 5), first, second), respond(8, 1)),
                (start, respond(1, 5)),  # as the other episode said
            ),
        ],
    )


def windowed_group(processor: Processor, images: Sequence[bytes], most: int) -> Group:
    """Return two episodes that show one of `images` before each response but the first, of which a
    prompt keeps the last `most`.
    """
    settings = EnvironmentConfig(max_images=most, over_budget="replace")
    renderer = ObservationRenderer(processor, settings, max_new_tokens=8)
    start = processor.prompt(Row(0, "Click 1", "", (), "", "window"))
    played = []
    for number in range(2):
        prompt, calls = start, list[tuple[Prompt, Response]]()
        for turn, shown in enumerate([*images, b""]):
            ids = [*respond(10 * number + turn, 3 + turn).token_ids, processor.eos_id]
            calls.append((prompt, make_response(ids, [-0.1] * len(ids))))
            if shown:
                seen = Observation([{"role": "user", "content": f"turn {turn}"}], [shown])
                following, _ = renderer.next_prompt(prompt, ids, seen, 0)
                assert following is not None
                prompt = following
        played.append(episode(*calls))
    return Group(start, episodes=played)
