"""Trees hold a prompt once, with its continuations at any depth: n responses, or turns and their
branches. Packs are made of them (packing.py).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megavlm.data.packs.positions import text_positions
from megavlm.data.packs.target_tokens import TargetColumns
from megavlm.data.packs.token_sets import TokenSets

if TYPE_CHECKING:
    from megavlm.data.processor import Prompt

COLUMN = "column."  # prefix of columns with one value per target token
SEGMENT_COLUMN = "segment_column."  # prefix of columns with one value per target segment


@dataclass(frozen=True, eq=False)
class Segment:
    """S consecutive tokens, S > 0, that continue segment `parent` at its end (-1: none).

    Example, "Hello, world" and one response to it, "I<|im_end|>":
        Segment([9707, 11, 1879], [[0, 1, 2]] * 3, parent=-1, is_target=False)
        Segment([40, 151645], [[3, 4]] * 3, parent=0, is_target=True)
    """

    token_ids: Tensor  # [S] int32 or int64
    positions: Tensor  # [3, S] int64; of a target those of text
    parent: int
    is_target: bool  # whether it is trained on, as a response is
    columns: TargetColumns | None = None  # [S], for responses that a policy sampled
    images: tuple[str, ...] = ()  # keys of the images that its tokens stand for, in order
    routed_experts: Tensor | None = None  # [R, layers, top-k], of its first R tokens
    kept: TokenSets | None = None  # [S], of a target; None: sampled from the whole vocabulary
    teacher: TokenSets | None = None  # [S], of a target; None: a teacher gave no tokens


@dataclass(frozen=True, eq=False)
class Tree:
    """Segments of a tree, with parents before their children. The first is the root.

    Example, "Hello, world" with the responses "I<|im_end|>" and "4!<|im_end|>":
        token_ids  [9707, 11, 1879], [40, 151645], [19, 0, 151645]
        parent     -1, 0, 0
        branches() [[1], [2]]; part([1]) has segments 0 and 2
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        for index, segment in enumerate(self.segments):
            assert -1 <= segment.parent < index, "parents come before children"
            assert len(segment.token_ids) > 0, "a segment has tokens"
            assert segment.parent >= 0 or not segment.is_target, "nothing predicts a root"

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def images(self) -> tuple[str, ...]:
        """Return the keys of the segments' images, in order."""
        return tuple(key for segment in self.segments for key in segment.images)

    def branches(self) -> list[list[int]]:
        """Return the parts that a tree may be cut into, as indices of segments: the segments of
        each sequence, without those that all sequences have. Algorithms need whole sequences, so
        that an episode is never cut. Every path of a tree with targets ends with a response.

        A target without columns belongs to the sequence that it continues, or begins one.
        """
        parts: dict[int, set[int]] = {}
        owners: list[int | None] = []  # the sequence that each segment belongs to or continues
        for index, segment in enumerate(self.segments):
            owner = owners[segment.parent] if segment.parent >= 0 else None
            if segment.is_target and segment.columns is not None:
                owner = int(segment.columns.sequence_ids[0])
            elif segment.is_target and owner is None:
                owner = -index
            owners.append(owner)
            if owner is not None:
                part = parts.setdefault(owner, set())
                while index >= 0 and index not in part:
                    part.add(index)
                    index = self.segments[index].parent
        shared = set.intersection(*parts.values()) if len(parts) > 1 else {0}
        return [sorted(part - shared) for part in parts.values()]

    @property
    def shared(self) -> list[int]:
        """The segments that are in no branch, and in every part of the tree."""
        below = {index for branch in self.branches() for index in branch}
        return [index for index in range(len(self.segments)) if index not in below]

    def part(self, branches: Collection[int]) -> "Tree":
        """Return a tree of the branches with these numbers, and of the segments in no branch."""
        every = self.branches()
        if len(branches) == len(every):
            return self
        kept = sorted({*self.shared, *(index for number in branches for index in every[number])})
        numbers = {-1: -1} | {index: number for number, index in enumerate(kept)}
        segments = (self.segments[index] for index in kept)
        return Tree(tuple(replace(x, parent=numbers[x.parent]) for x in segments))


def prompt_tree(
    prompt: "Prompt",
    responses: Sequence[Sequence[int]],
    columns: Sequence[TargetColumns | None] = (),
) -> Tree:
    """Return a tree whose root is the prompt and whose children are the responses.

    columns: The target columns of each response; empty if no policy sampled the responses.
    """
    start = prompt.next_position
    images = tuple(image.key for image in prompt.images)
    root = Segment(prompt.token_ids, prompt.positions, -1, is_target=False, images=images)
    children = (
        Segment(
            torch.tensor(response),
            text_positions(len(response), start),
            parent=0,
            is_target=True,
            columns=its_columns,
        )
        for response, its_columns in zip(
            responses, columns or (None,) * len(responses), strict=True
        )
    )
    return Tree((root, *children))


