"""Packs of trees: the integer layout of the packed sequence of one forward pass.

A pack holds several trees (trees.py) in one row of tokens. A token attends to the segments that its
own segment continues (`Pack.ancestors`) and to the earlier tokens of its own segment. With context
parallelism each rank holds a part of the tokens (`Pack.part`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megavlm.data.packs.context_parallel import SegmentRun, run_tokens, split_segments
from megavlm.data.packs.positions import text_positions
from megavlm.data.packs.routed_experts import RoutedExperts
from megavlm.data.packs.target_tokens import TargetColumns
from megavlm.data.packs.token_sets import TokenSets
from megavlm.data.packs.trees import COLUMN, SEGMENT_COLUMN, Tree, trees_to_arrays


@dataclass(eq=False)
class Pack:
    """A packed sequence of T tokens in S segments, with N targets and M vision tokens. This rank
    holds t tokens, n targets and m vision tokens: all of them, or one of `context_size` parts.

    A target belongs to the rank that holds its source: the token before it, whose hidden state
    predicts it. Bounds, parents and runs are plain integers, so that planning with them (the
    sequences of a kernel, for example) does not synchronize with the GPU. Passes that compute
    log-probs, values or advantages replace `columns`; nothing else changes.

    Example, the tree of `Tree` as a pack: T = 8, S = 3, N = 5, M = 0.
        token_ids      [9707, 11, 1879, 40, 151645, 19, 0, 151645]
        segment_ids    [0, 0, 0, 1, 1, 2, 2, 2]
        parents        [-1, 0, 0]
        segment_bounds [0, 3, 5, 8]
        source_index   [2, 3, 2, 5, 6]
        target_ids     [40, 151645, 19, 0, 151645]
    Both responses continue token 2, and their positions [3, 4] and [3, 4, 5] are what they would be
    without the other. Of two context ranks, the first holds tokens [0, 2, 3, 5] of the pack.
    """

    token_ids: Tensor  # [t] int64
    positions: Tensor  # [3, t] int64
    token_index: Tensor  # [t] int64: index of each held token in the pack, ascending
    gather_index: Tensor  # [T] int64: index of each token in the concatenation of the ranks' tokens
    runs: tuple[SegmentRun, ...]  # the held tokens as runs, each within one segment

    segment_ids: Tensor  # [T] int64, 0 to S - 1 over the whole pack
    ancestors: Tensor  # [S, S] bool: the row's tokens may attend the column's, itself included
    parents: tuple[int, ...]  # [S], -1: none
    segment_bounds: tuple[int, ...]  # first token of each segment, then T
    tree_bounds: tuple[int, ...]  # first token of each tree, then T

    source_index: Tensor  # [n] int64: the held token whose hidden state predicts the target
    target_ids: Tensor  # [n] int64
    target_index: Tensor  # [n] int64: index of each held target among the pack's N
    columns: TargetColumns | None  # [n]; None if no policy sampled the targets
    kept: TokenSets | None  # [n]; an empty set, or None for all, is the whole vocabulary
    teacher: TokenSets | None  # [n], a teacher's likeliest tokens; None without any
    num_sequences: int  # above every sequence id of the columns, the same on all context ranks

    vision_index: Tensor  # [m] int64: held tokens that image features replace, ascending
    vision_runs: tuple[tuple[int, int], ...]  # the same as runs: first token and last + 1 of each
    feature_index: Tensor  # [m] int64: row of each among the pack's M features
    images: tuple[str, ...]  # keys of the images whose features are the M rows, in order

    context_size: int = 1
    routed_experts: RoutedExperts | None = None  # [t]; None if the routers choose for all tokens

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return self.tree_bounds[-1]

    @property
    def num_targets(self) -> int:
        """Return n. The sum over context ranks is the pack's N."""
        return len(self.target_ids)

    def vision_before(self, token: int) -> int:
        """Return the number of held vision tokens before held token `token`."""
        return sum(max(0, min(end, token) - first) for first, end in self.vision_runs)

    def part(self, context_rank: int) -> "Pack":
        """Return the part of the pack that one context rank holds. All parts have the same number
        of tokens.
        """
        if self.context_size == 1:
            return self
        assert len(self.token_ids) == self.num_tokens, "a part is not split again"
        runs = split_segments(self.segment_bounds, self.context_size)
        gather_index = torch.cat([run_tokens(rank_runs) for rank_runs in runs]).argsort()
        token_index = run_tokens(runs[context_rank])
        own_index = gather_index - context_rank * len(token_index)  # valid for held tokens only
        held = torch.zeros(self.num_tokens, dtype=torch.bool)
        held[token_index] = True
        target_index = held[self.source_index].nonzero().flatten()
        feature_index = held[self.vision_index].nonzero().flatten()
        vision_index = own_index[self.vision_index[feature_index]]
        return replace(
            self,
            token_ids=self.token_ids[token_index],
            positions=self.positions[:, token_index],
            token_index=token_index,
            gather_index=gather_index,
            runs=runs[context_rank],
            source_index=own_index[self.source_index[target_index]],
            target_ids=self.target_ids[target_index],
            target_index=target_index,
            columns=self.columns and self.columns.select(target_index),
            kept=self.kept and self.kept.select(target_index),
            teacher=self.teacher and self.teacher.select(target_index),
            vision_index=vision_index,
            vision_runs=_runs(vision_index),
            feature_index=feature_index,
            routed_experts=self.routed_experts and self.routed_experts.select(token_index),
        )

    def without_routed_experts(self) -> "Pack":
        """Return the pack for a model whose routers choose the experts."""
        return replace(self, routed_experts=None)

    def to(self, device: torch.device | str) -> "Pack":
        """Return the pack with its tensors on `device`. Split a pack before it is moved."""
        moved: dict[str, Any] = {
            name: x.to(device)
            for name, x in vars(self).items()
            if isinstance(x, Tensor | TargetColumns | TokenSets | RoutedExperts)
        }
        return replace(self, **moved)


