"""Rewards by URL and reward models: what is sent, and that no answer costs more than its bounds."""

import asyncio
import base64
from dataclasses import replace
from typing import Any

import pytest

from megavlm.config.reward import Reward
from megavlm.rewards import services
from megavlm.rewards.base import Example, Score
from megavlm.rewards.manager import Part, RewardManager
from tests.fakes.service import FakeService, Fault
from tests.support.timeouts import scaled

PNG = b"\x89PNG rest"
EXAMPLE = Example("<image>Describe.", "a dog", "caption", (PNG,), {"keywords": ["dog"]})
RATING = {"choices": [{"message": {"content": "I say 7.5"}}]}


def score(
    *parts: Part, timeout: float = 5.0, response: str = "a dog", example: Example = EXAMPLE
) -> Score:
    async def run() -> Score:
        manager = RewardManager(
            parts, Reward(on_failure="zero", workers=1, timeout=timeout, memory_mb=1024)
        )
        try:
            return await manager.score(response, example)
        finally:
            await manager.close()

    return asyncio.run(run())


def by_url(service: FakeService, **options: Any) -> Part:
    return Part("url", service.url + "/score", options={"delay": 0.01, **options})


def by_model(service: FakeService, **options: Any) -> Part:
    options = {"url": service.url, "model": "judge", "delay": 0.01, **options}
    return Part("model", "reward_model", options=options)


def test_a_url_gets_response_row_and_images() -> None:
    with FakeService({"reward": 0.25, "correct": True}) as service:
        assert score(by_url(service)) == Score(0.25, True)
    ((path, body, key),) = service.requests
    assert path == "/score" and key is None
    assert body["response"] == "a dog" and body["row"]["keywords"] == ["dog"]
    (image,) = body["images"]
    assert image == "data:image/png;base64," + base64.b64encode(PNG).decode()


def test_a_url_gets_bytes_in_base64_and_no_value_that_json_cannot_hold() -> None:
    def sent(**extra: Any) -> Score:
        return score(by_url(service), example=replace(EXAMPLE, extra=extra))

    with FakeService({"reward": 0.25, "correct": True}) as service:
        assert sent(mask=PNG, deep=[{"bytes": PNG}]) == Score(0.25, True)
        assert sent(sizes=[float("nan")]).failure == "value" == sent(odd=object()).failure
    ((_, body, _),) = service.requests
    told = {"base64": base64.b64encode(PNG).decode()}
    assert body["row"]["mask"] == told and body["row"]["deep"] == [{"bytes": told}]


def test_a_reward_model_sees_the_image_and_its_rating_is_a_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with FakeService(RATING) as service:
        assert score(by_model(service, api_key_env="JUDGE_KEY")) == Score(0.75, True)
    ((_, body, key),) = service.requests
    assert key == "Bearer secret" and body["model"] == "judge"
    image, text = body["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert "Describe." in text["text"] and "a dog" in text["text"] and "<image>" not in text["text"]


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("0", 0.0),
        ("10", 1.0),
        ("\uff18", 0.8),
        ("10/10", 1.0),
        ("7 out of 10.", 0.7),
        ("**7**", 0.7),
        ("On a scale of 0 to 10 I hesitate. Score: 7", 0.7),
        ("Score: 3. No, **Rating:** 7/10", 0.7),
        ('{"score": 7}', 0.7),
        ("Rating: 8", 0.8),
        ("Score: 7, with 3 errors", 0.7),
        ("\u8bc4\u5206\uff1a8\uff0f10", 0.8),
        ("<think>Score: 3, perhaps 4.</think>\n8", 0.8),
        ("Score: 3, perhaps 4.</think>8", 0.8),
        ("<think>" + "3 or 4. " * 1000 + "</think>" + " " * 1000 + "8" + " " * 1000, 0.8),
    ],
)
def test_a_rating_is_a_share_of_its_scale(said: str, reward: float) -> None:
    with FakeService({"choices": [{"message": {"content": said}}]}) as service:
        assert score(by_model(service)).reward == reward


@pytest.mark.parametrize(
    "said",
    [
        *("On a scale of 0 to 10, I would say 7", "7 or 8", "none", "", None, [7], "v2.1b"),
        *("12", "11/10", "-3", "\u22123", "Score: 70", "Rating: -1", "10.5"),
        *("NaN", "Score: nan", "inf", "-inf", "1e1"),
        *("4/5", "Score: 4/5", "Score: 8 out of 100", "80%", "8%", "Score: 8%"),
        *("Score: 7-8", "Score: 7 to 8", "Score: 7 or 8", "Score: 7,5"),
        *("<think>8", "<think>Score: 8</think>", "<think>8</think>I cannot say."),
    ],
)
def test_a_rating_that_is_not_one_number_on_the_scale_is_a_failure(said: Any) -> None:
    with FakeService({"choices": [{"message": {"content": said}}]}) as service:
        assert score(by_model(service)).failure == "remote"


def test_a_rating_in_percent_is_one_on_a_scale_of_a_hundred() -> None:
    with FakeService({"choices": [{"message": {"content": "Score: 80%"}}]}) as service:
        assert score(by_model(service, scale=100)).reward == 0.8


@pytest.mark.parametrize("reason", ["length", "content_filter", "abort"])
def test_an_answer_that_did_not_end_is_no_rating(reason: str) -> None:
    cut = {"message": {"content": "8"}, "finish_reason": reason}
    with FakeService({"choices": [cut]}) as service:
        assert score(by_model(service)) == Score(0.0, False, failure="remote")
        service.answer = {"choices": [cut | {"finish_reason": "stop"}]}
        assert score(by_model(service)).reward == 0.8


