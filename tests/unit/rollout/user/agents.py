"""Agents that know only an address. Two use OpenAI's package, which takes half a second of a
process to import; the others post.
"""

import asyncio
import base64
import json
import urllib.request
from typing import Any

from megavlm.rewards.base import Example


def ask(base_url: str, *messages: Any) -> Any:
    """Return the message of the answer."""
    body = json.dumps({"model": "any", "messages": messages}).encode()
    return json.loads(post(f"{base_url}/chat/completions", body))["choices"][0]["message"]


def question(row: Example) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(row.images[0]).decode()}"
    text = row.problem.replace("<image>", "")
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def looks_twice(base_url: str, row: Example) -> str:
    """Returns text, which is scored."""
    start = question(row)
    first = ask(base_url, start)
    again: str = ask(base_url, start, first, {"role": "user", "content": "Look again."})["content"]
    return again


async def grades_itself(base_url: str, row: Example) -> dict[str, Any]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key="none") as openai:
        asked = [question(row), {"role": "user", "content": "No. 1 2 3"}]
        both = [
            openai.chat.completions.create(model="any", messages=[message]) for message in asked
        ]
        answers = await asyncio.gather(*both)
    right = sum(a.choices[0].message.content == row.answer for a in answers)
    return {"reward": right / 2, "correct": right == 2, "parts": {"right": float(right)}}


def counts(base_url: str, row: Example) -> float:
    ask(base_url, question(row))
    return 0.25


def posts(base_url: str, row: Example) -> None:
    ask(base_url, question(row))
    post(base_url.replace("/v1", "/reward"), b'{"reward": 0.75}')


def post(url: str, body: bytes) -> bytes:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310
    found: bytes = urllib.request.urlopen(request).read()  # noqa: S310
    return found


def crashes(base_url: str, row: Example) -> str:
    ask(base_url, question(row))
    raise RuntimeError("the agent is broken")


def crashes_at_once(base_url: str, row: Example) -> str:
    raise RuntimeError("the agent is broken")


def returns_nothing(base_url: str, row: Example) -> None:
    ask(base_url, question(row))


async def never_ends(base_url: str, row: Example) -> None:
    # Not by OpenAI's client, whose import may take as long as the agent has on a busy machine.
    asked = [question(row), {"role": "user", "content": "No. 1 2 3"}]
    await asyncio.gather(*(asyncio.to_thread(ask, base_url, message) for message in asked))
    await asyncio.sleep(3600)


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "zoom",
            "description": "Zoom in.",
            "parameters": {"type": "object", "properties": {"box": {"type": "array"}}},
        },
    }
]


async def plays_everything(base_url: str, row: Example) -> float:
    """Tools and images, a stream, parallel sub-agents, a cancelled call and a rewritten history."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as openai:

        async def chat(*messages: Any, **options: Any) -> Any:
            made = await openai.chat.completions.create(
                model="policy", messages=list(messages), **options
            )
            return made if options.get("stream") else made.choices[0].message

        start, crop = question(row), question(row)["content"][:1]
        first = await chat(start, tools=TOOLS)
        history = [start, first, {"role": "tool", "content": crop, "tool_call_id": "1"}]
        stream = await chat(*history, tools=TOOLS, stream=True)
        said = "".join([x.choices[0].delta.content or "" async for x in stream])
        history += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
        helpers = [[{"role": "user", "content": text}] for text in ("Count.", "Look there.")]
        both = [chat(*messages, max_tokens=5) for messages in helpers]
        hanging = asyncio.create_task(chat(*history, tools=TOOLS))
        await asyncio.sleep(0)
        hanging.cancel()
        await asyncio.gather(*both, chat(*history, tools=TOOLS))
        edited = [start, {"role": "assistant", "content": "A summary."}, history[-1]]
        await chat(*edited, tools=TOOLS, n=2)
    return 1.0