def make_pack(
    trees: Sequence[Tree],
    *,
    vision_token_ids: Collection[int],
    multiple: int = 1,
    context_size: int = 1,
) -> Pack:
    """Return the pack of trees, laid out as `make_packs` does."""
    keys = list(dict.fromkeys(key for tree in trees for key in tree.images))
    arrays = trees_to_arrays(trees, {key: number for number, key in enumerate(keys)})
    shape = {"multiple": multiple, "context_size": context_size}
    (pack,) = make_packs(arrays, keys, [len(trees)], vision_token_ids=vision_token_ids, **shape)
    return pack


def make_packs(
    arrays: Mapping[str, Tensor],
    keys: Sequence[str],
    counts: Iterable[int],
    *,
    vision_token_ids: Collection[int],
    multiple: int = 1,
    context_size: int = 1,
) -> Iterator[Pack]:
    """Lay out the trees of `trees_to_arrays` in rows: the first pack has the first `counts[0]`
    trees, and so on. A tree without targets pads a pack, so that each of context_size parts has the
    same number of tokens, at least one and a multiple of `multiple`.

    keys: Image keys, by number. vision_token_ids: Ids of the image and the video token; the tower's
    features replace these tokens in order.

    Targets and their columns are in the order of their segments and tokens. All targets have the
    same columns.
    """
    forest = _Forest(arrays, keys, frozenset(vision_token_ids))
    first = 0
    for count in counts:
        pack = forest.pack(first, first + count, multiple * context_size)
        yield replace(pack, context_size=context_size)
        first += count