def test_a_service_that_is_busy_is_asked_again_when_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(services.asyncio, "sleep", sleep)
    for wait, expected in (("7", 7.0), ("86400", services.MAX_PAUSE)):
        with FakeService({"reward": 1}, "429") as service:
            service.retry_after = wait
            assert score(by_url(service)) == Score(1.0, True)
            assert pauses.pop() == expected
    with FakeService({"reward": 1}, "429") as service:
        service.retry_after = "Fri, 31 Dec 1999 23:59:59 GMT"
        assert score(by_url(service)) == Score(1.0, True)
        assert pauses.pop() <= 0.01


def test_requests_beyond_the_concurrency_wait_their_turn() -> None:
    async def run(service: FakeService) -> list[Score]:
        parts = [by_url(service, concurrency=1)]
        manager = RewardManager(
            parts, Reward(on_failure="zero", workers=1, timeout=scaled(5), memory_mb=1024)
        )
        try:
            return await asyncio.gather(*(manager.score("a dog", EXAMPLE) for _ in range(20)))
        finally:
            await manager.close()

    with FakeService({"reward": 1}) as service:
        assert asyncio.run(run(service)) == [Score(1.0, True)] * 20


def test_errors_of_the_server_are_tried_again_and_mistakes_are_not() -> None:
    with FakeService({"reward": 1}, "500", "500") as service:
        assert score(by_url(service)) == Score(1.0, True)
        assert len(service.requests) == 3
    with FakeService({"reward": 1}, "404") as service:
        assert score(by_url(service)).failure == "remote"
        assert len(service.requests) == 1


def test_a_redirect_is_not_followed() -> None:
    with FakeService({"reward": 1}, "redirect") as service:
        assert score(by_url(service)).failure == "remote"
        assert [path for path, *_ in service.requests] == ["/score"]


@pytest.mark.parametrize("fault", ["garbage", "endless", "hang", "500"])
def test_a_faulty_service_is_bounded(fault: Fault) -> None:
    with FakeService({"reward": 1}, fault, fault) as service:
        found = score(by_url(service, attempts=2), timeout=0.3)
        assert found == Score(0.0, False, failure="remote")


@pytest.mark.parametrize("answer", [{"reward": "good"}, {"reward": None}, [1], {}])
def test_an_answer_without_a_reward_is_a_failure(answer: Any) -> None:
    with FakeService(answer) as service:
        assert score(by_url(service)).failure == "remote"
    with FakeService({"choices": []}) as service:
        assert score(by_model(service)).failure == "remote"


@pytest.mark.parametrize("reward", [float("inf"), 10**400, 1e39])
def test_a_reward_that_training_cannot_hold_is_a_failure(reward: float) -> None:
    """Infinity is in Python's dialect of JSON, and 1e39 is infinite in float32."""
    with FakeService({"reward": reward}) as service:
        assert score(by_url(service)).failure == "value"


def test_a_sum_of_rewards_that_is_too_large_is_a_failure() -> None:
    with FakeService({"reward": 3e38}) as service:
        part = by_url(service)
        assert score(part).reward == 3e38
        assert score(replace(part, weight=2.0)).failure == "value"
        assert score(part, replace(part, label="other")).failure == "value"


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (Part("m", "reward_model"), "needs a url"),
        (Part("m", "reward_model", options={"url": "http://a:b@host/"}), "cannot be used"),
        (Part("m", "reward_model", options={"url": "file:///etc"}), "cannot be used"),
        (
            Part("u", "http://host:1/", options={"retry": 3}),
            r"reward\.options\.retry: http://host:1/ takes no",
        ),
        (Part("u", "http://host:99999/"), "cannot be used"),
        (Part("u", "http://host:0/"), "cannot be used"),
        (Part("u", "http://[::1/"), "cannot be used"),
        (Part("m", "reward_model", options={"url": 8000}), "url is 8000: give a text"),
        (Part("m", "reward_model", options={"url": None}), "url is None: give a text"),
        *(
            (Part("u", "http://host:1/", options=options), problem)
            for options, problem in (
                ({"concurrency": 0}, "concurrency is 0: set it to a number at least 1"),
                ({"concurrency": 1.5}, "concurrency is 1.5: give a whole number"),
                ({"attempts": 0}, "attempts is 0"),
                ({"attempts": "3"}, "attempts is '3': give a whole number"),
                ({"attempts": True}, "attempts is True"),
                ({"delay": -1}, r"reward\.options: .* delay is -1"),
                ({"delay": float("nan")}, "delay is nan"),
                ({"scale": 0}, "scale is 0: set it to a number above 0"),
                ({"scale": "10"}, "scale is '10'"),
                ({"correct_from": "x"}, "correct_from is 'x'"),
                ({"prompt": "Rate {respnse}"}, "respnse.*its fields are {scale}, {problem}"),
                ({"prompt": 'as {"score": 1}'}, "cannot be filled in"),
                ({"prompt": "{response.x}"}, "cannot be filled in"),
                ({"prompt": "{response[0]}"}, "cannot be filled in"),
                ({"prompt": "{}"}, "cannot be filled in"),
                ({"prompt": "{"}, "cannot be filled in"),
                ({"prompt": 3}, "prompt is 3: give a text"),
                ({"api_key_env": None}, "api_key_env is None"),
            )
        ),
    ],
)
def test_options_are_checked(part: Part, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        score(part)
