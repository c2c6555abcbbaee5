"""Chats of a column: every part, key and role is understood, or refused by name."""

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megavlm.data.chat.hermes import with_tools_as_text
from megavlm.data.chat.messages import Message, read_chat, read_tools
from megavlm.data.media.video_sources import Video
from megavlm.data.rows import Row
from tests.conftest import png, read_rows

PNG = png()
BASE64 = base64.b64encode(PNG).decode()
ZOOM = {"name": "zoom", "arguments": {"box": [1, 2]}}
CALL = {"type": "function", "function": ZOOM}
TOOL = {"name": "zoom", "description": "Zooms.", "parameters": {"type": "object"}}


def test_chat_with_parts() -> None:
    chat = read_chat(
        [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is "},
                    {"type": "image", "image": "a.png"},
                    {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
                    {"type": "text", "text": "?"},
                ],
            },
        ]
    )
    assert chat.messages[1] == Message("user", "What is <image><image>?")
    assert chat.images == ("a.png", {"url": "https://a/b.png"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"role": "robot", "content": "x"}], "message 0 has the role 'robot'"),
        ([{"role": "user", "content": 3}], "message 0 has the content 3"),
        (
            [{"role": "user", "content": [{"type": "sound"}]}],
            "its type must be text, image, video or",
        ),
        ([{"role": "assistant", "content": "x"}], "none by the user"),
        (["x"], "message 0 is 'x'"),
    ],
)
def test_bad_chats_are_refused(value: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_chat(value)


def lines(path: Path, *records: dict[str, Any]) -> list[str]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [str(path)]


def test_rows_of_chats(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    user = {"role": "user", "content": "<image>Why?"}
    files = lines(
        tmp_path / "x.jsonl",
        {"chat": [{"role": "system", "content": "s"}, user], "answer": "b", "images": ["a.png"]},
        {"chat": [user], "answer": "b", "images": ["a.png"]},
        {
            "chat": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, "Why?"]}],
            "answer": "b",
        },
    )
    first, second, third = read_rows(files, prompt_key="chat")
    assert first.messages == (Message("system", "s"), Message("user", "<image>Why?"))
    assert second.messages == () and second.problem == third.problem == "<image>Why?"
    assert first.images == second.images == third.images == (png(),)


def test_the_last_assistant_message_is_the_answer(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "two"},
    ]
    files = lines(tmp_path / "x.jsonl", {"chat": chat, "answer": "x"})
    (row,) = read_rows(files, prompt_key="chat", answer_key=None)
    assert (row.problem, row.answer, len(row.messages)) == ("2?", "two", 3)
    with pytest.raises(ValueError, match=r"set data\.answer_key=null"):
        read_rows(files, prompt_key="chat")


def chat_rows(path: Path, *messages: Any, **keys: Any) -> list[Row]:
    """Return the rows of a file of one chat, which names no column besides it."""
    columns = {name: keys.pop(name) for name in ("tools", "system", "videos") if name in keys}
    files = lines(path, {"messages": list(messages), **columns})
    return read_rows(
        files, **{"prompt_key": "messages", "answer_key": None, "image_keys": (), **keys}
    )


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image", "image": {"path": "a.png", "bytes": None}},
        {"type": "image", "image": f"data:image/png;base64,{BASE64}"},
        {"type": "image", "url": f"data:image/png;base64,{BASE64}"},
        {"type": "image", "path": "a.png"},
        {"type": "image", "path": "a.png", "text": None, "index": 0},
        {"type": "image", "base64": BASE64},
        {"type": "image", "base64": f"data:image/png;base64,{BASE64}"},
        {"type": "image", "bytes": BASE64, "path": "ignored.png"},
        {"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}},
        {"type": "image_url", "image_url": f"data:image/png;base64,{BASE64}"},
        {"type": "input_image", "image_url": "a.png", "detail": "auto"},
        {"image": "a.png"},
        {"image_url": {"url": "a.png"}},
    ],
)
def test_a_part_holds_its_image_where_no_column_is_named(
    tmp_path: Path, part: dict[str, Any]
) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    (row,) = chat_rows(tmp_path / "x.jsonl", user(part, {"type": "input_text", "text": "Why?"}))
    assert (row.problem, row.images) == ("<image>Why?", (PNG,))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"type": "image"}], r"a part of type image without its image, but data\.image_keys=\[\]"),
        ([{"type": "video"}], r"a part of type video without its video, but data\.video_key=null"),
        ([{"type": "image"}, {"image": "a.png"}], "a part of type image without its image"),
        ([{"type": "image", "source": {"data": "x"}}], "part of type image with the key 'source'"),
        (
            [{"type": "image", "image": "a.png", "max_pixels": 9}],
            "with the key 'max_pixels', but",
        ),
        ([{"type": "image", "image": "a.png", "url": "b.png"}], "keys image, url; its image"),
        ([{"type": "image", "image": {"file_id": "x"}}], "an image has neither bytes nor a path"),
        (
            [{"type": "image", "image": {"path": "a.png", "min_pixels": 9}}],
            r"column 'messages': an image has the key 'min_pixels' \(9\), but only these are read",
        ),
        (
            [{"type": "video", "video": {"path": "a.png", "video_start": 0.5}}],
            r"column 'messages': a video has the key 'video_start' \(0\.5\), but only these are",
        ),
        ([{"type": "image", "index": 1}], "index=1; images are taken in order"),
        ([{"type": "image", "image": ""}], "an image has neither bytes nor a path"),
        ([{"type": "text", "text": "x", "image": "a.png"}], "type text with the key 'image'"),
        ([{"type": "text"}], "its type must be text, image, video or audio"),
        ([{"type": "video_url", "video_url": {"url": "a.mp4"}}], "no video at .*a.mp4"),
        ([{"type": "video", "video": "a.mp4"}], "no video at .*a.mp4"),
        ([{"type": "video", "video": ["a.png", "a.png"]}], "a video's fps is None"),
        ([{"type": "video", "fps": 2.0}], "part of type video with the key 'fps'"),
        ([3], "the part 3; its type"),
    ],
)
def test_a_part_that_is_not_understood_is_refused(
    tmp_path: Path, parts: list[Any], message: str
) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    with pytest.raises(ValueError, match=rf"x\.jsonl:1: .*{message}"):
        chat_rows(tmp_path / "x.jsonl", user(*parts, {"type": "text", "text": "Why?"}))


