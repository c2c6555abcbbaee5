"""What follows a complete group while others are generated: order of events, refits, and errors."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from megavlm.inference.client import RolloutClient
from megavlm.inference.errors import RolloutRequestError, RolloutServerError
from megavlm.inference.protocol import ABORT, Response, SamplingParams, VersionSpan
from megavlm.inference.requests import RequestLimits, RequestRefused, RequestTimedOut
from tests.fakes.fixed_servers import FixedServers
from tests.fakes.server import FakeServer
from tests.support.generation import generate
from tests.support.prompts import make_image, make_prompt
from tests.support.responses import make_response
from tests.support.server_pools import external, push

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=256)  # a request for each prompt
NO_DELAY = RequestLimits(retry_delay=0.0)


def test_a_group_is_followed_by_its_next_turn_while_another_is_generated() -> None:
    """The second prompt is answered only when the first one's next turn is: in lockstep, never."""
    events: list[Any] = []
    with FakeServer() as fake, RolloutClient(FixedServers(fake.url), NO_DELAY) as client:
        fake.held, fake.held_once = {2}, True

        async def on_complete(index: int, responses: list[Response], ask: Any) -> None:
            events.append((index, [response.token_ids.tolist() for response in responses]))
            if index == 0:
                events.append((await ask(make_prompt(first_id=9))).token_ids.tolist())
                fake.aborted.set()

        prompts = [make_prompt(first_id=1), make_prompt(first_id=2)]
        groups = generate(client, prompts, n=2, sampling_params=SAMPLING, on_complete=on_complete)
    assert events[:2] == [(0, [[1, 0], [1, 1]]), [9, 0]] and events[2][0] == 1
    ends = [group[0].token_ids[-2:].tolist() for group in groups]
    assert ends == [[1, 0], [2, 2]], "in their order"
    next_turn = next(body for body in fake.bodies("/generate") if body["input_ids"][0][0] == 9)
    assert next_turn["sampling_params"]["n"] == 1


def test_with_no_responses_all_groups_are_followed_at_once() -> None:
    started: list[int] = []
    with FakeServer() as fake, RolloutClient(FixedServers(fake.url), NO_DELAY) as client:

        async def on_complete(index: int, responses: list[Response], ask: Any) -> None:
            assert not responses
            started.append(index)
            while len(started) < 3:
                await asyncio.sleep(0.01)
            said = await ask(make_prompt(first_id=index), 7 if index else None)
            assert said.token_ids.tolist() == [index, 0]

        groups = generate(
            client,
            [make_prompt() for _ in range(3)],
            n=0,
            sampling_params=SAMPLING,
            on_complete=on_complete,
        )
        bodies = fake.bodies("/generate")
    assert groups == [[], [], []] and len(bodies) == 3
    limits = {b["input_ids"][0][0]: b["sampling_params"]["max_new_tokens"] for b in bodies}
    assert limits == {0: 256, 1: 7, 2: 7}, "a request may lower the limit"


def test_a_session_stays_at_the_server_that_has_its_images() -> None:
    """Each turn shows another image, so that its images are those of no earlier request."""
    with FakeServer() as one, FakeServer() as two:
        routing = FixedServers(one.url, two.url)

        async def on_complete(index: int, responses: list[Response], ask: Any) -> None:
            for turn in range(5):
                for session in range(2):
                    shown = tuple(make_image(f"{index}/{session}/{i}", 2, 2) for i in range(turn))
                    prompt = replace(make_prompt(first_id=10 * index + session), images=shown)
                    await ask(prompt, session=session)

        used = []
        for first in range(6):
            with RolloutClient(routing, NO_DELAY) as client:
                prompts = [make_prompt(first_id=first)]
                generate(client, prompts, n=2, sampling_params=SAMPLING, on_complete=on_complete)
            used.append([len(fake.bodies("/generate")) for fake in (one, two)])
            for fake in (one, two):
                fake.requests.clear()
    assert all(sorted(numbers) == [0, 11] for numbers in used)


def test_no_more_sessions_start_than_the_cache_of_their_server_holds() -> None:
    """Until a group has ended, a session is expected to be as long as it may be: 3 + 47 tokens."""
    live, counts = 0, list[int]()
    limits = RequestLimits(retry_delay=0.0, session_tokens=47)
    with FakeServer() as one, FakeServer() as two:
        routing = FixedServers(one.url, two.url, cache_tokens=160)

        async def on_complete(index: int, responses: list[Response], ask: Any) -> None:
            nonlocal live
            live += len(responses)
            await ask(make_prompt(first_id=50 + index))
            while not counts and live < 6:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # more would have started by now
            counts.append(live)
            live -= len(responses)

        with RolloutClient(routing, limits) as client:
            prompts = [make_prompt(first_id=first) for first in range(9)]
            generate(client, prompts, n=1, sampling_params=SAMPLING, on_complete=on_complete)
    assert counts[0] == 6 and len(counts) == 9, "three at each server"


