"""Images that the real server keeps: a session sends each one once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megavlm.data.processor import Processor, Prompt
from megavlm.inference.client import RolloutClient
from megavlm.inference.kept_images import KeptImages
from megavlm.inference.protocol import Response, SamplingParams
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from tests.fakes.fixed_servers import FixedServers
from tests.sglang.conftest import Served
from tests.sglang.questions import prompts
from tests.support.forked_servers import forking_servers
from tests.support.generation import generate
from tests.support.random_images import image
from tests.support.servers import run_server

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]
SIDES = {"qwen2_5_vl": 56, "qwen3_vl": 64, "qwen3_5": 64}  # pixels that no processor resizes
Calls = Sequence[tuple[Prompt, Response]]


def play(
    client: RolloutClient,
    processor: Processor,
    side: int,
    turns: range,
    begun: Calls = (),
    *,
    forgets: bool = False,
) -> Calls:
    """Return the calls of a session that shows an image of `side` pixels at each turn. turns: Seeds
    of the turns' images. begun: Earlier calls of the session. forgets: If true, the client does not
    know what it has sent.
    """
    suppressed = (*processor.suppressed_ids, processor.eos_id)
    how = SamplingParams(0.0, 4, suppressed_ids=suppressed, stop_ids=processor.stop_ids)
    row, calls = prompts(processor)["text"].row, [*begun]
    for seed in turns:
        shown = replace(row, problem="<image>", images=(image(side, side, seed),), messages=())
        prompt = processor.prompt(shown)
        if calls:
            before, response = calls[-1]
            said = [*response.token_ids.tolist(), processor.eos_id]
            prompt = processor.next_turn(before, said, shown)
        if forgets:
            client.sent_images._kept.clear()
        ((response,),) = generate(client, [prompt], n=1, sampling_params=how)
        calls.append((prompt, response))
    return calls


def check_equal(calls: Calls, others: Calls) -> None:
    for (_, response), (_, other) in zip(calls, others, strict=True):
        assert response.token_ids.tolist() == other.token_ids.tolist()
        assert response.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("family", "is_local", "num_turns"),
    [
        ("qwen2_5_vl", True, 5),
        ("qwen2_5_vl", False, 5),
        ("qwen3_vl", True, 5),
        pytest.param("qwen3_5", True, 5, marks=pytest.mark.slow),
    ],
)
def test_a_session_sends_each_image_once(
    servers: Callable[[str], Served], family: str, is_local: bool, num_turns: int
) -> None:
    """Its responses are equal to the responses of a session that sends all images at every turn.
    SGLang reads the images of Qwen3-VL and Qwen3.5 by another way. An image that the server lacks
    is sent after its refusal.
    """
    served = servers(family).restore()
    server, side, turns = served.server, SIDES[family], range(100, 100 + num_turns)
    size = 3 * side * side
    routing = FixedServers(server.url, api_key=server.api_key, is_local=is_local, takes_videos=True)
    with RolloutClient(routing) as client:
        before = play(client, served.processor, side, turns, forgets=True)
        counts = client.sent_images.take_counts()
        assert counts["image_bytes_sent"] == size * num_turns * (num_turns + 1) // 2
        assert counts["images_named"] == 0
    with RolloutClient(routing) as client:
        after = play(client, served.processor, side, turns)
        assert client.sent_images.take_counts() == {
            "image_bytes_sent": size * num_turns,
            "images_named": num_turns * (num_turns - 1) // 2,
            "images_refused": 0,
        }
        check_equal(after, before)

        lacked = range(900 + is_local, 901 + is_local)
        row = replace(before[0][0].row, images=(image(side, side, lacked[0]),))
        client.sent_images.answered(server.url, served.processor.prompt(row).images)
        after = play(client, served.processor, side, lacked)
        counts = {"image_bytes_sent": size, "images_named": 1, "images_refused": 1}
        assert client.sent_images.take_counts() == counts
        check_equal(after, play(client, served.processor, side, lacked, forgets=True))


def test_a_server_without_our_support_is_sent_all_images(served: Served) -> None:
    server, turns = served.server, range(100, 103)
    with RolloutClient(FixedServers(server.url, api_key=server.api_key)) as client:
        play(client, served.processor, 56, turns)
        counts = client.sent_images.take_counts()
    assert (counts["image_bytes_sent"], counts["images_named"]) == (6 * 3 * 56 * 56, 0)


def test_the_images_of_a_session_are_sent_again_to_a_server_that_has_restarted(
    served: Served, tmp_path: Path
) -> None:
    """The client does not know of the restart, which is after three of its five turns."""
    processor, turns = served.restore().processor, range(100, 105)
    options = ServerOptions(served.folder, dtype="float32", device="cpu")
    server = ManagedServer(options, log_path=tmp_path / "log")
    routing = FixedServers(server.url, api_key=server.api_key, is_local=True)
    with forking_servers(), RolloutClient(routing) as client:
        with run_server(server):
            begun = play(client, processor, 56, turns[:3])
        client.sent_images.take_counts()
        with run_server(server):
            calls = play(client, processor, 56, turns[3:], begun)
            counts = client.sent_images.take_counts()
    assert counts["images_refused"] == 3 and counts["images_named"] == 3 + 4
    assert counts["image_bytes_sent"] == 3 * 56 * 56 * (1 + 4 + 1)
    with served.client as client:
        check_equal(calls, play(client, processor, 56, turns, forgets=True))


def test_the_images_used_last_are_kept() -> None:
    kept: KeptImages[str, int] = KeptImages(10)
    for key, size in (("a", 4), ("b", 4), ("a", 5)):
        kept.put(key, size, size)
    assert (kept.get("a"), kept.get("b")) == (5, 4)
    kept.put("c", 3, 3)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (None, 4, 3)
    kept.put("d", 11, 11)
    assert [kept.get(key) for key in "abcd"] == [None] * 4
