"""The tree of a group, made of the calls of its episodes. A call is a prompt with the response that
was sampled for it. A prompt need not extend the prompt before it: where it differs, the tree has a
branch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megavlm.data.packs.positions import text_positions
from megavlm.data.packs.target_tokens import TargetColumns
from megavlm.data.packs.token_sets import TokenSets
from megavlm.data.packs.trees import Segment, Tree
from megavlm.data.processor import Prompt
from megavlm.inference.protocol import Response, TopTokens
from megavlm.rollout.trajectory import Group, TreePart


def group_tree(
    group: Group, columns: Sequence[TargetColumns], *, replays_routing: bool = False
) -> Tree:
    """Return the calls of a group's episodes as one tree. columns: Columns of each call's response.
    With a teacher's log-probs, targets also have its likeliest tokens. replays_routing: If true,
    segments have the routed experts that servers returned.

    A response is a target once, below the prompt that it was sampled for. A prompt shares its
    longest prefix that is in the tree: with earlier calls of its episode and their responses, or
    with the prompts of other episodes up to a response. Prompts without a common first token have
    separate roots. Targets are in the order of episodes and calls.
    """
    prompts = group.prompts
    responses = [response for episode in group.episodes for response in episode.responses]
    # Positions of text, of which those of each response are a part.
    ends = (p.next_position + len(r.token_ids) for p, r in zip(prompts, responses, strict=True))
    text = text_positions(max(ends), 0)
    parts, segments = tree_parts(group), []
    routed_experts = (
        _routed_experts(parts, prompts, responses) if replays_routing else [None] * len(parts)
    )
    for (parent, call, is_response, start, end, images), its_experts in zip(
        parts, routed_experts, strict=True
    ):
        prompt = prompts[call]
        if is_response:
            response = responses[call]
            ids = torch.from_numpy(response.token_ids[start:end])
            positions = text[:, prompt.next_position + start : prompt.next_position + end]
            table, kept, teacher = columns[call], None, None
            if response.kept is not None:
                kept = TokenSets.of(*map(torch.from_numpy, response.kept))
            if table.teacher_logprobs is not None and response.teacher_top is not None:
                teacher = _sets_of(response.teacher_top)
            if len(ids) < len(response.token_ids):
                part = slice(start, end)
                table = table.select(part)
                kept, teacher = kept and kept.select(part), teacher and teacher.select(part)
            segments.append(
                Segment(ids, positions, parent, True, table, (), its_experts, kept, teacher)
            )
        else:
            ids, positions = prompt.token_ids[start:end], prompt.positions[:, start:end]
            segments.append(Segment(ids, positions, parent, False, None, images, its_experts))
    return Tree(tuple(segments))


def _sets_of(top: TopTokens) -> TokenSets:
    num_tokens, k = top.ids.shape
    sizes = torch.full((num_tokens,), k, dtype=torch.int32)
    return TokenSets.of(sizes, *(torch.from_numpy(part).flatten() for part in top))


def _routed_experts(
    parts: Sequence[TreePart], prompts: Sequence[Prompt], responses: Sequence[Response]
) -> list[Tensor | None]:
    """Return the routed experts of each part's tokens, without the last token of a response that no
    turn follows.
    """

    def of_call(call: int, start: int, end: int) -> Tensor | None:
        """Return the routed experts of tokens of a call, counted from its prompt's first; those at
        the end may have none.
        """
        routed_experts, num_tokens = responses[call].routed_experts, len(prompts[call].token_ids)
        if routed_experts is None:
            return None
        first = num_tokens + len(responses[call].token_ids) - 1 - len(routed_experts)
        return (
            None if start < first else torch.from_numpy(routed_experts[start - first : end - first])
        )

    starts = [x.start + x.is_response * len(prompts[x.call].token_ids) for x in parts]
    sizes = [part.end - part.start for part in parts]
    found = [
        of_call(part.call, start, start + size)
        for part, start, size in zip(parts, starts, sizes, strict=True)
    ]
    for part, start in zip(parts, starts, strict=True):
        # Only the turn after a response has computed the response's last token.
        above = found[part.parent] if part.parent >= 0 else None
        if above is not None and len(above) < sizes[part.parent]:
            last = of_call(part.call, start - 1, start)
            found[part.parent] = above if last is None else torch.cat([above, last])
    return found


def tree_parts(group: Group) -> tuple[TreePart, ...]:
    """Return the parts of a played group's tree. They are found when the group ends, while others
    are generated, and kept.
    """
    if group.tree is None:
        tree = CallTree()
        for number, episode in enumerate(group.episodes):
            for prompt, response in zip(episode.prompts, episode.responses, strict=True):
                tree.add(number, prompt, response)
        group.tree = tree.parts()
    return group.tree


Images = Sequence[tuple[int, str]]  # start among the tokens, and key


@dataclass(eq=False)
class _Node:
    """Tokens of a call's prompt or response that become a part of the tree.

    call: Number of the call. start: First token in its prompt or response. owner: The episode whose
    response it is or continues; None for a prompt that no response precedes. images: The images
    that start in it. users: Episodes whose calls contain it.
    """

    ids: npt.NDArray[Any]  # [S] of integers
    parent: "_Node | None"
    owner: int | None
    call: int
    start: int = 0
    is_response: bool = False
    images: Images = ()
    children: list["_Node"] = field(default_factory=list)
    users: set[int] = field(default_factory=set)


class _Match(NamedTuple):
    node: _Node | None
    offset: int
    length: int


def _length(match: _Match) -> int:
    return match.length


class CallTree:
    """A tree that grows by the calls of episodes."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []  # parents before their children
        self._roots: list[_Node] = []
        self._num_calls = 0

    def add(self, episode: int, prompt: Prompt, response: Response) -> None:
        """Add a call of an episode, after its earlier calls and those of earlier episodes."""
        node = self.add_prompt(episode, prompt)
        self._append(_Node(response.token_ids, node, episode, self._num_calls, is_response=True))
        self._num_calls += 1

    @property
    def num_tokens(self) -> int:
        return sum(len(node.ids) for node in self._nodes)

    def num_further(self, episode: int, prompt: Prompt) -> int:
        """Return how many tokens of a prompt are not in the tree."""
        _, known = self._longest_match(episode, prompt)
        return len(prompt.token_ids) - known

    def parts(self) -> tuple[TreePart, ...]:
        """Return the parts of the tree, with parents before their children."""
        places: dict[_Node | None, int] = {node: index for index, node in enumerate(self._nodes)}
        places[None] = -1
        return tuple(
            TreePart(
                places[node.parent],
                node.call,
                node.is_response,
                node.start,
                node.start + len(node.ids),
                tuple(key for _, key in node.images),
            )
            for node in self._nodes
        )

    def add_prompt(self, episode: int, prompt: Prompt) -> _Node:
        """Add the tokens of a prompt that are not in the tree. Returns the node at whose end the
        prompt ends.
        """
        node, known = self._longest_match(episode, prompt)
        if known < len(prompt.token_ids):
            owner = None if node is None else node.owner
            shown = _between(_images(prompt), known, len(prompt.token_ids))
            ids = prompt.token_ids.numpy()[known:]
            node = self._append(_Node(ids, node, owner, self._num_calls, known, images=shown))
        assert node is not None, "a prompt has tokens"
        above: _Node | None = node
        while above is not None:
            above.users.add(episode)
            above = above.parent
        return node

    def _append(self, node: _Node) -> _Node:
        self._nodes.append(node)
        (self._roots if node.parent is None else node.parent.children).append(node)
        return node

    def _longest_match(self, episode: int, prompt: Prompt) -> tuple[_Node | None, int]:
        """Return the node at whose end the longest prefix of a prompt ends that the episode finds
        in the tree, and the length of the prefix. The node is cut there first.
        """
        ids, images = prompt.token_ids.numpy(), _images(prompt)
        # The longest prefix that is found: `own` in responses of this episode and what follows
        # them, `used` in prompts that this episode's calls contain already, `other` in prompts of
        # any episode. Of an image and a question of 300 tokens, the first call of episode 1 finds
        # `other` = 300, and its second call, after a response of 20 tokens, `own` = 320.
        own = used = other = _Match(None, 0, 0)
        # Nodes to compare, each with the number of tokens before it. Responses may be equal, so
        # that several children can match.
        open_nodes = [(node, 0) for node in reversed(self._roots)]
        while open_nodes:
            node, before = open_nodes.pop()
            if node.owner not in (None, episode):
                continue
            count = _common(node, ids[before:], _between(images, before, before + len(node.ids)))
            found = _Match(node, count, before + count)
            if node.owner == episode:
                own = max(own, found, key=_length)
            else:
                other = max(other, found, key=_length)
                used = max(used, found, key=_length) if episode in node.users else used
            if count == len(node.ids):
                open_nodes += [(child, before + count) for child in reversed(node.children)]
        # `own` wins if it is longer than what the episode uses already, even over a longer prefix
        # in another episode's prompt: below that prompt, the episode's part of the tree would have
        # the tokens of its own response a second time.
        best, best_offset, longest = own if own.length > used.length else other
        if best is not None and best_offset < len(best.ids):
            best = self._cut(best, best_offset)
        return best, longest

    def _cut(self, node: _Node, count: int) -> _Node:
        """Cut a node after `count` tokens. Returns the first part."""
        rest = replace(
            node,
            ids=node.ids[count:],
            parent=node,
            start=node.start + count,
            images=_between(node.images, count, len(node.ids)),
            users=set(node.users),
        )
        for child in rest.children:
            child.parent = rest
        self._nodes.insert(self._nodes.index(node) + 1, rest)
        node.ids, node.children = node.ids[:count], [rest]
        node.images = _between(node.images, 0, count)
        return node


def _common(node: _Node, ids: npt.NDArray[np.int64], images: Images) -> int:
    """Return the number of tokens at the start of `ids` that are the node's. images: The images
    that start in them.
    """
    size = min(len(node.ids), len(ids))
    differing = (node.ids[:size] != ids[:size]).nonzero()[0]
    count = int(differing[0]) if len(differing) else size
    # Images of one size have the same tokens, and a response may hold them as text.
    for pair in zip_longest(node.images, images):
        if pair[0] != pair[1]:
            return min(count, *(image[0] for image in pair if image is not None))
    return count


def _images(prompt: Prompt) -> Images:
    pairs = zip(prompt.image_starts, prompt.images, strict=True)
    return [(start, image.key) for start, image in pairs]


def _between(images: Images, first: int, end: int) -> Images:
    """Return the images that start from token `first` to token `end` - 1, counted from `first`."""
    return [(start - first, key) for start, key in images if first <= start < end]
