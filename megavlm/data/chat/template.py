"""Text of rows, rendered by the model folder's chat template: prompts, next turns and answers."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import TemplateError

from megavlm.config.data import Data
from megavlm.data.chat.hermes import with_tools_as_text
from megavlm.data.chat.messages import (
    AUDIO_PLACEHOLDER,
    IMAGE_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    Message,
)
from megavlm.data.rows import Row

_RESPONSE = "A response that no chat template contains."
_EXCHANGE: tuple[dict[str, object], ...] = (
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": _RESPONSE},
)
# Keys of a message that hold content. A template may leave other keys, such as ids, unread.
_CONTENT_KEYS = (
    "tool_calls",
    "reasoning_content",
    "reasoning",
    "thinking",
    "function_call",
    "audio",
    "refusal",
)
_THINK, _END_THINK = "<think>", "</think>"
# Special tokens of Qwen2-VL and Qwen2.5-VL that a text may hold: answers mark objects and boxes
# with them.
_MARKUP = re.compile(r"<\|(object_ref|box|quad)_(start|end)\|>")


@dataclass(frozen=True)
class Turns:
    """Messages of the assistant before the answer.

    spans: Bounds of the messages that SFT learns, in characters of the prompt text, with the end
        of turn.
    num_context: Number of messages that SFT does not learn because the template does not render
        them as they are sampled.
    """

    spans: tuple[tuple[int, int], ...] = ()
    num_context: int = 0


class ChatTemplate:
    """A chat template, together with the tokens that a row's text must not hold."""

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        data: Data,
        *,
        end_ids: Sequence[int],
        control_ids: Sequence[int],
    ) -> None:
        """Store the template.

        end_ids: The tokens that may end a turn; the first ends one without tool calls.
        control_ids: Tokens that a text must not hold, in addition to the tokenizer's special
            tokens.

        Raises ValueError if the system prompt or data.question holds such a token.
        """
        self._tokenizer, self._template, self._data = tokenizer, template, data
        self.system_prompt = data.system_prompt
        # Tools are written into the text for a template that knows none.
        self._knows_tools = re.search(r"\btools\b", template) is not None
        self.call_form: Literal["json", "xml", "pairs"] = (
            "xml" if "<function=" in template else "pairs" if "<arg_key>" in template else "json"
        )
        self._reads_thoughts = "reasoning_content" in template
        self._after_response = text_after_response(tokenizer, template)
        asked = tokenizer.apply_chat_template(
            list(_EXCHANGE[:1]), chat_template=template, add_generation_prompt=True, tokenize=False
        )
        self.opens_thought: bool = asked.rstrip().endswith(_THINK)
        self.before_response: str = asked.rpartition(str(_EXCHANGE[0]["content"]))[2]
        self._ends: list[str] = [tokenizer.decode([end_id]) for end_id in end_ids]
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = {str(tokenizer.convert_ids_to_tokens(i)) for i in special | set(control_ids)}
        names = {name for name in names if not _MARKUP.fullmatch(name)}
        self._control = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
        if data.system_prompt is not None:
            self._check_text(data.system_prompt, "data.system_prompt")
        if data.question is not None:
            self._check_text(data.question, "data.question")

    def prompt(self, row: Row) -> str:
        """Return the text up to the start of the response.

        Raises ValueError that names the row if the prompt or the answer holds a control token, if
        the template refuses the messages, if it does not read the row's tools or the content keys
        of a message, or if it leaves out the text of a message or writes a thought twice.
        """
        return self._prompt(row, self._messages(row, self.system_prompt))

    def next_turn(self, row: Row, end: str) -> str:
        """Return the text from the end of a response to the start of the next one.

        end: The text of the token that ended the response. If the template begins the next turn by
            another end of turn (a user's turn, where the response ended by the mark of a tool's
            result), that follows.

        Raises ValueError as `prompt` does, and if the template does not end a response by an end of
        turn.
        """
        asked, replied = _EXCHANGE
        text = self._prompt(row, [asked, replied, *self._messages(row, None)], "an observation")
        text = text.rpartition(_RESPONSE)[2]
        if not text.startswith(tuple(self._ends)):
            raise ValueError(
                f"model.folder: its chat template ends a response by {text[:20]!r}, and not by "
                f"{' or '.join(map(repr, self._ends))}, so that episodes cannot continue after one"
            )
        return text.removeprefix(end)

    def answer(self, row: Row) -> str:
        """Return the text of the row's answer as a response, without the end of turn.

        Raises ValueError as `prompt` does, and for an answer that cannot follow the prompt's text.
        """
        messages = self._messages(row, self.system_prompt)
        prompt = self._prompt(row, messages)
        response = row.response or Message("assistant", row.answer)
        self._check_keys(row, [response])
        messages = [*messages, self._message(row, response, response.text, {})]
        text = self._render(row, messages, begins_response=False)
        _check_shown(row, messages, text)
        if not text.startswith(prompt) or not text.endswith(self._after_response):
            begin = prompt[max(prompt.rfind(end) + len(end) for end in self._ends) :]
            raise ValueError(
                f"{row.source}: the chat template begins a response by {begin!r}, but renders this "
                f"answer otherwise, as {text[len(prompt) - len(begin) :][:80]!r}: give an answer "
                "that it renders so (with a thought or without), or take another template"
            )
        return text.removeprefix(prompt).removesuffix(self._after_response)

    def turns(self, row: Row) -> Turns:
        """Return the messages of the assistant before the answer; they are learnt only if the chat
        itself gives the answer.

        Raises ValueError as `prompt` does.
        """
        system = self.system_prompt
        before, messages = _with_system(row, system), self._messages(row, system)
        text, spans, num_learnt = self._prompt(row, messages), list[tuple[int, int]](), 0
        has_answer = row.response is not None and self._data.answer_key is None
        for index, message in enumerate(before):
            if not has_answer or message.role != "assistant" or not message.is_trained:
                continue
            num_learnt += 1
            if not any(earlier.role == "user" for earlier in before[:index]):
                continue  # it answers no question, and templates refuse a chat without one
            start = self._render(row, messages[:index])
            if isinstance(messages[index]["content"], str) and text.startswith(start):
                ends = re.compile("|".join(map(re.escape, self._ends)))
                if end := ends.search(text, len(start)):
                    spans.append((len(start), end.end()))
        return Turns(tuple(spans), num_learnt - len(spans))

    def _prompt(self, row: Row, messages: list[dict[str, object]], name: str = "") -> str:
        name = name or repr(self._data.prompt_key or "data.question")
        self._check_keys(row, row.messages)
        for text in (row.problem, *(message.text for message in row.messages)):
            # Some models have tokens of the same names. They are counted in the rendered prompt.
            for mark in (IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, AUDIO_PLACEHOLDER):
                text = text.replace(mark, " ")
            self._check_text(text, f"{row.source}: {name}")
        responses = [message for message in (row.response, row.rejected) if message is not None]
        further = [message.keys for message in (*row.messages, *responses)]
        if row.tools or any(further):
            said = json.dumps([further, row.tools], ensure_ascii=False, default=str)
            self._check_text(said, f"{row.source}: {name} or 'tools'")
        answer = name if self._data.answer_key is None else repr(self._data.answer_key)
        self._check_text(row.answer, f"{row.source}: {answer}")
        if row.rejected is not None:
            self._check_text(row.rejected.text, f"{row.source}: {self._data.rejected_key!r}")
        text = self._render(row, messages)
        _check_shown(row, messages, text)
        return text

    def spelled_out(self, text: str) -> str:
        """Return a text in which control tokens are ordinary text: <|im_end|> as < |im_end|>."""
        return self._control.sub(lambda found: f"{found[0][:1]} {found[0][1:]}", text)

    def _render(
        self, row: Row, messages: list[dict[str, object]], *, begins_response: bool = True
    ) -> str:
        tools = [dict(tool) for tool in row.tools]
        if not self._knows_tools:
            messages, tools = with_tools_as_text(messages, tools), []
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=self._template,
                add_generation_prompt=begins_response,
                tokenize=False,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"{row.source}: the model's chat template refuses the messages ({error})"
            ) from error
        return text

    def _check_text(self, text: str, where: str) -> None:
        if found := self._control.search(text):
            raise ValueError(
                f"{where} holds {found[0]!r}, a control token of the model; remove it or spell it "
                f"otherwise (places of images and videos are marked by {IMAGE_PLACEHOLDER} and "
                f"{VIDEO_PLACEHOLDER})"
            )

    def _check_keys(self, row: Row, messages: Sequence[Message]) -> None:
        """Check that the template reads the keys with content: it would silently leave out keys
        that it does not know.
        """
        used = {key for message in messages for key in _CONTENT_KEYS if message.keys.get(key)}
        if not self._knows_tools:
            used.discard("tool_calls")
        for key in sorted(used):
            if not re.search(rf"\b{key}\b", self._template):
                raise ValueError(
                    f"{row.source}: the chat has {key}, but the model's chat template does not "
                    "read them: write them into the text of the messages, or take a model whose "
                    "template reads them"
                )

    def _messages(self, row: Row, system_prompt: str | None) -> list[dict[str, object]]:
        """Return the messages up to the response, in the form that the template takes."""
        messages = _with_system(row, system_prompt)
        # A placeholder counts only if the row has images (or videos). Without any placeholder, they
        # come before the first text of the user.
        marked = {
            mark: (kind, len(items))
            for mark, kind, items in (
                (IMAGE_PLACEHOLDER, "image", row.images),
                (VIDEO_PLACEHOLDER, "video", row.videos),
                (AUDIO_PLACEHOLDER, "audio", row.audio),
            )
            if items
        }
        first = "".join(
            mark * number
            for mark, (_, number) in marked.items()
            if not any(message.parts or mark in message.text for message in messages)
        )
        # The next turn of an episode may only have the results of tools.
        asked = next((i for i, message in enumerate(messages) if message.role == "user"), 0)
        return [
            self._message(row, message, first * (i == asked) + message.text, marked)
            for i, message in enumerate(messages)
        ]

    def _message(
        self, row: Row, message: Message, text: str, marked: Mapping[str, tuple[str, int]]
    ) -> dict[str, object]:
        """Return a message in the form that the template takes. A thought at the start of the
        assistant's text becomes `reasoning_content` if the template reads that: some such templates
        would write an empty thought before it.
        """
        keys = dict(message.keys)
        if message.role == "assistant" and message.parts is None and self._reads_thoughts:
            thought, rest = _thought_apart(text)
            if keys.get("reasoning_content") and text.lstrip().startswith(_THINK):
                raise ValueError(
                    f"{row.source}: the assistant's message {text!r:.60} has its thought twice, in "
                    "reasoning_content and in its text: leave one out"
                )
            if thought is not None and not keys.get("reasoning_content"):
                keys["reasoning_content"], text = thought, rest
        return {"role": message.role, "content": _content(message, text, marked), **keys}


