"""SFT learns the assistant's turns as the families' own chat templates render them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.data.chat.messages import Message, read_chat, read_tools
from megavlm.data.packs.packing import make_pack
from megavlm.data.packs.trees import Tree, supervised_tree
from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.families import family_of
from tests.conftest import DATA
from tests.support.samples import image
from tests.support.templates import TEMPLATES, TEXT_TEMPLATES, template_of, with_template

Make = Callable[..., Processor]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "zoom",
            "description": "Zooms in.",
            "parameters": {"type": "object", "properties": {"box": {"type": "array"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "zoom", "arguments": {"box": [1, 2]}}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "Where is the car?"}],
    },
    {"role": "assistant", "content": "I zoom.", "tool_calls": [CALL]},
    {"role": "tool", "content": [{"type": "image"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "a car"},
    {"role": "tool", "content": "a tree"},
    {"role": "assistant", "content": "At the left."},
]
JSON_CALL = '<tool_call>\n{"name": "zoom", "arguments": {"box": [1, 2]}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=zoom>\n<parameter=box>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
)
JSON_TURNS = [f"I zoom.\n{JSON_CALL}", f"{JSON_CALL}\n{JSON_CALL}", "At the left."]
XML_TURNS = [f"I zoom.\n\n{XML_CALL}", f"{XML_CALL}\n{XML_CALL}", "At the left."]
KNOWS_TOOLS = {"qwen2_5_vl": "qwen3_vl"}
NO_THOUGHT = "\n</think>\n\n"
TURNS = {
    "qwen2_5_vl": JSON_TURNS,
    "qwen3_vl": JSON_TURNS,
    "qwen3_5_think": [NO_THOUGHT + turn for turn in XML_TURNS],
    "qwen3_5_nothink": XML_TURNS,
    "qwen3_6": [NO_THOUGHT + turn for turn in XML_TURNS],
    "qwen3_8": [NO_THOUGHT + turn for turn in XML_TURNS],
}


@pytest.fixture
def make(folder_of: Callable[[str], Path], tmp_path: Path) -> Make:
    """Makes the processor of a tiny model with a released template, and further tokens."""

    def processor(name: str, **keys: Any) -> Processor:
        folder = folder_of((TEMPLATES | TEXT_TEMPLATES).get(name, "qwen2_5_vl"))
        return with_template(name, folder, tmp_path / name, DATA, **{"answer_key": None, **keys})

    return processor


def row_of(chat: list[dict[str, Any]], tools: object = None) -> Row:
    """Return the row of a chat, with an image for each part that is one."""
    read = read_chat(chat)
    sizes = [(90 + 30 * seed, 60) for seed in range(read.num_bare["image"])]
    images = tuple(image(size, seed=seed) for seed, size in enumerate(sizes))
    *before, response = read.messages
    asked = next(message.text for message in reversed(before) if message.role == "user")
    return Row(
        0, asked, response.text, images, "", "x.jsonl:1",
        messages=tuple(before), response=response, tools=read_tools(tools),
    )  # fmt: skip


def exchange(*turns: str) -> list[dict[str, Any]]:
    """Return a chat of questions and answers by turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


def targets(processor: Processor, tree: Tree) -> list[str]:
    decode = processor._tokenizer.decode
    return [decode(segment.token_ids) for segment in tree.segments if segment.is_target]


def learnt(processor: Processor, row: Row) -> list[str]:
    """Return the texts that SFT learns of a row, without the end of turn that all have."""
    texts = targets(processor, supervised_tree(processor.supervised_prompt(row)))
    assert all(text.endswith("<|im_end|>") for text in texts)
    return [text.removesuffix("<|im_end|>") for text in texts]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_with_tools_is_what_transformers_renders(make: Make, name: str) -> None:
    """Qwen2.5-VL's template knows no tools; the form of its text is that of Qwen3-VL's."""
    processor, row = make(name), row_of(CHAT, TOOLS)
    prompt = processor.supervised_prompt(row)
    tree = supervised_tree(prompt)
    assert targets(processor, tree) == [f"{turn}<|im_end|>" for turn in TURNS[name]]
    ids = torch.cat([segment.token_ids for segment in tree.segments])
    vision = processor.image_token_id
    short = [
        token for i, token in enumerate(ids.tolist()) if token != vision or ids[i - 1] != vision
    ]
    text = processor._tokenizer.apply_chat_template(
        CHAT, tools=TOOLS, chat_template=template_of(KNOWS_TOOLS.get(name, name)), tokenize=False
    )
    assert short == processor._tokenizer(text.removesuffix("\n"))["input_ids"]


