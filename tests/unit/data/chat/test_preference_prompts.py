"""Pairs of responses: the forms that a row may have, the tree of a pair, and rows that are none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.config.data import Data
from megavlm.data.packs.trees import preference_tree, supervised_tree
from megavlm.data.processor import Processor, PromptTooLong
from megavlm.data.rows import Row, Rows
from megavlm.families import family_of
from tests.conftest import png
from tests.support.templates import with_template

Read = Callable[..., Row]
IMAGE = {"bytes": None, "path": "image.png"}
ASKED = {"role": "user", "content": "<image>What color is it?"}
RED, BLUE = ({"role": "assistant", "content": text} for text in ("red", "blue"))
TEXTS = {"prompt": ASKED["content"], "chosen": "red", "rejected": "blue"}
EXPLICIT = {"prompt": [ASKED], "chosen": [RED], "rejected": [BLUE]}
IMPLICIT = {"chosen": [ASKED, RED], "rejected": [ASKED, BLUE]}
KEYS: dict[str, Any] = {
    "prompt_key": "prompt", "answer_key": "chosen", "rejected_key": "rejected",
    "category_key": None,
}  # fmt: skip
OF_CHATS = {"prompt_key": "chosen", "answer_key": None}


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads a row with an image from a file of JSON lines."""
    (tmp_path / "image.png").write_bytes(png())

    def made(record: dict[str, Any], **keys: Any) -> Row:
        path = tmp_path / "pairs.jsonl"
        path.write_text(json.dumps({"images": [IMAGE], **record}))
        return Rows([str(path)], Data(**{**KEYS, **keys}))[0]

    return made


@pytest.fixture(scope="module")
def processor(folder_of: Callable[[str], Path]) -> Processor:
    folder = folder_of("qwen2_5_vl")
    return Processor(folder, Data(**KEYS, pack_tokens=40), family_of(folder))


@pytest.mark.parametrize(
    ("record", "keys"), [(TEXTS, {}), (EXPLICIT, {}), (IMPLICIT, OF_CHATS)], ids=str
)
def test_the_tree_of_a_pair(
    read: Read, processor: Processor, record: dict[str, Any], keys: dict[str, Any]
) -> None:
    prompt = processor.preference_prompt(read(record, **keys))
    tree = preference_tree(prompt, 3, 8, (-6.0, -9.0))
    root, chosen, rejected = tree.segments
    assert root.token_ids.equal(processor.prompt(read(TEXTS)).token_ids)
    assert root.images == (prompt.images[0].key,) and not root.is_target
    for segment, text, mean, is_chosen in ((chosen, "red", -6, 1), (rejected, "blue", -9, 0)):
        assert segment.token_ids.tolist() == processor.encode_answer(text)
        assert segment.parent == 0 and segment.is_target
        assert int(segment.positions[0, 0]) == prompt.next_position
        size, columns = len(segment.token_ids), segment.columns
        assert columns is not None and columns.reference_logprobs is not None
        assert columns.reference_logprobs.sum() == pytest.approx(mean)
        assert columns.sequence_ids.tolist() == [3] * size
        assert columns.is_chosen is not None and columns.is_chosen.tolist() == [is_chosen] * size
        assert columns.loss_weights.tolist() == [1 / 8] * size
    assert len(tree.branches()) == 1, "no pack has a part of a pair"


def test_calls_of_tools_are_responses(read: Read) -> None:
    call = {"type": "function", "function": {"name": "zoom", "arguments": {"box": [1, 2]}}}
    calls = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    row = read({**EXPLICIT, "chosen": calls})
    assert row.response is not None and row.response.keys == {"tool_calls": [call]}
    swapped = read({**EXPLICIT, "rejected": calls})
    assert swapped.rejected is not None and swapped.rejected.keys == {"tool_calls": [call]}