def supervised_tree(prompt: "Prompt") -> Tree:
    """Return the prompt and its answer as a chain of segments. The answer and the earlier turns
    that SFT learns are targets.
    """
    segments = list[Segment]()
    keys = [image.key for image in prompt.images]

    def add(bounds: slice, num_images: int, *, is_target: bool) -> None:
        shown = tuple(keys[:num_images])
        del keys[:num_images]
        ids, positions = prompt.token_ids[bounds], prompt.positions[:, bounds]
        segments.append(Segment(ids, positions, len(segments) - 1, is_target, images=shown))

    end = 0
    for turn in prompt.turns:
        seen = len(prompt.images) - len(keys)
        add(slice(end, turn.start), turn.num_images - seen, is_target=False)
        add(slice(turn.start, turn.end), 0, is_target=True)
        end = turn.end
    add(slice(end, None), len(keys), is_target=False)
    answer = torch.tensor(prompt.answer_ids)
    positions = text_positions(len(answer), prompt.next_position)
    return Tree((*segments, Segment(answer, positions, len(segments) - 1, is_target=True)))


def preference_tree(
    prompt: "Prompt", number: int, count: int, reference: Sequence[float] | None
) -> Tree:
    """Return the prompt with its chosen and its rejected response. They are one sequence, so that
    no plan of packs separates them.

    number: Number of the pair among the `count` pairs of the step. reference: Log-probs of both
    responses by the reference model, each summed over its tokens; None if they are not known.
    """
    responses = (prompt.answer_ids, prompt.rejected_ids)
    columns = []
    for index, response in enumerate(responses):
        size = len(response)
        ids, zeros = torch.full((size,), number), torch.zeros(size)
        no = torch.zeros(size, dtype=torch.bool)
        mean = None if reference is None else reference[index] / size
        columns.append(
            TargetColumns(
                rewards=zeros,
                rollout_logprobs=zeros,
                loss_weights=torch.full((size,), 1 / count),
                sequence_ids=ids,
                group_ids=ids,
                turn_ids=torch.zeros_like(ids),
                has_reward=no,
                is_stale=no,
                reference_logprobs=None if mean is None else torch.full((size,), mean).double(),
                is_chosen=~no if index == 0 else no,
            )
        )
    return prompt_tree(prompt, responses, columns)


def trees_to_arrays(
    trees: Sequence[Tree], numbers: Mapping[str, int], columns: TargetColumns | None = None
) -> dict[str, Tensor]:
    """Return trees as a few arrays, whose values are in the order of segments and tokens, with the
    size of each segment and tree. numbers: Image key -> number by which the arrays refer to the
    image. columns: Columns of any target, if these trees may have no targets.

    Token ids and positions are stored in 32 bits; targets are text, of which the first position
    tells the others. A column whose segments each share one value, as most do, is stored as one
    value per segment.
    """
    segments = [segment for tree in trees for segment in tree.segments]
    targets = [segment for segment in segments if segment.is_target]
    others = [segment.positions.int() for segment in segments if not segment.is_target]
    arrays = {
        "token_ids": _joined([s.token_ids.int() for s in segments], torch.int32),
        "positions": torch.cat([torch.empty(3, 0, dtype=torch.int32), *others], 1),
        "first_positions": _joined([s.positions[0, :1].int() for s in targets], torch.int32),
        "segment_sizes": torch.tensor([len(s.token_ids) for s in segments], dtype=torch.int32),
        "parents": torch.tensor([s.parent for s in segments], dtype=torch.int32),
        "is_target": torch.tensor([s.is_target for s in segments], dtype=torch.bool),
        "num_segments": torch.tensor([len(tree.segments) for tree in trees], dtype=torch.int32),
        "num_images": torch.tensor([len(s.images) for s in segments], dtype=torch.int32),
        "images": torch.tensor([numbers[key] for s in segments for key in s.images]).int(),
    }
    known = [segment.routed_experts for segment in segments if segment.routed_experts is not None]
    if known:
        counts = [0 if s.routed_experts is None else len(s.routed_experts) for s in segments]
        arrays["num_routes"] = torch.tensor(counts, dtype=torch.int32)
        arrays["routes"] = torch.cat(known)
    lengths = [len(s.token_ids) for s in targets]
    kept = TokenSets.joined([s.kept for s in targets], lengths)
    teacher = TokenSets.joined([s.teacher for s in targets], lengths)
    arrays |= TokenSets.to_arrays("kept", kept) | TokenSets.to_arrays("teacher", teacher)
    parts = [segment.columns for segment in targets if segment.columns is not None]
    assert len(parts) in (0, len(targets)), "all targets have columns, or none has"
    columns = parts[0] if parts else columns
    if columns is None:
        return arrays
    fields = columns.present()
    for segment, part in zip(targets, parts, strict=False):
        assert len(part.rewards) == len(segment.token_ids), "one row per token"
        assert part.present().keys() == fields.keys(), "all targets have the same columns"
    for name, first in fields.items():
        values = [getattr(part, name) for part in parts]
        is_shared = all(x.stride() == (0,) or len(x) == 1 for x in values)
        key = (SEGMENT_COLUMN if is_shared else COLUMN) + name
        arrays[key] = _joined([x[:1] for x in values] if is_shared else values, first.dtype)
    return arrays


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *parts])