def test_the_mask_is_that_of_trl_s_template(make: Make) -> None:
    """It marks what the assistant says, and the line break after the end of turn, too."""
    processor = make("qwen3_vl")
    theirs = processor._tokenizer.apply_chat_template(
        CHAT,
        tools=TOOLS,
        chat_template=template_of("qwen3_vl_training"),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    pairs = zip(theirs["input_ids"], theirs["assistant_masks"], strict=True)
    said = processor._tokenizer.decode([token for token, mask in pairs if mask])
    ours = learnt(processor, row_of(CHAT, TOOLS))
    assert "".join(f"{text}<|im_end|>\n" for text in ours) == said


def test_the_tree_of_a_chat_has_its_images_and_positions_in_place(make: Make) -> None:
    processor = make("qwen3_vl")
    prompt = processor.supervised_prompt(row_of(CHAT, TOOLS))
    tree = supervised_tree(prompt)
    first, second = (shown.key for shown in prompt.images)
    assert [segment.images for segment in tree.segments] == [(first,), (), (second,), (), (), ()]
    assert [segment.is_target for segment in tree.segments] == [False, True] * 3
    assert [segment.parent for segment in tree.segments] == [-1, 0, 1, 2, 3, 4]
    positions = torch.cat([segment.positions for segment in tree.segments], dim=1)
    num_tokens = len(prompt.token_ids)
    assert torch.equal(positions[:, :num_tokens], prompt.positions)
    assert positions[0, num_tokens:].tolist() == [
        prompt.next_position + i for i in range(len(prompt.answer_ids))
    ]
    pack = make_pack([tree], vision_token_ids=processor.vision_token_ids)
    assert len(pack.vision_index) == prompt.num_vision_tokens
    assert torch.equal(pack.source_index, (pack.segment_ids % 2 == 1).nonzero().flatten() - 1)
    assert torch.equal(pack.positions, positions) and pack.images == (first, second)


def test_a_plain_answer_is_the_text_that_follows_the_prompt(make: Make) -> None:
    row = Row(0, "What?", "red", (), "", "x:0")
    for name, answer in (
        ("qwen2_5_vl", "red"),
        ("qwen3_vl", "red"),
        ("qwen3_5_think", f"{NO_THOUGHT}red"),
        ("qwen3_5_nothink", "red"),
    ):
        processor = make(name)
        prompt = processor.supervised_prompt(row)
        assert list(prompt.answer_ids) == processor.encode_answer(answer) and prompt.turns == ()
        assert torch.equal(prompt.token_ids, processor.prompt(row).token_ids)


def test_thoughts_are_learnt_where_the_template_has_them(make: Make) -> None:
    think, nothink = make("qwen3_5_think"), make("qwen3_5_nothink")
    key = [*exchange("?"), {"role": "assistant", "content": "A.", "reasoning_content": "So."}]
    for chat in (
        key,
        exchange("?", "<think>\nSo.\n</think>\n\nA."),
        exchange("?", "So.</think>A."),
    ):
        assert learnt(think, row_of(chat)) == ["So.\n</think>\n\nA."]
        with pytest.raises(ValueError, match=r"x\.jsonl:1: the chat template begins a response by"):
            nothink.supervised_prompt(row_of(chat))
    with pytest.raises(ValueError, match=r"x\.jsonl:1: the chat has reasoning_content, but"):
        make("qwen3_vl").supervised_prompt(row_of(key))


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_6", "qwen3_8"])
def test_a_thought_in_the_text_is_learnt_once(make: Make, name: str) -> None:
    """In the answer, in a column of answers, in earlier turns, and with a quoted mark after it."""
    processor = make(name)
    said = "<think>\nhm\n</think>\n\nred"
    for chat in (exchange("?", said), exchange("?", "hm</think>red")):
        assert learnt(processor, row_of(chat)) == ["hm\n</think>\n\nred"]
    quoted = exchange("?", "<think>hm</think>write </think> last")
    assert learnt(processor, row_of(quoted)) == ["hm\n</think>\n\nwrite </think> last"]
    row = Row(0, "?", said, (), "", "x:0")
    assert learnt(processor, row) == ["hm\n</think>\n\nred"]
    text = processor.chat_template.prompt(row_of(exchange("1?", said, "2?", "two")))
    assert text.count("hm") == (name == "qwen3_8"), "the others drop earlier thoughts"
    assert text.count("<think>") == 1 + text.count("hm")
    both = {"role": "assistant", "content": said, "reasoning_content": "hm"}
    with pytest.raises(ValueError, match=r"x\.jsonl:1: the assistant's message .* thought twice"):
        processor.supervised_prompt(row_of([*exchange("?"), both]))


def test_a_template_that_adds_a_thought_to_one_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages %}{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n"
    template += "</think>\n\n{% endif %}{{ m.content if m.content is string else "
    template += "m.content[0].text }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    template += "assistant\n<think>\n{% endif %}"
    processor = make("qwen3_8")
    monkeypatch.setattr(processor.chat_template, "_template", template)
    monkeypatch.setattr(processor.chat_template, "_reads_thoughts", False)
    assert learnt(processor, row_of(exchange("?", "red"))) == [f"{NO_THOUGHT}red"]
    with pytest.raises(ValueError, match=r"x\.jsonl:1: .* writes a thought of its own"):
        processor.supervised_prompt(row_of(exchange("?", "<think>hm</think>red")))


MIDDLE = [*exchange("?", "!"), {"role": "system", "content": "Answer in capitals."}]


def test_a_text_that_the_template_leaves_out_is_refused(make: Make) -> None:
    """As data, as an observation, and as the first prompt or a later turn of an agent."""
    row = row_of([*MIDDLE, *exchange("?", "A")])
    lost = r"x\.jsonl:1: .* leaves out or changes the system message 'Answer in capitals\.'"
    processor = make("qwen3_vl")
    for use in (processor.prompt, processor.num_tokens, processor.supervised_prompt):
        with pytest.raises(ValueError, match=lost):
            use(row)
    asked = processor.prompt(row_of(exchange("?", "A")))
    later = replace(row, messages=row.messages[2:], response=None)
    for whole in (row.messages[2:], row.messages[2:3]):
        with pytest.raises(ValueError, match=lost):
            processor.next_turn(asked, [processor.eos_id], replace(later, messages=whole))
    assert "Answer in capitals." in make("qwen2_5_vl").chat_template.prompt(row)
    hint = replace(asked.row, messages=(Message("system", " Answer. "), Message("user", " ?\n")))
    for other in ("qwen3_5_think", "qwen3_6", "qwen3_8"):  # they strip white space
        assert "Answer." in make(other).chat_template.prompt(hint)


def test_earlier_answers_are_learnt_where_they_stand_as_they_are_sampled(make: Make) -> None:
    row = row_of(exchange("1?", "one", "2?", "two"))
    for name in ("qwen2_5_vl", "qwen3_vl", "qwen3_8"):
        processor = make(name)
        said = [turn.removeprefix(NO_THOUGHT) for turn in learnt(processor, row)]
        assert said == ["one", "two"] and processor.num_context_turns(row) == 0
    for name in ("qwen3_5_think", "qwen3_5_nothink"):  # without the thoughts that a response has
        processor = make(name)
        assert [turn.removeprefix(NO_THOUGHT) for turn in learnt(processor, row)] == ["two"]
        assert processor.num_context_turns(row) == 1


def test_weights_and_answers_of_a_column_leave_earlier_turns_as_context(make: Make) -> None:
    processor, chat = make("qwen3_vl"), exchange("1?", "one", "2?", "two")
    chat[1]["weight"] = 0
    row = row_of(chat)
    assert learnt(processor, row) == ["two"] and processor.num_context_turns(row) == 0
    row = replace(row_of(exchange("1?", "one", "2?", "two")), response=None, answer="2")
    assert learnt(processor, row) == ["2"]


def test_tools_without_a_system_message_follow_the_template_s_own(make: Make) -> None:
    processor, chat = make("qwen2_5_vl"), exchange("?", "!")
    text = processor.chat_template.prompt(row_of(chat, TOOLS))
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n\n")
    assert "<tools>" not in processor.chat_template.prompt(row_of(chat))


def test_what_a_template_refuses_is_named(make: Make) -> None:
    processor = make("qwen3_5_think")
    chat = [*exchange("?", "!", "?"), {"role": "system", "content": "s"}, *exchange("?", "!")]
    with pytest.raises(
        ValueError, match=r"x\.jsonl:1: .* refuses the messages \(System message mus"
    ):
        processor.supervised_prompt(row_of(chat))
    shown = [*exchange("?"), {"role": "assistant", "content": [{"type": "image"}]}]
    with pytest.raises(ValueError, match=r"x\.jsonl:1: the chat template shows 0 of 1 images"):
        make("qwen3_vl").supervised_prompt(row_of([*shown, *exchange("?", "!")]))


CONTROL = ("<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>")


@pytest.mark.parametrize("token", CONTROL)
def test_control_tokens_are_refused_when_a_row_is_read(make: Make, token: str) -> None:
    text = f"a{token}b"
    call = {"name": "zoom", "arguments": {"text": text}}
    processor = make("qwen3_vl", prompt_key="chat")
    for row, where in (
        (Row(0, text, "a", (), "", "x:0"), "x:0: 'chat'"),
        (Row(0, "?", text, (), "", "x:0"), "x:0: 'chat'"),
        (row_of([{"role": "system", "content": text}, *exchange("?", "!")]), "x.jsonl:1: 'chat'"),
        (row_of(exchange("?", text, "?", "!")), "x.jsonl:1: 'chat'"),
        (row_of(exchange("?", text)), "x.jsonl:1: 'chat'"),
        (
            row_of([*exchange("?"), {"role": "assistant", "content": "", "tool_calls": [call]}]),
            "x.jsonl:1: 'chat' or 'tools'",
        ),
        (
            row_of(exchange("?", "!"), [{"name": "zoom", "description": text}]),
            "x.jsonl:1: 'chat' or 'tools'",
        ),
    ):
        for use in (processor.prompt, processor.num_tokens, processor.supervised_prompt):
            with pytest.raises(ValueError) as caught:
                use(row)
            assert str(caught.value).startswith(f"{where} holds {token!r}, a control token of the")
    folder = processor_folder(make)
    with pytest.raises(ValueError, match=r"^data\.system_prompt holds '<\|im_end\|>'"):
        Processor(folder, replace(DATA, system_prompt="a<|im_end|>"), family_of(folder))


def processor_folder(make: Make) -> Path:
    """Return the folder of a new processor."""
    return Path(make("qwen2_5_vl")._tokenizer.name_or_path)


def test_the_name_of_an_answers_column_is_said(make: Make) -> None:
    folder = processor_folder(make)
    processor = Processor(folder, DATA, family_of(folder))
    with pytest.raises(ValueError, match=r"^x:0: 'answer' holds '<\|im_end\|>', a control token"):
        processor.prompt(Row(0, "?", "a<|im_end|>", (), "", "x:0"))


def test_text_that_models_write_stays_text(make: Make) -> None:
    markup = ("<|box_start|>", "<|box_end|>", "<|object_ref_start|>")
    processor = make("qwen3_vl", special=(*markup, "<|secret|>"))
    for text in ("<think>\nSo.\n</think>\n\n<tool_call>\n</tool_call>", "".join(markup), "<|x|>"):
        assert learnt(processor, row_of(exchange(text, text))) == [text]
    with pytest.raises(ValueError, match=r"holds '<\|secret\|>'"):
        processor.prompt(row_of(exchange("?", "<|secret|>")))


def test_turns_end_by_the_mark_of_the_message_that_follows(make: Make) -> None:
    """GLM's: of a user's message, or after calls of a tool's. A template that ends turns by
    itself has one end.
    """
    processor = make("glm4moe")
    decode, encode = processor._tokenizer.decode, processor._tokenizer.encode
    user, tool = "<|user|>", "<|observation|>"
    assert [decode([end]) for end in processor.end_ids] == [user, tool]
    assert processor.eos_id == processor.end_ids[0]
    assert not {*processor.end_ids} & {*processor.suppressed_ids}
    assert len(make("qwen3_vl").end_ids) == 1

    chat = [{**message, "content": "a car"} for message in CHAT]
    tree = supervised_tree(processor.supervised_prompt(row_of(chat, TOOLS)))
    call = "<tool_call>zoom\n<arg_key>box</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>"
    calls, answer = targets(processor, tree)[:2], targets(processor, tree)[2]
    assert all(turn.endswith(f"</tool_call>{tool}") for turn in calls)
    assert [turn.count(call) for turn in calls] == [1, 2]
    assert answer == f"\n<think></think>\na car{user}"
    ids = torch.cat([segment.token_ids for segment in tree.segments]).tolist()
    template = template_of("glm4moe")
    text = processor._tokenizer.apply_chat_template(
        chat, tools=TOOLS, chat_template=template, tokenize=False
    )
    assert decode(ids) == f"{text}{user}"
    (asked,) = targets(processor, supervised_tree(processor.supervised_prompt(row_of(chat[:3]))))
    assert asked.endswith(f"{call}{tool}")

    prompt = processor.prompt(Row(0, "What?", "", (), "", "x:0"))
    result = Row(0, "", "", (), "", "x:0", messages=(Message("tool", "3"),))
    told = "\n<tool_response>\n3\n</tool_response><|assistant|>"
    for end, following in ((tool, told), (user, f"{tool}{told}")):
        said = encode(f"So.{end}", add_special_tokens=False)
        longer = processor.next_turn(prompt, said, result)
        assert decode(longer.short_ids[len(prompt.short_ids) + len(said) :]) == following
