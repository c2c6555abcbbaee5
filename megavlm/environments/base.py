"""Interface of environments.

environment.name=package.module:Class names the class of an environment. An instance is made for
each episode, `Class(context, **environment.options)`, and has two methods, or three:

    async def reset(self, row: Example, seed: int) -> Observation
    async def step(self, text: str) -> Step
    async def close(self) -> None

All episodes of a group start from the same prompt, so `reset` must depend only on row and seed.
Environments whose policy calls tools extend ToolEnvironment (megavlm/environments/tools).

An instance lives in one thread of one process, with one asyncio loop, from its reset to its close.
It may hold anything: a browser, a generator, a socket, a task that goes on between turns.
Each of environment.workers processes has many instances, whose calls run at the same time, also
where one blocks. What belongs to the module is shared by the instances of a process.

`close` is optional, and may be a plain method. It is called once: when the episode has ended, when
a call has failed or taken too long, when the episode is not played on, and at the end of the run.
No step waits for it. A call that runs too long is cancelled first. If it blocks its thread, `close`
is called when it returns, and not at all if it does not.

Each reset, step and close may take environment.timeout seconds, not counting rewards, and the
instances of a process share environment.memory_mb. If a step fails, its episode ends and is scored
by reward.on_failure. If the process runs out of memory or dies, all episodes in it fail. A call
that takes too long is the only one that fails; if it does not end when it is cancelled, its process
takes no more episodes, and is killed when the others in it have ended.

If the environment does not end an episode, it ends after environment.max_turns responses, with a
truncated response, or when it is over budget (environment.over_budget). The configured reward of
that response is then added to the reward of the step.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Literal, Protocol

from PIL import Image as Picture

from megavlm.rewards.base import Example, Score


@dataclass(frozen=True)
class Image:
    """An image in a message. data: Encoded file, such as PNG or JPEG."""

    data: bytes

    @classmethod
    def of(cls, picture: Any) -> "Image":
        """Encode a picture of Pillow, or an array [H, W, 3] uint8."""
        picture = picture if isinstance(picture, Picture.Image) else Picture.fromarray(picture)
        if picture.mode in ("CMYK", "YCbCr", "LAB", "HSV", "F"):  # PNG has none of them
            picture = picture.convert("RGB")
        file = BytesIO()
        picture.save(file, "PNG", compress_level=1)
        return cls(file.getvalue())


Content = str | Sequence[str | Image]
# role, content, and other keys for the chat template. content is text, or parts that are texts and
# images.
ChatMessage = Mapping[str, Any]


@dataclass(frozen=True)
class Observation:
    """Messages before a response.

    images: Encoded files of messages whose content is text, one for each <image> in it; without any
        <image>, the images come first. Leave it empty if content has parts.
    tools: Tools that the policy may call, in OpenAI's form; in the observation of a reset only.
    """

    messages: Sequence[ChatMessage]
    images: Sequence[bytes] = ()
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class RecordedAction:
    """An action of a turn, which the report of a run draws on the image that the policy saw.

    Places are in fractions of the image's width and height, whatever coordinates the policy writes.

    kind: Name of the action, such as click. image: SHA-256 of the image's file (hexadecimal); "" if
    the action is not drawn. at: A point (x, y) or a box (left, top, right, bottom); empty without a
    place. to: The end (x, y) of a drag. text: Typed text, or keys. amount: Notches of the wheel,
    seconds or degrees.
    """

    kind: str
    image: str = ""
    at: Sequence[float] = ()
    to: Sequence[float] = ()
    text: str = ""
    amount: float | None = None

    def values(self) -> dict[str, Any]:
        """Return the fields that are set, as values of JSON."""
        places = {"at": list(map(float, self.at)), "to": list(map(float, self.to))}
        found = {"kind": self.kind, "image": self.image, **places, "text": self.text}
        amount = {} if self.amount is None else {"amount": float(self.amount)}
        return {name: value for name, value in found.items() if value} | amount


@dataclass(frozen=True)
class Step:
    """Result of a turn.

    observation: the next observation, None if `done`. reward: the reward of this turn; the rewards
    of an episode are summed. info: either `score`, the Score behind the reward, or `correct` and
    `parts` with the same meaning as in a Score; and `counts`, numbers by name, whose sums over an
    episode are logged as episode/NAME. actions: what the policy did in this turn, for the report.
    """

    observation: Observation | None
    reward: float
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)
    actions: Sequence[RecordedAction] = ()


@dataclass(frozen=True)
class ChatFormat:
    """The form of a model's responses, and of the images that it sees.

    calls: Form of a tool call in <tool_call>: a JSON object (Qwen2.5-VL, Qwen3-VL), tags for the
        function and its parameters (Qwen3.5 and later), or pairs of keys and values (GLM-4.5 and
        later).
    opens_thought: True if the prompt itself opens a thought, so that a response begins inside it.
    coordinates: Form in which the model was trained to name places in an image: relative (0 to 1000
        across and down the image) or pixels (of the image as the model sees it).
    token_side: Side in pixels of the square of an image that becomes one token.
    """

    calls: Literal["json", "xml", "pairs"] = "json"
    opens_thought: bool = False
    coordinates: Literal["relative", "pixels"] = "relative"
    token_side: int = 28


@dataclass(frozen=True)
class Context:
    """Context of an episode.

    score: Computes the configured reward of a response, in a process with limits.
    max_turns: Largest number of turns of an episode.
    chat: Form of the model's responses, and of the images that it sees.
    tools: Tools that the recipe names in environment.tools.
    tool_timeout: Seconds that the tools of a turn may take.
    max_observation_tokens: Largest number of tokens of an observation, images included.
    shown_sizes: Width and height in pixels at which the model sees each image of the prompt so far,
        by the SHA-256 of its file (hexadecimal); filled before each step.
    """

    score: Callable[[str, Example], Awaitable[Score]]
    max_turns: int
    chat: ChatFormat = ChatFormat()
    tools: Sequence[Any] = ()
    tool_timeout: float = 30.0
    max_observation_tokens: int = 256
    shown_sizes: dict[str, tuple[int, int]] = field(default_factory=dict)


class Environment(Protocol):
    async def reset(self, row: Example, seed: int) -> Observation: ...

    async def step(self, text: str) -> Step: ...

    # Optional: def close(self) -> None, or async


def scored(score: Score) -> Step:
    """Return the last step of an episode, with the reward of the score."""
    return Step(None, score.reward, True, {"score": score})
