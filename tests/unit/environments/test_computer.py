"""Episodes on a screen that no browser shows: one behind an HTTP server, as OSWorld's is."""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from threading import Thread
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image as Picture

from megavlm.environments.base import ChatFormat, Context, Image, Step
from megavlm.environments.computer import Action, Computer, View, marked
from megavlm.rewards.base import Example, Score
from tests.conftest import png

SIZE = (400, 200)
ROW = Example("Paint it.", "red")


class Desktop(BaseHTTPRequestHandler):
    """A desktop that notes what is done on it."""

    done: list[dict[str, Any]]

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(png(*SIZE))

    def do_POST(self) -> None:
        self.done.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(400 if self.done[-1]["text"] == "hyper+q" else 200)
        self.end_headers()
        self.wfile.write(b"no such key")

    def log_message(self, *_: object) -> None:
        pass


class Remote(Computer):
    """The desktop's episodes: they end when somebody types `done`."""

    def __init__(self, context: Context, url: str, **options: Any) -> None:
        super().__init__(context, **options)
        self._client = httpx.AsyncClient(base_url=url)

    async def open(self, row: Example, seed: int) -> str:
        self.typed = ""
        return f"Desktop {seed}."

    async def look(self) -> View:
        shown = await self._client.get("/screenshot")
        return View(shown.content, "a tree", [(0, 0, 40, 20), (100, 100, 300, 180)])

    async def act(self, action: Action) -> None:
        said = await self._client.post("/execute", json=action.__dict__)
        if said.is_error:
            raise ValueError(said.text)
        self.typed = action.text

    async def outcome(self, answer: str | None) -> Step | None:
        return Step(None, 0.5, True) if self.typed == "done" else await super().outcome(answer)

    async def close(self) -> None:
        await self._client.aclose()


async def score(text: str, row: Example) -> Score:
    return Score(float(text == row.answer), text == row.answer)


class Episode:
    """An episode whose model sees screenshots at a share of their size."""

    def __init__(
        self, url: str, turns: int = 99, cls: type[Remote] = Remote, **options: Any
    ) -> None:
        self.context = Context(score, turns, ChatFormat())
        self.environment, self.loop = cls(self.context, url, **options), asyncio.Runner()
        self.start = self.loop.run(self.environment.reset(ROW, 7))
        self.see(self.start.messages[-1]["content"][-1], 0.5)

    def see(self, image: Image, share: float) -> None:
        size = round(SIZE[0] * share), round(SIZE[1] * share)
        self.context.shown_sizes[hashlib.sha256(image.data).hexdigest()] = size

    def say(self, text: str) -> Step:
        step: Step = self.loop.run(self.environment.step(text))
        return step

    def do(self, *calls: dict[str, Any]) -> Step:
        said = [json.dumps({"name": "computer", "arguments": one}) for one in calls]
        return self.say("".join(f"<tool_call>\n{one}\n</tool_call>\n" for one in said))

    def fails(self, **call: Any) -> str:
        step = self.do(call)
        assert step.observation is not None and step.info["counts"]["tool_errors"] == 1
        error, *_, picture = step.observation.messages[-1]["content"]
        assert isinstance(picture, Image)  # the screen is shown all the same
        assert isinstance(error, str) and error.startswith("error: ")
        return error.removeprefix("error: ")


