"""Conversations that branch, as one tree and as the sequences from its root to each leaf."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megavlm.data.packs.positions import Span, mrope_positions
from megavlm.data.packs.trees import Segment, Tree
from megavlm.data.processor import ProcessedImage, Prompt
from tests.parity.inputs import Inputs, image
from tests.parity.reference import Reference, token_weights
from tests.support.columns import columns


@dataclass(frozen=True)
class Turn:
    """What the user says, with images, or a response (`prompt` is None)."""

    token_ids: Tensor
    parent: int
    prompt: Prompt | None = None

    @property
    def is_response(self) -> bool:
        return self.prompt is None

    @property
    def images(self) -> tuple[ProcessedImage, ...]:
        return self.prompt.images if self.prompt else ()


@dataclass(frozen=True)
class Conversation:
    """Turns, parents before children; the first is the user's."""

    turns: tuple[Turn, ...]
    vision_token_ids: tuple[int, ...]
    merge_size: int = 2

    @property
    def images(self) -> dict[str, ProcessedImage]:
        return {image.key: image for turn in self.turns for image in turn.images}

    def paths(self) -> list[list[int]]:
        """The turns from the root to each leaf."""
        parents = {turn.parent for turn in self.turns}
        return [self._path(i) for i in range(len(self.turns)) if i not in parents]

    def tree(self) -> Tree:
        everything = range(len(self.turns))
        return self._tree(everything, [turn.parent for turn in self.turns], everything)

    def sequences(self) -> list[Tree]:
        """A tree without branches for each path. A response that several have counts in the first
        alone.
        """
        trees, counted = [], set[int]()
        for path in self.paths():
            fresh = [index for index in path if index not in counted]
            trees.append(self._tree(path, range(-1, len(path) - 1), fresh))
            counted |= set(path)
        return trees

    def targets(self, path: Sequence[int]) -> Tensor:
        """Which of the tree's targets the path's are."""
        sizes = torch.tensor([len(t.token_ids) * t.is_response for t in self.turns])
        starts = sizes.cumsum(0) - sizes
        return torch.cat([torch.arange(starts[i], starts[i] + sizes[i]) for i in path])

    def _path(self, index: int) -> list[int]:
        parent = self.turns[index].parent
        return [*(self._path(parent) if parent >= 0 else []), index]

    def _tree(self, indices: Sequence[int], parents: Sequence[int], counted: Sequence[int]) -> Tree:
        segments = []
        for index, parent in zip(indices, parents, strict=True):
            turn = self.turns[index]
            weight = token_weights(len(turn.token_ids), index) * (index in counted)
            # A sequence is a branch below the root.
            sequence_ids = torch.full_like(turn.token_ids, self._path(index)[:2][-1])
            its_columns = columns(len(weight), loss_weights=weight, sequence_ids=sequence_ids)
            segments.append(
                Segment(
                    turn.token_ids,
                    self._positions(index),
                    parent,
                    is_target=turn.is_response,
                    columns=its_columns if turn.is_response else None,
                    images=tuple(image.key for image in turn.images),
                )
            )
        return Tree(tuple(segments))

    def _positions(self, index: int) -> Tensor:
        """Those at the end of the sequence from the root to this turn."""
        turns = [self.turns[i] for i in self._path(index)]
        positions, _ = mrope_positions(
            torch.cat([turn.token_ids for turn in turns]),
            [Span(image.grid) for turn in turns for image in turn.images],
            vision_token_ids=self.vision_token_ids,
            merge_size=self.merge_size,
        )
        return positions[:, -len(turns[-1].token_ids) :]


def two_conversations(make: Inputs) -> list[Conversation]:
    """A question with three responses; and one of two turns, each of which branches."""
    vision = make.processor.vision_token_ids
    first = make.case(1, images=[image(96, 128, 1)])
    second = make.case(2, text=9, images=[image(64, 96, 2)])
    shown = make.case(3, text=5, images=[image(128, 64, 3), image(96, 128, 1)]).prompt
    said = make.case(4, text=12).prompt
    flat = [user(first.prompt, -1), *(response(size, 0) for size in (3, 6, 1))]
    deep = [
        user(second.prompt, -1),
        response(4, 0),
        user(shown, 1),
        response(3, 2),
        response(5, 2),
        response(2, 0),
        user(said, 5),
        response(4, 6),
        response(1, 0),
    ]
    return [Conversation(tuple(turns), vision) for turns in (flat, deep)]


def user(prompt: Prompt, parent: int) -> Turn:
    return Turn(prompt.token_ids, parent, prompt)


def response(size: int, parent: int) -> Turn:
    generator = torch.Generator().manual_seed(size + 10 * parent)
    return Turn(torch.randint(250, (size,), generator=generator), parent)


def expect(folder: Any, conversations: Sequence[Conversation]) -> dict[str, Any]:
    """By transformers: logits of each path's targets, gradients by name of the sum of all."""
    reference = Reference(folder)
    logits = []
    for conversation in conversations:
        for path, tree in zip(conversation.paths(), conversation.sequences(), strict=True):
            root, *rest = (conversation.turns[index] for index in path)
            assert root.prompt is not None
            shown = [image for index in path for image in conversation.turns[index].images]
            later = torch.cat([turn.token_ids for turn in rest])
            scores = reference.scores(replace(root.prompt, images=tuple(shown)), later.tolist())
            targets = torch.cat(
                [torch.full(turn.token_ids.shape, turn.is_response) for turn in rest]
            )
            weights = torch.cat([s.columns.loss_weights for s in tree.segments if s.columns])
            (scores.logprobs(later.tolist())[targets] * weights).sum().backward()
            logits.append(scores.logits[targets])
    parameters = reference.model.named_parameters()
    return {"logits": logits, "gradients": {name: x.grad for name, x in parameters}}
