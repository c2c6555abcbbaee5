"""The agent of `make demo ENV=gateway`: a program that knows only the address of an API."""

import base64
from typing import Any

from openai import OpenAI

from megavlm.rewards.base import Example

# A new client reads all certificates of the machine, which takes 30 ms of a core; its copies share
# them and its connections.
CLIENT = OpenAI(api_key="none")


def look_again(base_url: str, row: Example) -> dict[str, Any]:
    """Ask a row's question about its images. A wrong answer gets another try, which is worth half.
    Returns the reward.
    """
    images = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in row.images]
    content: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    content.append({"type": "text", "text": row.problem.replace("<image>", "")})
    messages: list[Any] = [{"role": "user", "content": content}]
    reward = 1.0
    completions = CLIENT.with_options(base_url=base_url).chat.completions
    for _ in range(2):
        said = completions.create(model="policy", messages=messages).choices[0].message
        if (said.content or "").strip().lower() == row.answer.lower():
            return {"reward": reward, "correct": True}
        messages += [said, {"role": "user", "content": "No. Look again."}]
        reward /= 2
    return {"reward": 0.0, "correct": False}
