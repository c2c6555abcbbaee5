"""The gateway, asked by OpenAI's own client. The responses are scripted."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from megavlm.config.data import Data
from megavlm.data.processor import Processor, Prompt
from megavlm.environments.base import ChatFormat
from megavlm.inference.protocol import Response
from megavlm.inference.requests import RequestRefused, RequestTimedOut
from megavlm.rollout.gateway.messages import ChatMessage
from megavlm.rollout.gateway.parameters import ChatRequest
from megavlm.rollout.gateway.replies import ChatReply, make_reply
from megavlm.rollout.gateway.server import GatewayServer
from megavlm.rollout.gateway.session import GatewaySession, SessionLimits
from tests.conftest import png
from tests.support.random_images import image as random_image
from tests.support.responses import make_response
from tests.support.templates import with_template
from tests.unit.rollout.scripted import ROW

LIMITS = SessionLimits(max_new_tokens=64, max_calls=16, max_tokens=4096)
TOOL = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "Zoom in.",
        "parameters": {"type": "object", "properties": {"box": {"type": "array"}}},
    },
}


@dataclass
class Policy:
    """Says what its script says next; keeps what it was asked, with limits of tokens."""

    processor: Processor
    texts: list[str]
    cut: bool = False
    asked: list[tuple[Prompt, int]] = field(default_factory=list)
    pause: asyncio.Event | None = None  # that it waits for

    async def ask(self, prompt: Prompt, most: int) -> Response:
        self.asked.append((prompt, most))
        if self.pause is not None:
            await self.pause.wait()
        text = self.texts.pop(0)
        if text in ("refused", "late"):
            raise (RequestRefused if text == "refused" else RequestTimedOut)(text)
        ids = self.processor.encode_answer(text)
        ids = ids[:-1] if self.cut else ids
        return make_response(tuple(ids), (-0.5,) * len(ids), "length" if self.cut else "stop", "0")


@dataclass
class Served:
    session: GatewaySession
    policy: Policy
    client: AsyncOpenAI
    url: str

    @property
    def counts(self) -> dict[str, int]:
        """Without zeros."""
        return dict(+self.session.counts)

    async def chat(self, *messages: Any, **options: Any) -> Any:
        return await self.client.chat.completions.create(
            model="any", messages=list(messages), **options
        )


@asynccontextmanager
async def served(policy: Policy, limits: SessionLimits = LIMITS) -> AsyncIterator[Served]:
    server, template = GatewayServer("127.0.0.1"), policy.processor.chat_template
    await server.start()
    chat = ChatFormat(template.call_form, template.opens_thought)
    session = GatewaySession(
        "key", ROW, policy.processor, chat, limits, policy.ask, lambda response, texts: None
    )
    try:
        async with server.open(session) as url:
            async with AsyncOpenAI(base_url=url, api_key="key", max_retries=0) as client:
                yield Served(session, policy, client, url)
    finally:
        await server.close()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def user(text: str, *images: bytes) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(image)}} for image in images
    ]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def called(reply: ChatReply) -> list[tuple[str, Any]]:
    return [(call.function.name, call.function.arguments) for call in reply.message.tool_calls]


def ids_of(prompt: Prompt) -> list[int]:
    return prompt.token_ids.tolist()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Processor]:
    """Processors with the released templates."""
    from tests.parity.models import model_folder

    made: dict[str, Processor] = {}

    def make(name: str) -> Processor:
        if name not in made:
            folder = tmp_path_factory.mktemp("template") / name
            family = "qwen3_vl" if name == "qwen3_vl" else "qwen3_5"
            data = Data(max_prompt_tokens=2048)
            made[name] = with_template(name, model_folder(family), folder, data)
        return made[name]

    return make


def test_a_conversation_is_continued_in_tokens(processor: Processor) -> None:
    async def agent() -> None:
        policy = Policy(processor, ["1 2", "3", "4 5"])
        async with served(policy) as gateway:
            chat = [{"role": "system", "content": "Look."}, user("How many?", png())]
            first = await gateway.chat(*chat)
            reply = first.choices[0].message
            assert (reply.content, reply.role) == ("1 2", "assistant")
            assert first.choices[0].finish_reason == "stop"
            assert first.usage.prompt_tokens == len(policy.asked[0][0].token_ids)
            assert first.usage.completion_tokens == len(gateway.session.calls[0].response.token_ids)
            again = [*chat, reply, user("Look again.", png(84, 56))]
            await gateway.chat(*again)
            await gateway.chat(*again, {"role": "assistant", "content": "3"}, user("No."))
            (one, _), (two, _), (three, _) = policy.asked
            said = [call.response.token_ids for call in gateway.session.calls]
            assert ids_of(two)[: len(ids_of(one)) + len(said[0])] == [*ids_of(one), *said[0]]
            assert ids_of(three)[: len(ids_of(two)) + len(said[1])] == [*ids_of(two), *said[1]]
            assert [image.key for image in three.images] == [
                processor._images.image(png()).key,
                processor._images.image(png(84, 56)).key,
            ]
            assert gateway.counts == {}

    run(agent())


def test_a_history_that_the_agent_changed_is_a_branch(processor: Processor) -> None:
    async def agent() -> None:
        policy = Policy(processor, ["1", "2", "3", "4"])
        async with served(policy) as gateway:
            chat = [user("How many?", png()), {"role": "assistant", "content": "1"}]
            await gateway.chat(chat[0])
            await gateway.chat(*chat, user("again"))
            edited = {"role": "assistant", "content": "5"}
            await gateway.chat(chat[0], edited, user("again"))
            await gateway.chat(*chat, user("again"), edited, user("No."))  # from the first call on
            assert gateway.counts == {"branches": 1, "unmatched_messages": 2}
            prompts = [prompt for prompt, _ in policy.asked]
            said = gateway.session.calls[0].response.token_ids
            known = [*ids_of(prompts[0]), *said]
            assert ids_of(prompts[3])[: len(known)] == known
            assert "5" in processor.decode(ids_of(prompts[2]))

    run(agent())


def test_calls_and_thoughts_are_in_the_models_own_form(qwen3: Callable[[str], Processor]) -> None:
    tags = "<function=zoom>\n<parameter=box>\n[1, 2]\n</parameter>\n</function>"
    xml = f"<tool_call>\n{tags}\n</tool_call>"
    call = '<tool_call>\n{"name": "zoom", "arguments": {"box": [1, 2]}}\n</tool_call>'
    said = {
        "qwen3_vl": f"Look.\n{call}",
        "qwen3_5_think": f"I think.\n</think>\n\nLook.\n\n{xml}",
        "qwen3_8": f"I think.\n</think>\n\nLook.\n\n{xml}",
    }

    async def agent(name: str, text: str) -> None:
        policy = Policy(qwen3(name), [text, text, text])
        async with served(policy) as gateway:
            chat: list[Any] = [user("How many?", png())]
            for turn in range(3):
                answer = await gateway.chat(*chat, tools=[TOOL])
                message = answer.choices[0].message
                (call,) = message.tool_calls
                assert answer.choices[0].finish_reason == "tool_calls"
                assert (call.function.name, json.loads(call.function.arguments)) == (
                    "zoom",
                    {"box": [1, 2]},
                )
                assert message.content == "Look."
                thought = getattr(message, "reasoning_content", None)
                assert thought == (None if name == "qwen3_vl" else "I think.")
                kept = message.model_dump(exclude_none=True)
                if turn:
                    kept.pop("reasoning_content", None)
                shown = user("", png(56, 84))["content"][:1]
                chat += [kept, {"role": "tool", "tool_call_id": call.id, "content": shown}]
            assert gateway.counts == {}, "no branch"
            one, two, three = (ids_of(prompt) for prompt, _ in policy.asked)
            sampled = gateway.session.calls[0].response.token_ids
            assert two[: len(one) + len(sampled)] == [*one, *sampled] and three[: len(two)] == two
            shown = policy.processor._tokenizer.decode(three)
            assert shown.count("<tool_response>") == 2 and shown.count("zoom") >= 3
            assert shown.count("# Tools") == 1

    for name, text in said.items():
        run(agent(name, text))


def test_other_tools_and_an_edited_thought_are_branches(
    qwen3: Callable[[str], Processor],
) -> None:
    async def agent() -> None:
        policy = Policy(qwen3("qwen3_8"), ["I think.\n</think>\n\n1", "2", "3", "4"])
        async with served(policy) as gateway:
            reply = (await gateway.chat(user("?"), tools=[TOOL])).choices[0].message
            chat = [user("?"), reply, user("And?")]
            await gateway.chat(*chat, tools=[TOOL])
            assert gateway.counts == {}
            await gateway.chat(*chat)
            assert gateway.counts == {"branches": 1, "unmatched_messages": 1}
            edited = {**reply.model_dump(exclude_none=True), "reasoning_content": "I know."}
            await gateway.chat(user("?"), edited, user("And?"), tools=[TOOL])
            assert gateway.counts == {"branches": 2, "unmatched_messages": 2}

    run(agent())


def test_a_malformed_call_is_text_and_counted(qwen3: Callable[[str], Processor]) -> None:
    async def agent() -> None:
        policy = Policy(qwen3("qwen3_vl"), ['<tool_call>{"name": "zoom"}</tool_call>'] * 2)
        async with served(policy) as gateway:
            answer = await gateway.chat(user("?"), tools=[TOOL])
            assert answer.choices[0].message.tool_calls is None
            assert "<tool_call>" in answer.choices[0].message.content
            await gateway.chat(user("?"))  # without tools nothing is a call
            assert gateway.counts == {"malformed_calls": 1, "branches": 1}

    run(agent())


@pytest.mark.parametrize("thought", ["", "<think>\nhm\n</think>\n\n"])
def test_a_call_may_quote_marks_and_a_malformed_one_is_shown(thought: str) -> None:
    text = (
        '<tool_call>\n{"name": "zoom", "arguments": {"box": "</tool_call> </think>"}}\n</tool_call>'
    )
    reply = make_reply(thought + text, "stop", ChatFormat(), [TOOL])
    assert called(reply) == [("zoom", {"box": "</tool_call> </think>"})]
    assert reply.values["content"] is None and reply.message.thought == ("hm" if thought else "")
    for broken, tools in ((text.replace('"name"', "name"), [TOOL]), (text, [])):
        reply = make_reply(thought + broken, "stop", ChatFormat(), tools)
        assert reply.values["content"] == broken, "all of it stays in the text"
        assert (reply.num_malformed, reply.finish) == (len(tools), "stop")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "1e5", "1e5"),
        ({"$ref": "#/$defs/Code"}, "1", "1"),
        ({"type": ["null", "integer"]}, "1", 1),
        ({}, "true", "true"),
    ],
)
def test_the_arguments_of_tags_are_read_by_the_agents_schema(
    schema: dict[str, Any], text: str, value: Any
) -> None:
    tool = {"function": {"name": "zoom", "parameters": {"properties": {"box": schema}}}}
    tags = f"<function=zoom>\n<parameter=box>\n{text}\n</parameter>\n</function>"
    reply = make_reply(f"<tool_call>\n{tags}\n</tool_call>", "stop", ChatFormat("xml"), [tool])
    assert called(reply) == [("zoom", {"box": value})]


def test_streams_have_the_same_content(qwen3: Callable[[str], Processor]) -> None:
    call = '<tool_call>\n{"name": "zoom", "arguments": {}}\n</tool_call>'

    async def agent() -> None:
        policy = Policy(qwen3("qwen3_vl"), ["1 2", call])
        async with served(policy) as gateway:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = [x async for x in await gateway.chat(user("?"), **options)]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == "1 2" and chunks[-1].usage.completion_tokens > 1
            assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, "stop"]
            chunks = [x async for x in await gateway.chat(user("?"), tools=[TOOL], stream=True)]
            (called,) = chunks[0].choices[0].delta.tool_calls
            assert (called.index, called.function.name) == (0, "zoom") and len(chunks) == 2
            assert chunks[1].choices[0].finish_reason == "tool_calls"
            assert len(gateway.session.calls) == 2

    run(agent())


def test_parallel_agents_and_several_samples_are_branches(processor: Processor) -> None:
    async def agent() -> None:
        policy = Policy(processor, ["1", "2", "3", "4", "5"])
        async with served(policy) as gateway:
            answers = await gateway.chat(user("How many?"), n=3)
            assert [choice.message.content for choice in answers.choices] == ["1", "2", "3"]
            helper = {"role": "system", "content": "Count."}
            await asyncio.gather(
                gateway.chat(helper, user("1?")),
                gateway.chat(user("How many?"), answers.choices[1].message, user("again")),
            )
            assert len(gateway.session.calls) == 5
            assert gateway.counts == {"branches": 1}
            said = gateway.session.calls[1].response.token_ids
            start = ids_of(policy.asked[0][0])
            assert any(
                ids_of(prompt)[: len(start) + len(said)] == [*start, *said]
                for prompt, _ in policy.asked[3:]
            )

    run(agent())


def test_a_call_that_is_cancelled_is_not_trained_on(processor: Processor) -> None:
    async def agent() -> None:
        policy = Policy(processor, ["1", "2"], pause=asyncio.Event())
        async with served(policy) as gateway:
            asking = asyncio.create_task(gateway.chat(user("How many?")))
            while not policy.asked:
                await asyncio.sleep(0.01)
            asking.cancel()
            while not gateway.counts:
                await asyncio.sleep(0.01)
            assert policy.pause is not None
            policy.pause.set()
            await gateway.chat(user("How many?"))
            assert [call.text for call in gateway.session.calls] == ["1"]
            assert gateway.counts == {"cancelled_calls": 1}

    run(agent())


def test_a_retry_of_a_client_replaces_the_call(processor: Processor) -> None:
    async def agent() -> None:
        policy = Policy(processor, ["1", "2", "3"])
        async with served(policy) as gateway:
            retry = {"x-stainless-retry-count": "1"}
            await gateway.chat(user("How many?"))
            await gateway.chat(user("How many?"), extra_headers=retry)
            assert [call.text for call in gateway.session.calls] == ["2"]
            await gateway.chat(user("How many?"))  # another sample
            assert [call.text for call in gateway.session.calls] == ["2", "3"]

    run(agent())


def test_limits_end_an_episodes_calls(processor: Processor) -> None:
    async def agent() -> None:
        policy = Policy(processor, ["1", "2", "3", "4"], cut=True)
        async with served(policy, SessionLimits(8, 3, 44)) as gateway:
            first = await gateway.chat(user("How many?"), max_tokens=5)
            assert first.choices[0].finish_reason == "length"
            assert policy.asked[0][1] == 5
            # The end of a turn that was cut is added, and not trained on.
            chat = [user("How many?"), first.choices[0].message, user("Go on.")]
            await gateway.chat(*chat, max_completion_tokens=99)
            said = gateway.session.calls[0].response.token_ids
            known = [*ids_of(policy.asked[0][0]), *said, processor.eos_id]
            assert ids_of(policy.asked[1][0])[: len(known)] == known and policy.asked[1][1] == 8
            with pytest.raises(openai.BadRequestError, match=r"environment\.max_turns=3 .* 1 are"):
                await gateway.chat(user("?"), n=2)
            with pytest.raises(openai.BadRequestError, match=r"environment\.max_tokens=44") as e:
                await gateway.chat(user("1 2 3 4 " * 5))
            assert e.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match=r"max_prompt_tokens=64") as e:
                await gateway.chat(user("1 2 3 4 " * 30))
            assert e.value.code == "context_length_exceeded"

    run(agent())


def part(**keys: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [keys]}]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot", "presence_penalty": 1}, "presence_penalty=1: would change what is"),
    ({"stop": ["\n"]}, "stop=.*: would change what is sampled"),
    ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice='required': would change"),
    ({"extra_body": {"top_k": 4}}, "top_k=4: Extra inputs are not permitted"),
    ({"n": 0}, "n=0: Input should be greater than 0"),
    ({"messages": []}, r"messages=\[\]: List should have at least 1 item"),
    ({"messages": ["Hi"]}, r"messages\[0\]='Hi': Input should be a valid dictionary"),
    ({"messages": [{"role": "robot"}]}, r"messages\[0\].role='robot': Input should be 'system'"),
    ({"messages": [user("?"), {"role": "assistant", "content": "1"}]}, "cannot continue one"),
    ({"messages": [{**user("?"), "name": 1}]}, r"messages\[0\].name=1: Input should be .* string"),
    ({"messages": [{**user("?"), "audio": {"id": "a"}}]}, r"audio={'id': 'a'}: Extra inputs"),
    ({"messages": [{**user("?"), "tool_calls": [TOOL]}]}, "only a message of the assistant"),
    ({"messages": [{**user("?"), "tool_calls": 1}]}, "tool_calls=1: Input should be .* list"),
    ({"messages": [{**user("?"), "reasoning_content": {}}]}, "reasoning_content={}: Input should"),
    (part(type="audio"), r"messages\[0\].content\[0\].type='audio': Input should be 'text'"),
    (part(type="text"), "the part has no text"),
    (part(type="image_url", image_url={"url": "http://x/a.png"}), "send the image as a data: URL"),
    (part(type="image_url", image_url="data:image/png;base64,?"), "the image is not base64"),
    ({"messages": [user("?", b"no image")]}, "image"),
    ({"tools": "zoom"}, "tools='zoom': Input should be a valid list"),
    ({"tools": [{"type": "function", "name": "zoom"}]}, r"tools\[0\].function: Field required"),
    (
        {"tools": [{"function": {"name": "a", "parameters": []}}]},
        r"function.parameters=\[\]: Input",
    ),
]


def test_forms_of_the_same_message_are_equal() -> None:
    forms = ["1 2", ["1 ", "2"], [{"type": "text", "text": "1 2"}, {"type": "text", "text": ""}]]
    given = {"role": "developer", "refusal": "", "provider_fields": None}
    first, *others = (ChatMessage.model_validate({**given, "content": form}) for form in forms)
    assert first.role == "system" and all(first.equals(other) for other in others)


@pytest.mark.parametrize(("options", "problem"), BAD)
def test_a_bad_request_gets_one_sentence(
    processor: Processor, options: dict[str, Any], problem: str
) -> None:
    async def agent() -> None:
        async with served(Policy(processor, [])) as gateway:
            with pytest.raises(openai.BadRequestError, match=problem):
                given = {"messages": [user("?")], "model": "any", **options}
                await gateway.client.chat.completions.create(**given)
            assert not gateway.session.calls and not gateway.policy.asked

    run(agent())


def test_what_every_agent_sends_is_overridden_and_said_once(
    processor: Processor, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent() -> None:
        async with served(Policy(processor, ["1", "2"])) as gateway:
            for _ in range(2):
                await gateway.chat(user("?"), temperature=0.2, top_p=0.9, user="me")

    run(agent())
    assert [record.args[0] for record in caplog.records] == ["temperature", "top_p"]  # type: ignore[index]


def test_a_reward_ends_the_session_and_keys_are_told_apart(processor: Processor) -> None:
    async def agent() -> None:
        async with served(Policy(processor, ["1"])) as gateway:
            root, bearer = gateway.url.partition("/s/")[0], {"Authorization": "Bearer key"}
            async with httpx.AsyncClient() as http:
                body = {"model": "any", "messages": [user("?")]}
                other = await http.post(f"{root}/s/other/v1/chat/completions", json=body)
                assert other.status_code == 410
                same = await http.post(f"{root}/v1/chat/completions", json=body, headers=bearer)
                assert same.json()["choices"][0]["message"]["content"] == "1"
                models = await gateway.client.models.list()
                assert [model.id for model in models.data] == ["policy"]
                wrong = await http.post(f"{root}/reward", json="good", headers=bearer)
                assert wrong.status_code == 400
                deep = await http.post(f"{root}/reward", content="[" * 99999, headers=bearer)
                assert deep.status_code == 400
                await http.post(f"{root}/reward", json={"reward": 0.5}, headers=bearer)
                assert gateway.session.ended.result() == {"reward": 0.5}
                late = await http.post(f"{root}/v1/chat/completions", json=body, headers=bearer)
                assert late.status_code == 410
                assert "has ended" in late.json()["error"]["message"]

    run(agent())


def test_a_reply_that_is_sent_after_the_reward_is_not_trained_on(processor: Processor) -> None:
    async def agent() -> None:
        async with served(Policy(processor, ["1", "2"])) as gateway:
            await gateway.chat(user("?"))
            asked = ChatRequest.model_validate({"messages": [user("!")]})
            _, calls = await gateway.session.answer(asked, is_retry=False)
            gateway.session.end(0.5)
            gateway.session.sent(calls)
            assert [call.text for call in gateway.session.calls] == ["1"]

    run(agent())


def test_refused_and_late_requests(processor: Processor) -> None:
    async def agent() -> None:
        async with served(Policy(processor, ["refused", "late"])) as gateway:
            with pytest.raises(openai.BadRequestError, match="refused"):
                await gateway.chat(user("?"))
            with pytest.raises(openai.APIStatusError, match="in time"):
                await gateway.chat(user("?"))
            with pytest.raises(RequestTimedOut):
                gateway.session.ended.result()

    run(agent())


def test_open_requests_are_answered_when_the_session_ends(processor: Processor) -> None:
    async def agent() -> None:
        policy = Policy(processor, [], pause=asyncio.Event())
        async with served(policy) as gateway:
            asking = asyncio.create_task(gateway.chat(user("How many?")))
            while not policy.asked:
                await asyncio.sleep(0.01)
            gateway.session.close()
            with pytest.raises(openai.APIStatusError, match="has ended"):
                await asking

    run(agent())


def test_words_that_are_control_tokens_stay_words(processor: Processor) -> None:
    async def agent() -> None:
        async with served(Policy(processor, ["1", "2"])) as gateway:
            await gateway.chat(user("<|im_end|><|image_pad|><image>", random_image(56, 56, 1)))
            (prompt, _), *_ = gateway.policy.asked
            assert prompt.short_ids.count(processor.image_token_id) == 1
            plain = {"role": "user", "content": "a literal <image>"}
            await gateway.chat(user("?", png()), {"role": "assistant", "content": "<image>"}, plain)
            assert len(gateway.policy.asked[1][0].images) == 1

    run(agent())
