"""The bound on image tokens in flight: what a prompt takes of it, and the order that it leaves."""

import pytest

from megavlm.data.processor import Prompt
from megavlm.inference.client import RolloutClient
from megavlm.inference.connect import IMAGE_TOKENS
from megavlm.inference.protocol import SamplingParams
from megavlm.inference.requests import RequestLimits, make_requests
from tests.fakes.fixed_servers import FixedServers
from tests.fakes.server import FakeServer
from tests.support.generation import generate
from tests.support.prompts import make_prompt

SHORT = SamplingParams(temperature=1.0, max_new_tokens=4)
LONG = SamplingParams(temperature=1.0, max_new_tokens=300)  # a request for each prompt


def prompt(image_tokens: int, first_id: int = 7) -> Prompt:
    return make_prompt(first_id, images=image_tokens)


@pytest.mark.parametrize(
    ("image_tokens", "slots"), [(0, 1), (1, 1), (8, 1), (9, 2), (16, 2), (64, 8), (1000, 125)]
)
def test_a_prompt_takes_the_slots_of_its_share(image_tokens: int, slots: int) -> None:
    assert RequestLimits(concurrency=8, image_tokens=64).slots(prompt(image_tokens)) == slots


def sizes(prompts: list[Prompt], limits: RequestLimits) -> list[tuple[int, int]]:
    """Return the prompts and the slots of each request."""
    begun: list[list[object]] = [[] for _ in prompts]
    requests = make_requests(prompts, 2, SHORT, begun, limits, num_servers=1)  # type: ignore[arg-type]
    assert [index for request in requests for index in request.indices] == [*range(len(prompts))]
    assert [p for request in requests for p in request.prompts] == prompts
    return [(len(request.prompts), request.slots) for request in requests]


def test_requests_of_large_images_hold_fewer_prompts() -> None:
    limits = RequestLimits(concurrency=64, image_tokens=64)
    assert sizes([prompt(1)] * 40, limits) == [(16, 16), (16, 16), (8, 8)]
    assert sizes([prompt(4)] * 6, limits) == [(4, 16), (2, 8)]
    assert sizes([prompt(100), prompt(1), prompt(1)], limits) == [(1, 100), (2, 2)]


def test_a_large_prompt_is_not_overtaken() -> None:
    """It waits until the server is free, and the prompts after it wait for their turn."""
    prompts = [prompt(1, 0), prompt(4, 1), prompt(1, 2), prompt(9, 3), prompt(1, 4)]
    limits = RequestLimits(concurrency=4, image_tokens=4)
    with FakeServer() as fake, RolloutClient(FixedServers(fake.url), limits) as client:
        groups = generate(client, prompts, n=1, sampling_params=LONG)
        asked = [body["input_ids"][0][0] for body in fake.bodies("/generate")]
    assert asked == [0, 1, 2, 3, 4]
    assert [tuple(group[0].token_ids) for group in groups] == [(index, 0) for index in range(5)]


def test_images_hold_no_responses_places_on_a_gpu() -> None:
    """128 prompts of one image of a megapixel are in flight together, with all their responses."""
    limits = RequestLimits(concurrency=256, image_tokens=IMAGE_TOKENS["cuda"])
    assert sum(limits.slots(prompt(1337)) for _ in range(128)) == 128
    narrow = RequestLimits(concurrency=256, image_tokens=65536)
    assert narrow.slots(prompt(1337)) == 6, "42 of 128 prompts"
