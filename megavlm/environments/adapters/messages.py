"""Parts of several adapters: prompts of rows in parts, and actions that are written in text."""

import re
from collections.abc import Sequence

from megavlm.environments.base import ChatFormat, ChatMessage, Image, Observation, Step
from megavlm.environments.tools.calls import read_reply
from megavlm.rewards.base import Example

_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


def opening(row: Example, parts: Sequence[str | Image]) -> Observation:
    """Return the row's prompt with `parts` at the end of its last message."""
    *before, last = in_parts(row)
    space = ["\n\n"] if last["content"] else []
    return Observation([*before, {**last, "content": [*last["content"], *space, *parts]}])


def in_parts(row: Example) -> list[ChatMessage]:
    """Return the row's messages with content in parts: its images are in place of <image>, and
    without any <image> before the first text of the user.
    """
    images = [Image(data) for data in row.images]
    texts = [m["content"].split("<image>") if images else [m["content"]] for m in row.messages]
    if all(len(text) == 1 for text in texts):
        asked = [message["role"] for message in row.messages].index("user")
        texts[asked] = [*[""] * len(images), *texts[asked]]
    left, found = iter(images), list[ChatMessage]()
    for message, (text, *others) in zip(row.messages, texts, strict=True):
        parts: list[str | Image] = [text]
        for other in others:
            parts += [next(left), other]
        found.append({**message, "content": [part for part in parts if part != ""]})
    return found


def written_action(text: str, chat: ChatFormat) -> str:
    """Return the last <action> that a response writes, or else its whole text. Thoughts are left
    out.
    """
    said = read_reply(text, chat).text
    found = _ACTION.findall(said)
    return (found[-1] if found else said).strip()


def mistake(problem: str) -> Step:
    """Return a turn that changes nothing, in which the policy reads what is wrong."""
    shown = Observation([{"role": "user", "content": f"error: {problem}"}])
    return Step(shown, 0.0, False, {"counts": {"action_errors": 1}})