def test_a_part_holds_the_frames_of_its_video(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    for part in (
        {"type": "video", "video": ["a.png", {"base64": BASE64}], "sample_fps": 2},
        {"type": "video", "video": ["a.png", "a.png"], "fps": 2.0},
        {"type": "video", "video": {"frames": ["a.png", "a.png"], "fps": 2}},
    ):
        (row,) = chat_rows(tmp_path / "x.jsonl", user(part, "Why?"))
        assert (row.problem, row.videos) == ("<video>Why?", (Video((PNG, PNG), 2.0),))
        with pytest.raises(ValueError, match="videos both in the messages and in videos"):
            video = part["video"] if isinstance(part["video"], dict) else {"frames": [], "fps": 2}
            chat_rows(tmp_path / "x.jsonl", user(part), video_key="videos", videos=video)


def test_text_that_names_a_placeholder_stays_text_without_images(tmp_path: Path) -> None:
    (row,) = chat_rows(tmp_path / "x.jsonl", user("What does <image> mean?"))
    assert (row.problem, row.images) == ("What does <image> mean?", ())


def test_parts_of_parquet_have_the_keys_of_all_parts(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": [{"type": "image", "image": {"bytes": PNG, "path": None}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "red"}]},
    ]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": chat}]), path)
    (row,) = read_rows(
        [str(path)], prompt_key="messages", answer_key=None, image_keys=(), category_key=None
    )
    assert (row.problem, row.images, row.answer) == ("<image>", (PNG,), "red")


def test_keys_of_a_message_are_kept_for_the_template() -> None:
    chat = read_chat(
        [
            {"role": "user", "content": "?", "name": "Ann", "refusal": None},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", **CALL}]},
            {"role": "tool", "content": "a car", "tool_call_id": "c1"},
            {"role": "assistant", "content": "A car.", "reasoning_content": "So.", "weight": 0},
        ]
    )
    assert chat.messages == (
        Message("user", "?", {"name": "Ann"}),
        Message("assistant", "", {"tool_calls": [{"id": "c1", **CALL}]}),
        Message("tool", "a car", {"tool_call_id": "c1"}),
        Message("assistant", "A car.", {"reasoning_content": "So."}, is_trained=False),
    )


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        ZOOM,
        {"type": "function", "function": {"name": "zoom", "arguments": '{"box": [1, 2]}'}},
    ],
)
def test_forms_of_tool_calls(call: dict[str, Any]) -> None:
    for calls in ([call], json.dumps([call])):
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        assert read_chat([user("?"), message]).messages[1].keys == {"tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "assistant", "content": None}, "has the content None"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}, "is not JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}, "the tool call"),
        ({"role": "assistant", "tool_calls": [{"arguments": {}}]}, "it must have a name"),
        ({"role": "user", "content": "", "tool_calls": [CALL]}, "only the assistant calls tools"),
        ({"role": "tool_call", "content": "zoom(1)"}, "is not JSON"),
        ({"role": "assistant", "content": "x", "weight": 0.5}, "weight=0.5; it must be 0"),
    ],
)
def test_bad_messages_are_named(message: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"message 1.*{said}"):
        read_chat([user("?"), message])


