"""Episodes with tools are trained on the tokens that were sampled, with each family's own chat
template: nothing of an episode is tokenized again.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.config.data import Data
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.environments.base import Context
from megavlm.environments.tools.tool import marked_tools
from megavlm.inference.protocol import Response
from megavlm.rewards.manager import RewardManager
from megavlm.rollout.group_tree import group_tree
from megavlm.rollout.trajectory import Group
from tests.support.columns import columns, of_calls
from tests.support.responses import make_response
from tests.support.templates import TEMPLATES, template_of, with_template
from tests.unit.rollout.scripted import Policy, graded, play
from tests.unit.rollout.user.tool_environments import Looking

LOOKING = "tool_environments:Looking"
DATA = Data(max_prompt_tokens=4096, system_prompt="Be brief.")
JSON_CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"box": [0, 0, 28, 28]}}\n</tool_call>',
    '<tool_call>\n{"name": "read", "arguments": {"text": "a <image> <|im_end|>"}}\n</tool_call>',
)
XML_CALLS = (
    "<tool_call>\n<function=look>\n<parameter=box>\n[0, 0, 28, 28]\n</parameter>\n</function>\n"
    "</tool_call>",
    "<tool_call>\n<function=read>\n<parameter=text>\na <image> <|im_end|>\n</parameter>\n"
    "</function>\n</tool_call>",
)
READ = "a <image> < |im_end|>"  # a control token of the model is text when a tool shows it
THOUGHTS = ("Where is it?", "Closer.", "So.")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        texts = ["How many? 1 2 3 4 5", "I look at a box.", "the box:"] * 20
        make_tiny_model(folder, texts, seed=0, family=family)
        return folder

    return make


class Sampler(Policy):
    """Samples tokens as no tokenizer writes them: each character for itself."""

    def respond(self) -> Response:
        encode = self.processor._tokenizer
        text, ids = self.texts.pop(0), list[int]()
        for character in text:
            ids += encode(character, add_special_tokens=False)["input_ids"]
        ids.append(self.processor.eos_id)
        return make_response(tuple(ids), (-0.5,) * len(ids), "stop", "0")


def turns_of(name: str) -> list[tuple[str, str]]:
    """Return the thought and the text of each response."""
    calls = JSON_CALLS if TEMPLATES[name] in ("qwen2_5_vl", "qwen3_vl") else XML_CALLS
    both = "\n".join(calls)
    texts = [f"I look.\n{both}", f"I look at a box.\n{calls[0]}", "3"]
    thoughts = [""] * 3 if name == "qwen3_5_nothink" else THOUGHTS
    return list(zip(thoughts, texts, strict=True))


def response_of(name: str, thought: str, text: str) -> str:
    """Return a response as the template lets it begin."""
    if name == "qwen3_5_nothink":
        return text
    begin = "" if TEMPLATES[name] == "qwen3_5" else "<think>\n"
    return f"{begin}{thought}\n</think>\n\n{text}"


def conversation(name: str) -> list[dict[str, Any]]:
    """Return the whole episode as messages for the template."""
    image, text = {"type": "image"}, {"type": "text", "text": "the box:"}
    looked = {"role": "tool", "content": [text, image]}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image, {"type": "text", "text": "How many?"}]},
    ]
    for number, (thought, text_) in enumerate(turns_of(name)):
        if TEMPLATES[name] == "qwen3_5":
            said = {"role": "assistant", "content": text_, "reasoning_content": thought}
        else:
            said = {"role": "assistant", "content": response_of(name, thought, text_)}
        messages.append(said)
        messages += [[looked, {"role": "tool", "content": READ}], [looked], []][number]
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
def test_three_turns_with_thoughts_calls_and_images(
    tiny: Callable[[str], Path], tmp_path: Path, manager: RewardManager, name: str
) -> None:
    processor = with_template(name, tiny(TEMPLATES[name]), tmp_path / name, DATA)
    said = [response_of(name, *turn) for turn in turns_of(name)]
    policy = Sampler(processor, *said)
    (episode,) = play(
        processor, manager, policy, LOOKING, n=1, max_turns=4, max_observation_tokens=512
    )
    assert episode.score.correct and dict(episode.counts) == {"tool_calls": 3, "tool_errors": 0}
    assert episode.texts == said

    last = episode.prompts[-1]
    assert len(last.images) == 3
    # Sampled tokens are trained on as they are, each once.
    group = Group(episode.prompts[0], episodes=[episode])
    tree = group_tree(group, of_calls(group, [columns(episode.num_tokens)]))
    trained = [segment.token_ids for segment in tree.segments if segment.is_target]
    said_ids = [token for r in episode.responses for token in r.token_ids.tolist()]
    assert torch.cat(trained).tolist() == said_ids
    # Prompts only grow, and their text is the one of the template.
    for before, after, response in zip(
        episode.prompts, episode.prompts[1:], episode.responses, strict=False
    ):
        known = (*before.short_ids, *response.token_ids)
        assert after.short_ids[: len(known)] == known
    shown = processor._tokenizer.decode([*last.short_ids, *episode.responses[-1].token_ids])
    schemas = [tool.schema for tool in marked_tools(Looking(Context(graded().score, 4)))]
    tools = [{"type": "function", "function": dict(schema)} for schema in schemas]
    native = processor._tokenizer.apply_chat_template(
        conversation(name),
        tools=tools,
        chat_template=template_of({"qwen2_5_vl": "qwen3_vl"}.get(name, name)),
        tokenize=False,
    )
    assert shown == native.removesuffix("\n")


def test_a_malformed_call_and_a_wrong_argument_are_read_by_the_policy(
    tiny: Callable[[str], Path], tmp_path: Path, manager: RewardManager
) -> None:
    processor = with_template("qwen3_vl", tiny("qwen3_vl"), tmp_path / "model", DATA)
    wrong = '<tool_call>\n{"name": "look", "arguments": {"box": [1]}}\n</tool_call>'
    policy = Sampler(processor, f"<tool_call>\n{{\n</tool_call>\n{wrong}", "3")
    (episode,) = play(
        processor, manager, policy, LOOKING, n=1, max_turns=2, max_observation_tokens=512
    )
    text = processor._tokenizer.decode(episode.prompts[-1].short_ids)
    responses = text.split("<tool_response>\n")[1:]
    assert [one.partition(":")[0] for one in responses] == ["error", "error"]
    assert "error: the call is not JSON" in text and "error: look: box" in text
    assert dict(episode.counts) == {"tool_calls": 2, "tool_errors": 2}
    assert episode.score.correct