def test_no_more_agents_start_than_the_cache_of_their_server_holds() -> None:
    """Those of two batches share it. Their sessions have 3 + 47 tokens, as above."""
    live, counts = 0, list[int]()
    limits = RequestLimits(retry_delay=0.0, session_tokens=47)
    with FakeServer() as one, FakeServer() as two:
        routing = FixedServers(one.url, two.url, cache_tokens=160)

        async def on_complete(index: int, responses: list[Response], ask: Any) -> None:
            nonlocal live
            live += 1
            for number in range(2):
                await ask(make_prompt(first_id=10 * index + number))
            while not counts and live < 6:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # more would have started by now
            counts.append(live)
            live -= 1

        async def batch(client: RolloutClient, count: int) -> None:
            prompts = [make_prompt(first_id=first) for first in range(count)]
            how: Any = {"n": 0, "agents": 1, "sampling_params": SAMPLING}
            await client.generate(prompts, **how, on_complete=on_complete)

        async def batches(client: RolloutClient) -> None:
            await asyncio.gather(batch(client, 9), batch(client, 4))

        with RolloutClient(routing, limits) as client:
            client.run(batches(client))
        used = [len(fake.bodies("/generate")) for fake in (one, two)]
    assert counts[0] == 6 and len(counts) == 13, "three at each server"
    assert sum(used) == 26 and min(used) > 6


def test_a_next_turn_that_was_aborted_keeps_its_limit() -> None:
    with FakeServer() as fake, RolloutClient(FixedServers(fake.url), NO_DELAY) as client:
        fake.held, fake.held_once, fake.num_held_tokens = {9}, True, 3

        async def on_complete(index: int, responses: list[Response], ask: Any) -> None:
            asking = asyncio.create_task(ask(make_prompt(first_id=9), 7))
            while not fake.bodies("/generate"):
                await asyncio.sleep(0.01)
            fake.aborted.set()
            assert (await asking).token_ids.tolist() == [50, 51, 52, 9, 3]

        generate(client, [make_prompt()], n=0, sampling_params=SAMPLING, on_complete=on_complete)
        limits = [b["sampling_params"] for b in fake.bodies("/generate")]
    assert [_limit(parameters) for parameters in limits] == [7, 4]


def _limit(parameters: Any) -> int:
    (own,) = parameters if isinstance(parameters, list) else [parameters]
    limit: int = own["max_new_tokens"]
    return limit


def test_a_next_turn_that_is_cancelled_is_forgotten() -> None:
    """Its request ends, so that it does not keep a server busy."""
    with FakeServer() as fake, RolloutClient(FixedServers(fake.url), NO_DELAY) as client:
        fake.held = {8}

        async def on_complete(index: int, responses: list[Response], ask: Any) -> None:
            asking = asyncio.create_task(ask(make_prompt(first_id=8)))
            while not fake.bodies("/generate"):
                await asyncio.sleep(0.01)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            while not client.is_idle:
                await asyncio.sleep(0.01)
            fake.aborted.set()
            assert (await ask(make_prompt(first_id=9))).token_ids.tolist() == [9, 0]

        generate(client, [make_prompt()], n=0, sampling_params=SAMPLING, on_complete=on_complete)
    assert len(fake.bodies("/generate")) == 2


def test_a_next_turn_waits_for_a_refit_and_is_asked_again() -> None:
    with FakeServer(weight_version="1") as fake, external(fake) as pool:
        push(pool, 1)
        refits = []

        def refit() -> None:
            refits.append(1)
            push(pool, 1, (fake,))

        async def on_complete(index: int, responses: list[Response], ask: Any) -> None:
            fake.weight_version = "0"  # it restarts between the turns
            assert (await ask(make_prompt(first_id=9))).weight_version == "1"

        with RolloutClient(pool, NO_DELAY) as client:
            generate(
                client,
                [make_prompt()],
                n=1,
                sampling_params=SAMPLING,
                weight_version=1,
                refit=refit,
                on_complete=on_complete,
            )
    assert refits == [1]


SHORT = RequestLimits(total=0.2, retry_delay=0.0)