class _Forest:
    """The trees of `trees_to_arrays`, with the values of each token."""

    def __init__(
        self, arrays: Mapping[str, Tensor], keys: Sequence[str], vision_token_ids: Collection[int]
    ) -> None:
        self._sizes, self._is_target = arrays["segment_sizes"].long(), arrays["is_target"]
        self._parents, self._token_ids = arrays["parents"].long(), arrays["token_ids"].long()
        self._images = [keys[number] for number in arrays["images"].tolist()]
        # Segments before each tree, and what is before each segment; the last item is the total.
        self._segments_before = _offsets(arrays["num_segments"])
        self._tokens_before = _offsets(self._sizes)
        self._targets_before = _offsets(self._sizes * self._is_target)
        self._images_before = _offsets(arrays["num_images"])
        starts, lengths = self._tokens_before[:-1], self._sizes[self._is_target]
        self._target = self._is_target.repeat_interleave(self._sizes)
        # A vision token in a response is text: no image belongs to it.
        vision = torch.isin(self._token_ids, torch.tensor(sorted(vision_token_ids)))
        self._vision = vision & ~self._target
        self._positions = torch.empty(3, len(self._token_ids), dtype=torch.long)
        self._positions[:, ~self._target] = arrays["positions"].long()
        # The positions of a target count up from its first one.
        ahead = arrays["first_positions"] - starts[self._is_target]
        index = self._target.nonzero().flatten()
        self._positions[:, self._target] = index + ahead.repeat_interleave(lengths)
        columns = {
            name.partition(".")[2]: x if name.startswith(COLUMN) else x.repeat_interleave(lengths)
            for name, x in arrays.items()
            if name.startswith((COLUMN, SEGMENT_COLUMN))
        }
        self._columns = TargetColumns(**columns) if columns else None
        self._kept = TokenSets.from_arrays("kept", arrays)
        self._teacher = TokenSets.from_arrays("teacher", arrays)
        self._routed_experts = None
        if "routes" in arrays:
            counts, routed_experts = arrays["num_routes"].long(), arrays["routes"]
            ahead = (starts - _offsets(counts)[:-1]).repeat_interleave(counts)
            index = torch.arange(len(routed_experts)) + ahead  # their tokens
            experts = routed_experts.new_zeros(len(self._target), *routed_experts.shape[1:])
            is_known = torch.zeros_like(self._target).index_fill_(0, index, True)
            self._routed_experts = RoutedExperts(
                experts.index_copy_(0, index, routed_experts), is_known
            )

    def pack(self, first: int, end: int, multiple: int) -> Pack:
        """Return the pack of trees `first` to `end` - 1, padded to a multiple of tokens."""
        segments = _between(self._segments_before, slice(first, end))
        tokens = _between(self._tokens_before, segments)
        num_tokens = tokens.stop - tokens.start
        padding = -num_tokens % multiple if num_tokens else multiple
        further = (0, 1 if padding else 0)  # the padding's segment
        sizes = pad(self._sizes[segments], further, value=padding)
        starts = sizes.cumsum(0) - sizes
        # Parents are numbered within each tree.
        trees = self._segments_before[first : end + 1]
        before = (trees[:-1] - segments.start).repeat_interleave(trees.diff())
        parents = self._parents[segments]
        parents = pad(torch.where(parents < 0, -1, parents + before), further, value=-1)
        is_target = pad(self._is_target[segments], further)

        token_ids = pad(self._token_ids[tokens], (0, padding))
        everything = torch.arange(len(token_ids))
        segment_bounds = (*starts.tolist(), len(token_ids))
        tree_bounds = (self._tokens_before[trees] - tokens.start).tolist()
        # A target is predicted by the token before it: a response's first by its parent's last.
        source = everything - 1
        source[starts[is_target]] = (starts + sizes - 1)[parents[is_target]]
        target = pad(self._target[tokens], (0, padding))
        vision_index = self._vision[tokens].nonzero().flatten()
        target_ids = token_ids[target]
        targets, num_sequences = _between(self._targets_before, segments), 1
        columns = self._columns and self._columns.select(targets)
        kept, teacher = (sets and sets.select(targets) for sets in (self._kept, self._teacher))
        if columns is not None:
            num_sequences = int(columns.sequence_ids.max()) + 1 if len(target_ids) else 1
        routed_experts = self._routed_experts
        if routed_experts is not None:
            known = routed_experts.select(tokens)
            routed_experts = known.padded(padding) if known.is_known.any() else None
        return Pack(
            token_ids=token_ids,
            positions=torch.cat([self._positions[:, tokens], text_positions(padding, 0)], 1),
            token_index=everything,
            gather_index=everything,
            runs=split_segments(segment_bounds, 1)[0],
            segment_ids=torch.arange(len(sizes)).repeat_interleave(sizes),
            ancestors=ancestors_of(parents.tolist()),
            parents=tuple(parents.tolist()),
            segment_bounds=segment_bounds,
            tree_bounds=(*tree_bounds, *[len(token_ids)][: further[1]]),
            source_index=source[target],
            target_ids=target_ids,
            target_index=torch.arange(len(target_ids)),
            columns=columns,
            kept=kept if kept is not None and len(kept.ids) else None,
            teacher=teacher if teacher is not None and len(teacher.ids) else None,
            num_sequences=num_sequences,
            vision_index=vision_index,
            vision_runs=_runs(vision_index),
            feature_index=torch.arange(len(vision_index)),
            images=tuple(self._images[_between(self._images_before, segments)]),
            routed_experts=routed_experts,
        )


def _offsets(sizes: Tensor) -> Tensor:
    """Return the sums [N + 1] int64 of the sizes [N] before each item, and of all."""
    return pad(sizes.long().cumsum(0), (1, 0))


def _between(before: Tensor, items: slice) -> slice:
    """Return the bounds of consecutive items. before: See `_offsets`."""
    return slice(int(before[items.start]), int(before[items.stop]))


def _runs(index: Tensor) -> tuple[tuple[int, int], ...]:
    """Return an ascending index [m] as runs of consecutive values, each as (first, last + 1). For
    example, [4, 5, 6, 9] has the runs (4, 7) and (9, 10).
    """
    breaks = (index.diff() != 1).nonzero().flatten() + 1
    runs = index.tensor_split(breaks.tolist())
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs if len(run))


def join_targets(parts: Sequence[Pack], values: Sequence[Tensor]) -> Tensor:
    """Join per-target values [n] of a pack's parts, in the order of the pack's targets [N]."""
    return torch.cat([*values])[torch.cat([part.target_index for part in parts]).argsort()]


def ancestors_of(parents: Sequence[int]) -> Tensor:
    """Return for each segment [S, S] whether it continues each other one, or is that one."""
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for index, parent in enumerate(parents):
        if parent >= 0:
            ancestors[index] |= ancestors[parent]
    return ancestors