def text_after_response(tokenizer: Any, template: str, followed_by: str | None = None) -> str:
    """Return the text that a chat template writes after the last response of a chat, or after one
    that a message of the role `followed_by` follows.
    """
    further = [] if followed_by is None else [{"role": followed_by, "content": "?"}]
    rendered: str = tokenizer.apply_chat_template(
        [*_EXCHANGE, *further], chat_template=template, tokenize=False
    )
    return rendered.rpartition(_RESPONSE)[2]


def _with_system(row: Row, system_prompt: str | None) -> tuple[Message, ...]:
    """Return the messages of a row, with `system_prompt` unless they have a system message."""
    messages = row.messages or (Message("user", row.problem),)
    if system_prompt is None or messages[0].role == "system":
        return messages
    return (Message("system", system_prompt), *messages)


def _content(
    message: Message, text: str, marked: Mapping[str, tuple[str, int]]
) -> str | list[Mapping[str, str]]:
    if message.parts is not None:
        return list(message.parts)
    if message.role != "user" and not any(mark in text for mark in marked):
        return text
    parts = re.split(f"({'|'.join(marked)})", text) if marked else [text]
    return [
        {"type": marked[part][0]} if part in marked else {"type": "text", "text": part}
        for part in parts
        if part
    ]


def _thought_apart(text: str) -> tuple[str | None, str]:
    """Split a text of the assistant into the thought that it begins with, None if it has none, and
    the rest. The prompt may have opened the thought.
    """
    before, mark, rest = text.partition(_END_THINK)
    before = before.strip().removeprefix(_THINK)
    return (before.strip(), rest.lstrip("\n")) if mark and _THINK not in before else (None, text)