def test_a_group_whose_requests_time_out_is_left_out_and_the_others_are_answered() -> None:
    """Also after a refit, which another group's next turn needs."""
    events: list[Any] = []
    with FakeServer(weight_version="1") as fake, external(fake) as pool:
        push(pool, 1)
        fake.held = {2}
        gone = asyncio.Event()

        async def on_complete(index: int, responses: list[Response], ask: Any) -> None:
            events.append((index, len(responses)))
            if index == 1:
                fake.weight_version = "0"
                gone.set()
                return
            await gone.wait()
            events.append((await ask(make_prompt(first_id=9))).weight_version)

        with RolloutClient(pool, SHORT) as client:
            groups = generate(
                client,
                [make_prompt(first_id=1), make_prompt(first_id=2)],
                n=1,
                sampling_params=SAMPLING,
                weight_version=1,
                refit=lambda: push(pool, 1, (fake,)),
                on_complete=on_complete,
                skip_timed_out=True,
            )
    assert events == [(0, 1), (1, 0), "1"]
    assert len(groups[0]) == 1 and groups[1] == []
    asked = [body["input_ids"][0][0] for body in fake.bodies("/generate")]
    assert asked.count(2) == 4, "all attempts, and none after the refit"


def test_a_next_turn_that_times_out_raises_where_it_was_asked() -> None:
    told: list[str] = []
    with FakeServer() as fake, RolloutClient(FixedServers(fake.url), SHORT) as client:
        fake.held = {9}

        async def on_complete(index: int, responses: list[Response], ask: Any) -> None:
            try:
                await ask(make_prompt(first_id=9))
            except RequestTimedOut as error:
                told.append(str(error))

        arguments: Any = {"n": 1, "sampling_params": SAMPLING, "on_complete": on_complete}
        generate(client, [make_prompt(first_id=1)], **arguments, skip_timed_out=True)
        with pytest.raises(RolloutServerError, match=r"raise rollout\.request_timeout"):
            generate(client, [make_prompt(first_id=1)], **arguments)
    assert len(told) == 1 and "4 attempts" in told[0]


def test_a_next_turn_that_is_refused_raises_where_it_was_asked() -> None:
    """Its tokens may be why. A first turn that is refused ends the generation."""
    told: list[str] = []
    with FakeServer() as fake, RolloutClient(FixedServers(fake.url), NO_DELAY) as client:
        fake.refused["/generate"] = {2}

        async def on_complete(index: int, responses: list[Response], ask: Any) -> None:
            try:
                await ask(make_prompt(first_id=9))
            except RequestRefused as error:
                told.append(str(error))
            assert (await ask(make_prompt(first_id=8))).token_ids.tolist() == [8, 0]

        arguments: Any = {"n": 1, "sampling_params": SAMPLING, "on_complete": on_complete}
        (group,) = generate(client, [make_prompt(first_id=1)], **arguments)
        assert len(group) == 1 and len(told) == 1 and "HTTP 400" in told[0]
        fake.refused["/generate"] = {4}
        with pytest.raises(RolloutRequestError, match="HTTP 400"):
            generate(client, [make_prompt(first_id=1)], **arguments)


def test_a_continuation_that_is_refused_begins_anew() -> None:
    whole = make_response((1, 5), (-0.1, -0.2), "stop", "1", (VersionSpan("1", 0, 2),))
    cut = replace(whole, finish=ABORT)
    with FakeServer("400") as fake, RolloutClient(FixedServers(fake.url), NO_DELAY) as client:
        prompts = [make_prompt(first_id=1)]
        (group,) = generate(client, prompts, n=2, sampling_params=SAMPLING, begun=[[whole, cut]])
        asked = [len(body["input_ids"][0]) for body in fake.bodies("/generate")]
    assert [response.token_ids.tolist() for response in group] == [[1, 0], [1, 1]]
    assert asked == [5, 3], "with its tokens, then without"


def test_only_what_timed_out_is_left_out() -> None:
    """A server that fails otherwise ends the generation."""

    async def on_complete(index: int, responses: list[Response], ask: Any) -> None: ...

    with FakeServer(*["500"] * 4) as fake, RolloutClient(FixedServers(fake.url), SHORT) as client:
        with pytest.raises(RolloutServerError, match="500"):
            generate(
                client,
                [make_prompt()],
                n=1,
                sampling_params=SAMPLING,
                on_complete=on_complete,
                skip_timed_out=True,
            )


def test_an_error_of_what_follows_ends_the_generation() -> None:
    with FakeServer() as fake, RolloutClient(FixedServers(fake.url), NO_DELAY) as client:
        fake.held = {2}

        async def on_complete(index: int, responses: list[Response], ask: Any) -> None:
            raise ValueError("as told")

        prompts = [make_prompt(first_id=1), make_prompt(first_id=2)]
        with pytest.raises(ValueError, match="as told"):
            generate(client, prompts, n=1, sampling_params=SAMPLING, on_complete=on_complete)
        fake.held = set()
        ((answer,),) = generate(client, prompts[1:], n=1, sampling_params=SAMPLING)
        assert answer.token_ids.tolist() == [2, 0]
