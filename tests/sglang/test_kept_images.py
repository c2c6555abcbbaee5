"""Images that the real server keeps: a session sends each one once."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from megavlm.data.processor import Prompt
from megavlm.inference.client import RolloutClient
from megavlm.inference.kept_images import KeptImages
from megavlm.inference.protocol import Response, SamplingParams
from tests.fakes.fixed_servers import FixedServers
from tests.sglang.conftest import Served
from tests.sglang.questions import prompts
from tests.support.generation import generate
from tests.support.random_images import image

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]
TURNS = 20
SIDES = {"qwen2_5_vl": 56, "qwen3_vl": 64}  # pixels: images that the processor does not resize


def played(client: RolloutClient, served: Served, side: int, *, forgets: bool) -> list[Response]:
    """Return the responses of a session with an image each turn. side: Of images. forgets: If true, the client
    does not know what it has sent.
    """
    processor = served.processor
    suppressed = (*processor.suppressed_ids, processor.eos_id)
    how = SamplingParams(0.0, 4, suppressed_ids=suppressed, stop_ids=processor.stop_ids)
    prompt: Prompt | None = None
    found: list[Response] = []
    row = prompts(processor)["text"].row
    for turn in range(TURNS):
        shown = replace(
            row, problem="<image>", images=(image(SIDE, SIDE, 100 + turn),), messages=()
        )
        if prompt is None:
            prompt = processor.prompt(shown)
        else:
            said = [*found[-1].token_ids.tolist(), processor.eos_id]
            prompt = processor.next_turn(prompt, said, shown)
        if forgets:
            client.sent_images._kept.clear()
        ((response,),) = generate(client, [prompt], n=1, sampling_params=how)
        found.append(response)
    return found


@pytest.mark.parametrize(
    ("family", "is_local"), [("qwen2_5_vl", True), ("qwen2_5_vl", False), ("qwen3_vl", True)]
)
def test_a_session_sends_each_image_once(
    servers: Callable[[str], Served], family: str, is_local: bool
) -> None:
    """Its responses are those of sessions that send all images at every turn. Of Qwen3-VL, SGLang
    reads images by another way.
    """
    served = servers(family).restore()
    server, side = served.server, SIDES[family]
    size = 3 * side * side
    routing = FixedServers(server.url, api_key=server.api_key, is_local=is_local, takes_videos=True)
    with RolloutClient(routing) as client:
        before = played(client, served, side, forgets=True)
        assert client.sent_images.counts == {"image_bytes_sent": size * TURNS * (TURNS + 1) // 2}
    with RolloutClient(routing) as client:
        after = played(client, served, side, forgets=False)
        counts = {"image_bytes_sent": size * TURNS, "images_named": TURNS * (TURNS - 1) // 2}
        assert client.sent_images.counts == counts
    for response, other in zip(after, before, strict=True):
        assert response.token_ids.tolist() == other.token_ids.tolist()
        assert response.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_an_image_that_the_server_lacks_is_sent_after_its_refusal(served: Served) -> None:
    """As after a restart, of which the client does not know."""
    server, processor = served.server, served.processor
    row = replace(
        prompts(processor)["text"].row,
        problem="<image>",
        images=(image(56, 84, 999),),
        messages=(),
    )
    prompt = processor.prompt(row)
    how = SamplingParams(0.0, 4, stop_ids=processor.stop_ids)
    with RolloutClient(FixedServers(server.url, api_key=server.api_key, is_local=True)) as client:
        client.sent_images.answered(server.url, prompt.images)
        ((response,),) = generate(client, [prompt], n=1, sampling_params=how)
        counts = client.sent_images.counts
    assert len(response.token_ids)
    assert (counts["images_lost"], counts["images_named"]) == (1, 1)
    assert counts["image_bytes_sent"] == 3 * 56 * 84


def test_the_images_used_last_are_kept() -> None:
    kept: KeptImages[str, int] = KeptImages(10)
    for key, size in (("a", 4), ("b", 4), ("a", 5)):
        kept.put(key, size, size)
    assert (kept.get("a"), kept.get("b")) == (5, 4)
    kept.put("c", 3, 3)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (None, 4, 3)
    kept.put("d", 11, 11)
    assert [kept.get(key) for key in "abcd"] == [None] * 4