def _check_shown(row: Row, messages: Sequence[Mapping[str, Any]], rendered: str) -> None:
    """Raise ValueError if a rendering lacks the text of a message, or has a thought twice.
    Templates strip white space, and may leave out earlier thoughts.
    """
    start = end = thoughts = 0  # thoughts that may stand after `start`
    for message in messages:
        content, role = message["content"], message["role"]
        parts = [{"text": content}] if isinstance(content, str) else content
        texts = [part.get("text", "") for part in parts]
        for text in filter(None, map(str.strip, texts)):
            found = rendered.find(text, end)
            if found < 0:
                raise ValueError(
                    f"{row.source}: the model's chat template leaves out or changes the "
                    f"{role} message {text!r:.60}: give its text in another place (many templates "
                    "show a system message only as the first), or take another template"
                )
            end = found + len(text)
        given = bool(message.get("reasoning_content")) + str(message).count(_END_THINK)
        thoughts += max(1, given) if role == "assistant" else given
        if end > start:
            if role == "assistant" and rendered.count(_END_THINK, start, end) > thoughts:
                raise ValueError(
                    f"{row.source}: the model's chat template writes a thought of its own beside "
                    f"the one in the assistant's message {texts[0]!r:.60}: leave the thought out, "
                    "or take a template that reads it"
                )
            start, thoughts = end, 0