def test_a_pair_is_compared_by_its_tokens(
    read: Read, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Spellings that the template makes the same are no pair; the same text may be one."""
    data = Data(**KEYS)
    processor = with_template("qwen3_8", folder_of("qwen3_5"), tmp_path / "model", data)

    def said(text: str, **keys: Any) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": text, **keys}]

    thought = said("red", reasoning_content="hm")
    for chosen, rejected in (
        ("red", " red\n"),
        ("red", [{**RED, "name": "a", "weight": 0}]),
        ("red", said([{"type": "text", "text": "red"}])),
        ("<think>\nhm\n</think>\n\nred", thought),
    ):
        with pytest.raises(ValueError, match=r"pairs\.jsonl:1: .* are the same tokens; leave"):
            processor.pair_ids(read({**TEXTS, "chosen": chosen, "rejected": rejected}))
    processor.pair_ids(read({**TEXTS, "chosen": "red", "rejected": thought}))


def test_a_rejected_chat_is_about_the_images_of_the_prompt(read: Read, tmp_path: Path) -> None:
    """Ids of calls and weights of earlier turns are in no token, and may differ."""
    (tmp_path / "other.png").write_bytes(png(56, 56))
    call = {"type": "function", "function": {"name": "zoom", "arguments": {}}}

    def chat(image: str, answer: dict[str, str], id_: str, **keys: Any) -> list[dict[str, Any]]:
        shown = {"role": "user", "content": [{"type": "image", "path": image}, "?"]}
        turn = {"role": "assistant", "content": "", "tool_calls": [{**call, "id": id_}], **keys}
        return [shown, turn, {"role": "tool", "content": "1", "tool_call_id": id_}, answer]

    chosen, keys = chat("image.png", RED, "a"), {**OF_CHATS, "image_keys": ()}
    same = {"chosen": chosen, "rejected": chat("image.png", BLUE, "b", weight=0)}
    row = read({**same, "images": []}, **keys)
    assert row.rejected is not None and row.rejected.text == "blue"
    with pytest.raises(ValueError, match="column 'rejected': its messages before the response are"):
        read({**same, "rejected": chat("other.png", BLUE, "b"), "images": []}, **keys)


def test_sft_learns_an_answer_in_a_column_of_messages_and_nothing_before(
    read: Read, processor: Processor
) -> None:
    prompt = [ASKED, BLUE, {"role": "user", "content": "What color is it?"}]
    row = read({**EXPLICIT, "prompt": prompt})
    tree = supervised_tree(processor.supervised_prompt(row))
    learnt = [segment.token_ids for segment in tree.segments if segment.is_target]
    assert len(learnt) == 1 and learnt[0].equal(torch.tensor(processor.encode_answer("red")))


@pytest.mark.parametrize(
    ("record", "keys", "message"),
    [
        ({**TEXTS, "rejected": None}, {}, "algorithm.name=dpo needs a response to reject"),
        ({**TEXTS, "rejected": "red"}, {}, "the chosen and the rejected response are the same tok"),
        ({**EXPLICIT, "rejected": [RED]}, {}, "the chosen and the rejected response are the same "),
        ({**TEXTS, "rejected": "<|im_end|>"}, {}, "'rejected' holds '<|im_end|>', a control token"),
        ({**TEXTS, "rejected": ["blue"]}, {}, "'rejected' is ['blue']; it must be text or a num"),
        (
            {**EXPLICIT, "rejected": [ASKED]},
            {},
            "column 'rejected': its last message is by the user, not by the assistant",
        ),
        (
            {**EXPLICIT, "chosen": [{**ASKED, "content": "Which?"}, RED]},
            {},
            "column 'chosen': its messages before the response are not the prompt's: give",
        ),
        (
            {**IMPLICIT, "rejected": [{**ASKED, "content": "<image>Which?"}, BLUE]},
            OF_CHATS,
            "column 'rejected': its messages before the response are not the prompt's: give",
        ),
        (
            {**EXPLICIT, "rejected": [{"role": "assistant", "content": [{"type": "image"}]}]},
            {},
            "column 'rejected': message 0 is the answer, but it has an image, a video or audio",
        ),
    ],
)
def test_rows_that_are_no_pair(
    read: Read, processor: Processor, record: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        processor.preference_prompt(read(record, **keys))
    assert message in str(error.value) and "pairs.jsonl:1: " in str(error.value)


def test_a_pair_that_no_pack_holds_is_too_long(read: Read, processor: Processor) -> None:
    with pytest.raises(PromptTooLong, match=r"have \d+ tokens, more than data.pack_tokens=40; rai"):
        processor.preference_prompt(read({**TEXTS, "rejected": "blue " * 30}))


def test_only_pairs_change_the_digest_of_the_data(tmp_path: Path) -> None:
    """Checkpoints that knew of no pairs still load."""
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({**TEXTS, "images": []}))
    plain, pairs = (
        Rows([str(path)], Data(**{**KEYS, "rejected_key": key})) for key in (None, "rejected")
    )
    assert plain.fingerprint() != pairs.fingerprint()
