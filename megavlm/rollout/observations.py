"""Observations as rows: the next turn of a prompt, within the budget of its episode."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from megavlm.config.environment import EnvironmentConfig
from megavlm.data.chat.messages import IMAGE_PLACEHOLDER, ROLES, Message
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.environments.base import ChatMessage, Image, Observation
from megavlm.subprocess_pool.failure import CallFailure


class OverBudget(Exception):
    """An observation that the budget of its episode does not admit. The message says why."""


class ObservationRenderer:
    """Appends observations to prompts."""

    def __init__(
        self, processor: Processor, settings: EnvironmentConfig, max_new_tokens: int
    ) -> None:
        self._processor, self._settings = processor, settings
        self._max_new_tokens = max_new_tokens

    def row(self, base: Row, observation: Observation) -> Row:
        """Return the first observation of an episode as a row. It has the videos and audio of
        `base`.

        Raises CallFailure if it does not have the form of Observation.
        """
        row = self._row(base, observation, list(observation.messages))
        row = replace(row, videos=base.videos, audio=base.audio)
        if row.messages and not any(message.role == "user" for message in row.messages):
            raise self._unusable(base, "no user message")
        return row

    def next_prompt(
        self, prompt: Prompt, response: Sequence[int], observation: Observation, num_first: int
    ) -> tuple[Prompt | None, dict[str, int]]:
        """Append a response and the observation after it to a prompt. Returns the next prompt, None
        if the episode is over budget and ends, and counts for the log.

        num_first: Number of images of the episode's first prompt, which are never replaced. Raises
        CallFailure if the observation cannot be shown.
        """
        messages = [self._spelled_out(message) for message in observation.messages]
        row = self._row(prompt.row, observation, messages)
        following = self._appended(prompt, response, row)
        added = len(following.token_ids) - len(prompt.token_ids) - len(response)
        counts = dict[str, int]()
        most = self._settings.max_images
        if self._settings.over_budget == "replace" and most is not None:
            replaced = min(len(following.images) - most, len(prompt.images) - num_first)
            if replaced > 0:
                following = self._processor.without_images(
                    following, range(num_first, num_first + replaced)
                )
                counts["images_replaced"] = replaced
        try:
            self._check(prompt, following, added)
        except OverBudget as problem:
            if self._settings.over_budget == "end":
                return None, {"over_budget": 1}
            note = [_refused(message, str(problem)) for message in messages]
            row = self._row(prompt.row, Observation(note), note)
            following, counts = self._appended(prompt, response, row), {"observations_refused": 1}
            added = len(following.token_ids) - len(prompt.token_ids) - len(response)
            try:
                self._check(prompt, following, added)
            except OverBudget:
                return None, {"over_budget": 1}
        return following, counts

    def _appended(self, prompt: Prompt, response: Sequence[int], row: Row) -> Prompt:
        try:
            return self._processor.next_turn(prompt, response, row)
        except ValueError as error:
            raise CallFailure("value", f"{self._name(prompt.row)}: {error}") from error

    def _check(self, prompt: Prompt, following: Prompt, added: int) -> None:
        """Raise OverBudget if the next prompt is over budget. added: Tokens of the observation."""
        settings = self._settings
        if added > settings.max_observation_tokens:
            raise OverBudget(
                f"it has {added} tokens, and {settings.max_observation_tokens} are allowed"
            )
        # A row may have more images than that; text after them is no matter.
        most = settings.max_images
        if most is not None and len(following.images) > max(most, len(prompt.images)):
            raise OverBudget(f"no more than {most} images are allowed")
        longest = len(following.token_ids) + self._max_new_tokens
        if settings.max_tokens is not None and longest > settings.max_tokens:
            raise OverBudget("no room is left for it")

    def _row(self, base: Row, observation: Observation, messages: Sequence[ChatMessage]) -> Row:
        """Return an observation as a row. Without images, <image> in its text is plain text,
        because the environment may repeat the policy's words.
        """
        if problem := _problem(messages, len(observation.images)):
            raise self._unusable(base, problem)
        parted = [message["content"] for message in messages if _is_parts(message["content"])]
        shown_in_parts = [
            part.data for parts in parted for part in parts if isinstance(part, Image)
        ]
        images = [*observation.images, *shown_in_parts]
        # If one message has parts, a placeholder is plain text in all of them.
        read = [_message(message, bool(parted)) for message in messages]
        asked = [m.text for m in read if m.role == "user"][-1:]
        shown = "\n".join(asked or [m.text for m in read])  # the results of all calls of a turn
        alone = read == [Message("user", shown)]
        return replace(
            base,
            problem=shown,
            images=tuple(images),
            videos=(),
            audio=(),
            messages=() if alone else tuple(read),
            tools=tuple(observation.tools) or base.tools,
        )

    def _spelled_out(self, message: ChatMessage) -> ChatMessage:
        """Return a message whose text has no control tokens: a tool may show any text."""
        content, spell = message.get("content"), self._processor.chat_template.spelled_out
        if isinstance(content, str):
            return {**message, "content": spell(content)}
        if not _is_parts(content):
            return message
        return {**message, "content": [spell(p) if isinstance(p, str) else p for p in content]}

    def _unusable(self, row: Row, problem: str) -> CallFailure:
        return CallFailure(
            "value",
            f"{self._name(row)}: an observation has {problem}; give it messages whose content is "
            "text or parts, and text an <image> for each of Observation.images or none",
        )

    def _name(self, row: Row) -> str:
        return f"environment.name={self._settings.name}, {row.source}"


def _message(message: ChatMessage, has_parts: bool) -> Message:
    keys = {key: value for key, value in message.items() if key not in ("role", "content")}
    role, content = message["role"], message["content"]
    if not has_parts:
        return Message(role, content, keys)
    content = [content] if isinstance(content, str) else content
    text = "".join(part if isinstance(part, str) else IMAGE_PLACEHOLDER for part in content)
    return Message(role, text, keys, parts=tuple(map(_part, content)))


def _is_parts(content: Any) -> TypeGuard[Sequence[str | Image]]:
    """Return True for content that is a sequence of texts and images."""
    return (
        isinstance(content, Sequence)
        and not isinstance(content, str)
        and all(isinstance(part, str | Image) for part in content)
    )


def _part(part: str | Image) -> Mapping[str, str]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


def _problem(messages: Sequence[ChatMessage], num_images: int) -> str:
    """Return why messages cannot be shown to a policy; "" if they can. num_images: Number of images
    beside messages whose content is text.
    """
    if not messages:
        return "no message"
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            return f"the role {role!r:.40}, which is none of {', '.join(ROLES)}"
        if not isinstance(content, str) and not _is_parts(content):
            return f"the content {content!r:.80}"
    texts = [message["content"] for message in messages if isinstance(message["content"], str)]
    if num_images and len(texts) < len(messages):
        return f"both content in parts and {num_images} images beside it"
    marks = sum(text.count(IMAGE_PLACEHOLDER) for text in texts)
    if num_images and marks not in (0, num_images):
        return f"{marks} <image> for {num_images} images"
    return ""


def _refused(message: ChatMessage, why: str) -> dict[str, Any]:
    """Return a message in place of one that is over budget."""
    return {**message, "content": f"error: this was left out: {why}"}
