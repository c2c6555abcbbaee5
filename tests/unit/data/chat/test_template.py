"""Chats become the tokens that transformers' own template and processor give."""

import io
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from megavlm.data.chat.messages import Message
from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.families import FAMILIES, family_of
from tests.conftest import DATA
from tests.support.samples import auto_processor, image, our_processor, pixel_values


def row(*messages: tuple[str, str], images: int = 0) -> Row:
    chat = tuple(Message(role, text) for role, text in messages)
    data = tuple(image((90 + 30 * seed, 60), seed=seed) for seed in range(images))
    last = next(text for role, text in reversed(messages) if role == "user")
    return Row(0, last, "", data, "", "chat.jsonl:1", messages=chat)


def theirs(folder: Path, row: Row) -> Any:
    """transformers' tokens; placeholders become the template's own images."""
    images = iter([Image.open(io.BytesIO(data)) for data in row.images])
    messages = []
    for message in row.messages:
        content: list[dict[str, Any]] = []
        for number, text in enumerate(message.text.split("<image>")):
            content += [{"type": "image", "image": next(images)}] if number else []
            content += [{"type": "text", "text": text}] if text else []
        messages.append({"role": message.role, "content": content})
    return auto_processor(folder).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


CHATS = [
    row(("system", "Be brief."), ("user", "<image>What color is it?"), images=1),
    row(
        ("user", "<image>What?"), ("assistant", "red"), ("user", "And <image> this?"), images=2
    ),
    row(("system", "s"), ("user", "What?"), ("assistant", "red"), ("user", "Is it?")),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("number", range(len(CHATS)))
def test_chats_equal_autoprocessor(
    folder_of: Callable[[str], Path], family: str, number: int
) -> None:
    processor = our_processor(folder_of(family))
    prompt, expected = processor.prompt(CHATS[number]), theirs(folder_of(family), CHATS[number])
    assert torch.equal(prompt.token_ids, expected["input_ids"][0])
    if prompt.images:
        assert torch.equal(pixel_values(folder_of(family), prompt), expected["pixel_values"])


def test_a_rows_own_system_message_replaces_the_configured_one(
    folder_of: Callable[[str], Path],
) -> None:
    folder = folder_of("qwen2_5_vl")
    plain = Processor(folder, DATA, family_of(folder))
    strict = Processor(folder, replace(DATA, system_prompt="Be brief."), family_of(folder))
    own, without = CHATS[0], replace(CHATS[0], messages=CHATS[0].messages[1:])
    assert torch.equal(strict.prompt(without).token_ids, plain.prompt(own).token_ids)
    other = replace(own, messages=(Message("system", "What?"), *own.messages[1:]))
    assert torch.equal(strict.prompt(other).token_ids, plain.prompt(other).token_ids)


def test_unmarked_images_come_before_the_first_text_of_the_user(
    folder_of: Callable[[str], Path],
) -> None:
    processor = our_processor(folder_of("qwen2_5_vl"))
    unmarked = row(("user", "What?"), ("assistant", "red"), ("user", "Is it?"), images=2)
    marked = row(
        ("user", "<image><image>What?"), ("assistant", "red"), ("user", "Is it?"), images=2
    )
    assert torch.equal(processor.prompt(unmarked).token_ids, processor.prompt(marked).token_ids)


def test_messages_that_the_template_refuses_are_one_sentence(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template is Qwen3.5's, which takes a system message at the beginning only."""
    processor = our_processor(folder_of("qwen3_5"))
    template = resources.files("trl").joinpath("chat_templates", "qwen3_5_think.jinja").read_text()
    monkeypatch.setattr(processor.chat_template, "_template", template)
    with pytest.raises(ValueError, match=r"chat\.jsonl:1: .* refuses the messages \("):
        processor.prompt(row(("user", "What?"), ("system", "Be brief."), ("user", "What?")))
