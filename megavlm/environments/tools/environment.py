"""Episodes in which the policy calls tools until it answers without a call."""

import time
from collections.abc import Sequence

from megavlm.environments.base import (
    ChatMessage,
    Content,
    Context,
    Observation,
    RecordedAction,
    Step,
    scored,
)
from megavlm.environments.tools.calls import MalformedCall, Reply, ToolCall, read_reply
from megavlm.environments.tools.tool import Tool, ToolError, marked_tools
from megavlm.rewards.base import Example


class ToolEnvironment:
    """An environment with tools: its methods marked by @tool, and those in environment.tools.

    A turn with tool calls gets their results, in the order of the calls. A malformed call, a wrong
    argument and a tool that fails or takes too long are results, too: the policy reads one sentence
    that begins with "error:". A turn without a call is the answer.

    reply: The response of the current turn in parts. actions: The actions of the current turn, for
    the report; a tool that uses a place of an image adds its own.
    """

    reply: Reply
    actions: list[RecordedAction]

    def __init__(self, context: Context, show_tools: bool = True) -> None:
        """Collect the tools. show_tools: False if the prompt already explains them. Raises
        ValueError if a function cannot be a tool.
        """
        self.context = context
        self._turns, self._show_tools = context.max_turns, show_tools
        self._tools = {tool.name: tool for tool in [*marked_tools(self), *self.context.tools]}

    async def reset(self, row: Example, seed: int) -> Observation:
        """Show the row's prompt and the tools."""
        self.row = row
        schemas = [{"type": "function", "function": t.schema} for t in self._tools.values()]
        return Observation(row.messages, row.images, schemas if self._show_tools else ())

    async def step(self, text: str) -> Step:
        """Call the tools of a response, or finish the episode if it calls none."""
        self._turns -= 1
        self.reply = reply = read_reply(text, self.context.chat)
        if not reply.calls or not self._turns:
            return await self.finish(text, reply)
        shown, counts = await self.results(reply)
        return Step(Observation(shown), 0.0, False, {"counts": counts}, self.actions)

    async def results(self, reply: Reply) -> tuple[list[ChatMessage], dict[str, float]]:
        """Make the calls of a response, and return their results with the counts for the log."""
        shown, failed, self.actions = list[ChatMessage](), 0, []
        self._until = time.monotonic() + self.context.tool_timeout
        for call in reply.calls:
            try:
                content = await self.call(call)
            except (MalformedCall, ToolError) as error:
                content, failed = f"error: {error}", failed + 1
            message = {"role": "tool", "content": content}
            if isinstance(call, ToolCall) and call.name in self._tools:
                message["name"] = call.name
            shown.append(message)
        return shown, {"tool_calls": len(shown), "tool_errors": failed}

    async def call(self, call: ToolCall | MalformedCall) -> Content:
        """Return the result of a call. Raises MalformedCall or ToolError, whose message the policy
        reads; any other exception ends the episode as a failure.
        """
        if isinstance(call, MalformedCall):
            raise call
        if (tool := self._tools.get(call.name)) is None:
            raise ToolError(f"there is no tool {call.name}; there is {', '.join(self._tools)}")
        arguments = call.typed(tool.schema["parameters"])
        return await tool.call(arguments, max(self._until - time.monotonic(), 0.0))

    async def finish(self, text: str, reply: Reply) -> Step:
        """Score the last response, which is the answer. reply: The response in parts."""
        return scored(await self.context.score(text, self.row))

    @property
    def tools(self) -> Sequence[Tool]:
        return list(self._tools.values())