def test_forms_of_tools() -> None:
    wrapped = {"type": "function", "function": TOOL}
    for value in ([TOOL], [wrapped], TOOL, json.dumps([TOOL]), [json.dumps(wrapped)]):
        assert read_tools(value) == (wrapped,)
    assert read_tools(None) == read_tools([]) == read_tools("") == read_tools("[]") == ()
    for value in ("zoom", ["zoom"], [3], [{"function": "zoom"}], [{}]):
        with pytest.raises(ValueError, match=r"is not JSON|it must be a function with a name"):
            read_tools(value)


def test_messages_with_tools_in_their_text_keep_their_images() -> None:
    image, look = {"type": "image"}, {"type": "text", "text": "Look."}
    system = {"role": "system", "content": [image, look]}
    called = {"role": "assistant", "content": [image, look], "tool_calls": [CALL]}
    asked = {"role": "user", "content": "?"}
    for plain, chat in ((False, [system, asked, called]), (True, [asked, called])):
        first, _, last = with_tools_as_text(chat, [TOOL])
        if not plain:
            assert first["content"][:2] == [image, look]
            assert first["content"][2]["text"].startswith("\n\n# Tools\n")
        assert last["content"][:2] == [image, look]
        assert last["content"][2]["text"].startswith("\n<tool_call>\n{")
    said = {**called, "content": "Look."}
    assert with_tools_as_text([said], [])[0]["content"].startswith("Look.\n<tool_call>\n{")
    assert with_tools_as_text([{**said, "content": ""}], [])[0]["content"].startswith("<tool_call>")


def test_share_gpt_s_form_with_tools_and_a_system_column(tmp_path: Path) -> None:
    (row,) = chat_rows(
        tmp_path / "x.jsonl",
        {"from": "human", "value": "What?"},
        {"from": "gpt", "value": "I zoom."},
        {"from": "function_call", "value": json.dumps(ZOOM)},
        {"from": "observation", "value": "a car"},
        {"from": "gpt", "value": "A car."},
        system="Be brief.",
        tools=json.dumps([TOOL]),
    )
    assert row.messages == (
        Message("system", "Be brief."),
        Message("user", "What?"),
        Message("assistant", "I zoom.", {"tool_calls": [CALL]}),
        Message("tool", "a car"),
    )
    assert row.tools == ({"type": "function", "function": TOOL},)
    assert row.response == Message("assistant", "A car.") and row.answer == "A car."


def test_a_system_column_beside_another_system_message_is_refused(tmp_path: Path) -> None:
    turns = (("system", "Be brief."), ("human", "What?"), ("gpt", "red"))
    chat, path = [{"from": name, "value": text} for name, text in turns], tmp_path / "x.jsonl"
    (row,) = chat_rows(path, *chat, system="Be brief.\n")
    assert [message.text for message in row.messages] == ["Be brief.", "What?"]
    with pytest.raises(ValueError, match=r"l:1: .* the column 'system' has another \('Be long"):
        chat_rows(path, *chat, system="Be long.")


def test_ms_swift_s_roles_of_tools(tmp_path: Path) -> None:
    (row,) = chat_rows(
        tmp_path / "x.jsonl",
        {"role": "user", "content": "What?"},
        {"role": "tool_call", "content": json.dumps(ZOOM)},
        {"role": "tool_call", "content": json.dumps(ZOOM)},
        {"role": "tool_response", "content": "a car"},
        {"role": "assistant", "content": "A car.", "loss": True},
    )
    assert row.messages[1:] == (
        Message("assistant", "", {"tool_calls": [CALL, CALL]}),
        Message("tool", "a car"),
    )


def test_calls_of_parquet_have_no_keys_of_other_calls(tmp_path: Path) -> None:
    calls = [ZOOM, {"name": "read", "arguments": {"line": 3}}]
    tools = [{**TOOL, "parameters": {"type": "object", "properties": {name: {"type": "string"}}}}
             for name in ("box", "line")]  # fmt: skip
    chats = [
        [{"role": "user", "content": "?", "tool_calls": None},
         {"role": "assistant", "content": None, "tool_calls": [call]}]
        for call in calls
    ]  # fmt: skip
    path = tmp_path / "x.parquet"
    records = [{"chat": chat, "tools": [t]} for chat, t in zip(chats, tools, strict=True)]
    pq.write_table(pa.Table.from_pylist(records), path)
    rows = read_rows(
        [str(path)], prompt_key="chat", answer_key=None, image_keys=(), category_key=None
    )
    for row, call, tool in zip(rows, calls, tools, strict=True):
        assert row.response is not None
        assert [made["function"] for made in row.response.keys["tool_calls"]] == [call]
        assert row.tools[0]["function"] == tool


def test_an_answer_of_weight_0_is_refused(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "x", "weight": 0}
    with pytest.raises(ValueError, match=r":1: the last message .* its weight is 0: leave it out"):
        chat_rows(tmp_path / "x.jsonl", user("?"), answer)


def test_an_answer_with_an_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    answer = {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}
    with pytest.raises(ValueError, match=r":1: message 1 is the answer, but it has an image"):
        chat_rows(tmp_path / "x.jsonl", user("?"), answer)