@contextmanager
def desktop() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    handler = type("Handler", (Desktop,), {"done": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler.done
        server.shutdown()


@pytest.fixture
def served() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    with desktop() as found:
        yield found


def test_the_policy_sees_the_screen_and_acts_on_it(served: Any) -> None:
    url, done = served
    episode = Episode(url)
    *_, asked, tree, picture = episode.start.messages[-1]["content"]
    assert (asked, tree, picture.data) == ("Desktop 7.", "a tree", png(*SIZE))
    (schema,) = episode.start.tools
    assert "from 0 to 1000 across" in schema["function"]["description"]
    assert "mark" not in schema["function"]["parameters"]["properties"]
    step = episode.do({"action": "click", "coordinate": [250, 500]})
    assert step.observation is not None and not step.done
    assert step.observation.messages[-1]["content"] == ["a tree", Image(png(*SIZE))]
    episode.do(
        {"action": "drag", "coordinate": [0, 0], "to": [1000, 1000]},
        {"action": "scroll", "coordinate": [500, 500], "amount": -3},
    )
    assert [(one["kind"], one["at"], one["to"], one["amount"]) for one in done] == [
        ("click", [100, 100], [0, 0], 1),
        ("drag", [0, 0], [399, 199], 1),
        ("scroll", [200, 100], [0, 0], -3),
    ]


def test_a_step_has_its_actions_in_fractions_of_the_screenshot(served: Any) -> None:
    episode = Episode(served[0], coordinates="pixels", marks=True)
    image = episode.start.messages[-1]["content"][-1].data
    step = episode.do(
        {"action": "click", "coordinate": [50, 25]},
        {"action": "drag", "coordinate": [0, 0], "to": [100, 50]},
        {"action": "scroll", "mark": 2, "amount": 2},
        {"action": "click", "coordinate": [201, 0]},
        {"action": "key", "text": "hyper+q"},
        {"action": "answer", "text": "red"},
    )
    at = {"image": hashlib.sha256(image).hexdigest()}
    assert [action.values() for action in step.actions] == [
        {"kind": "click", **at, "at": [0.25, 0.25]},
        {"kind": "drag", **at, "at": [0.0, 0.0], "to": [0.5, 0.5]},
        {"kind": "scroll", **at, "at": [0.5, 0.7], "amount": 2.0},
        {"kind": "key", **at, "text": "hyper+q"},
        {"kind": "answer", "text": "red"},
    ]
    assert Episode(served[0]).say("red").actions == []


def test_pixels_are_those_of_the_screenshot_as_the_model_sees_it(served: Any) -> None:
    url, done = served
    episode = Episode(url, coordinates="pixels")
    episode.do({"action": "double_click", "coordinate": [150, 50]})
    assert done[-1]["at"] == [300, 100]
    assert "spans [0, 0] to [200, 100]" in episode.fails(action="click", coordinate=[201, 50])
    episode.context.shown_sizes.clear()  # its observation was refused as too long
    assert "not seen the screen" in episode.fails(action="click", coordinate=[1, 1])


def test_marks_stand_for_places(served: Any) -> None:
    url, done = served
    episode = Episode(url, marks=True)
    (schema,) = episode.start.tools
    assert "mark" in schema["function"]["parameters"]["properties"]
    picture = Picture.open(BytesIO(episode.start.messages[-1]["content"][-1].data))
    plain = Picture.open(BytesIO(png(*SIZE))).convert("RGB")
    assert np.array_equal(picture, marked(plain, [(0, 0, 40, 20), (100, 100, 300, 180)]))
    assert picture.getpixel((200, 100)) == (255, 0, 0) != plain.getpixel((50, 50))
    episode.do({"action": "click", "mark": 2})
    assert done[-1]["at"] == [200, 140]
    assert "no mark 3; there are 2" in episode.fails(action="click", mark=3)


def test_what_cannot_be_done_is_told(served: Any) -> None:
    episode = Episode(served[0])
    assert "outside of the screen" in episode.fails(action="click", coordinate=[1001, 0])
    assert "click needs coordinate" in episode.fails(action="click")
    assert "needs coordinate and to" in episode.fails(action="drag", coordinate=[1, 1])
    assert "key needs a text" in episode.fails(action="key")
    assert "no such key" in episode.fails(action="key", text="hyper+q")
    assert "computer: action: Input should be" in episode.fails(action="fly")


def test_an_episode_ends_by_its_screen_an_answer_its_turns_or_its_time(served: Any) -> None:
    url, done = served
    step = Episode(url).do({"action": "type", "text": "done"}, {"action": "type", "text": "more"})
    assert (step.done, step.reward, len(done)) == (True, 0.5, 1)
    assert step.info["counts"] == {"tool_calls": 2, "tool_errors": 1}
    for reward, text in ((1.0, "red"), (0.0, "blue")):
        for step in (Episode(url).say(text), Episode(url).do({"action": "answer", "text": text})):
            assert (step.done, step.reward, step.info["score"].correct) == (
                True,
                reward,
                reward > 0,
            )
    episode = Episode(url, turns=2)
    assert not episode.do({"action": "type", "text": "x"}).done
    assert episode.do({"action": "type", "text": "done"}).reward == 0.5  # the last turn acts, too
    for ended, options in (("out_of_turns", {"turns": 1}), ("out_of_time", {"seconds": 1e-9})):
        step = Episode(url, **options).do({"action": "type", "text": "x"})
        assert (step.done, step.reward, step.info["correct"]) == (True, 0.0, False)
        assert step.info["counts"][ended] == 1


def test_an_error_of_the_outcome_fails_the_episode(served: Any) -> None:
    class Faulty(Remote):
        async def outcome(self, answer: str | None) -> Step | None:
            raise RuntimeError("a bug")

    for text in ("red", {"action": "type", "text": "x"}, {"action": "answer", "text": "x"}):
        with pytest.raises(RuntimeError, match="a bug"):
            episode = Episode(served[0], cls=Faulty)
            episode.say(text) if isinstance(text, str) else episode.do(text)


def test_options_are_checked() -> None:
    for options, said in (
        ({"coordinates": "x"}, "relative or pixels"),
        ({"seconds": 0}, "above 0"),
    ):
        with pytest.raises(ValueError, match=said):
            asyncio.run(Computer(Context(score, 1), **options).check())
