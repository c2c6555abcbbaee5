"""The buffer of groups between rollouts and training: which prompts may start, and which groups a
step trains on. It only decides: it waits for nothing, and does not look into a group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

T = TypeVar("T")  # a group


@dataclass(frozen=True)
class StreamBatch(Generic[T]):
    """Groups of a step that are handed over together.

    indices: Index of each group among the groups that the step trains on, in the order in which
    their prompts were drawn. is_last: True if no other groups of the step follow. left_out:
    Groups that the step sampled and does not train on (dynamic sampling).

    Example, a step of four groups of which b and d are the first to be played:
        StreamBatch([b, d], indices=[1, 3], is_last=False)
        StreamBatch([a, c], indices=[0, 2], is_last=True)
    """

    groups: Sequence[T]
    indices: Sequence[int]
    is_last: bool = True
    left_out: Sequence[T] = ()


@dataclass(frozen=True, kw_only=True)
class Window:
    """What may be started, and what a step trains on.

    per_step: Groups of a step.

    steps_started: Steps whose prompts are started and not yet trained on, at most.

    staleness: Age in steps of the oldest weights that may have sampled a token.

    order: `drawn` hands groups over in the order of their prompts, and waits for each. `oldest`
    hands over groups that are played, those of the oldest weights first, and waits for a slow one
    only if a later step would otherwise have more groups that are due than it trains on.

    rounds: Rounds in which other prompts replace groups without signal (DAPO's dynamic sampling,
    arXiv 2503.14476).

    requeue: If true, a lost group's prompt is asked again in a later step.
    """

    per_step: int
    steps_started: float = 1.0
    staleness: int = 0
    order: Literal["drawn", "oldest"] = "drawn"
    rounds: int = 0
    requeue: bool = False


@dataclass(eq=False)
class Started(Generic[T]):
    """A group that was started, until a step takes it.

    version: Weight version of its oldest token; before it is played, the oldest that it may get.
    tokens: Number of its tokens; None until it is played.
    """

    group: T
    version: int
    tokens: int | None = None
    has_signal: bool = True


class GroupBuffer(Generic[T]):
    """Groups that were started and not trained on. `begin` begins a step, which ends with the last
    streamed batch that `take` returns. A prompt starts only when `allow` says so.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        self.version: int | None = None  # of the current weights, once a step has begun
        self._started: list[Started[T]] = []  # in the order of their prompts
        self._waiting: list[T] = []  # of a checkpoint, or lost before; they start first
        self._kept: list[T] = []  # lost in this step, for a later one
        self._allowed = 0  # prompts that may start now
        self._rounds = 0  # rounds left in this step
        self._indices: list[int] = []  # places of this round that wait for a group
        self._free: list[int] = []  # places whose groups had no signal
        self._flat: list[Started[T]] = []  # groups without signal
        self._ready: dict[int, Started[T]] = {}  # to be handed over, by index
        self._dropped = self._lost = 0  # groups of this step

    def begin(self, version: int) -> None:
        """Begin a step with weights `version`. The first step allows all prompts that may be
        started, each later one as many as a step trains on.
        """
        steps = self.window.steps_started if self.version is None else 1
        self._allowed += math.ceil(steps * self.window.per_step)
        self.version, self._rounds = version, self.window.rounds
        self._indices, self._free, self._flat = [*range(self.window.per_step)], [], []
        for item in list(self._started):
            self._drop_old(item)

    def allow(self) -> tuple[list[T], int]:
        """Return what starts now: groups that waited, and the number of new prompts."""
        waiting, self._waiting = self._waiting[: self._allowed], self._waiting[self._allowed :]
        new, self._allowed = self._allowed - len(waiting), 0
        return waiting, new

    def start(self, group: T, version: int) -> Started[T]:
        """Add a group that starts. version: Oldest weights of the tokens that it has and gets."""
        item = Started(group, version)
        self._started.append(item)
        return item

    def played(self, item: Started[T], version: int, tokens: int, has_signal: bool) -> None:
        """Note that a group is played. Another prompt replaces it if it is too old."""
        item.version, item.tokens, item.has_signal = version, tokens, has_signal
        self._drop_old(item)

    def lose(self, item: Started[T], prompt: T) -> int:
        """Replace a group whose request timed out by another prompt. prompt: The group before its
        start. Returns the number of groups that the step has lost.
        """
        self._replace(item)
        self._lost += 1
        if self.window.requeue:
            self._kept.append(prompt)
        return self._lost

    def take(self, least_tokens: int | None = None) -> StreamBatch[T] | None:
        """Return the next groups of the step, or None until there are enough.

        least_tokens: Tokens of a streamed batch that is not the step's last; None takes the whole
        step at once. Groups without signal wait for the last streamed batch, which takes as many as
        are needed.
        """
        assert self._indices, "a step has begun"
        chosen = self._choose()
        if len(chosen) < len(self._indices) and not self._is_batch(chosen, least_tokens):
            return None
        for index, item in chosen.items():
            self._started.remove(item)
            self._indices.remove(index)
            if self.window.rounds and not item.has_signal:
                self._free.append(index)
                self._flat.append(item)
            else:
                self._ready[index] = item
        if not self._indices and self._free and self._rounds:
            self._indices, self._free = sorted(self._free), []
            self._rounds -= 1
            self._allowed += len(self._indices)
        is_last, left_out = not self._indices, self._flat[len(self._free) :]
        if is_last:
            self._ready |= zip(sorted(self._free), self._flat, strict=False)
            self._waiting, self._kept = self._waiting + self._kept, []
        elif not self._is_batch({}, least_tokens):
            return None
        indices, ready, self._ready = sorted(self._ready), self._ready, {}
        return StreamBatch(
            [ready[index].group for index in indices],
            indices,
            is_last,
            tuple(item.group for item in left_out) if is_last else (),
        )

    def take_counts(self) -> tuple[int, int]:
        """Return the groups that were dropped because they were too old, and those that were lost,
        since the last call.
        """
        counts, self._dropped, self._lost = (self._dropped, self._lost), 0, 0
        return counts

    @property
    def is_played(self) -> bool:
        """True if all groups that were started are played."""
        return all(item.tokens is not None for item in self._started)

    def state(self) -> list[T]:
        """Return the groups that were started and not trained on, first the oldest prompts."""
        return [*(item.group for item in self._started), *self._waiting, *self._kept]

    def load(self, groups: Sequence[T]) -> None:
        """Continue with the groups of a state."""
        self._waiting = list(groups)

    def _choose(self) -> dict[int, Started[T]]:
        """Return the groups that the step can take now, by index."""
        first = self._started[: len(self._indices)]
        if self.window.order == "oldest":
            first = sorted(filter(_is_played, self._started), key=lambda item: item.version)
            first = first[: len(self._indices)]
            while first and not self._leaves_room(first):
                first.pop()
        return {p: item for p, item in zip(self._indices, first, strict=False) if _is_played(item)}

    def _leaves_room(self, chosen: Sequence[Started[T]]) -> bool:
        """Return True if the step can take `chosen` and still all groups that cannot wait: those
        that are due in one of the next steps beyond the number that these steps train on.
        """
        assert self.version is not None
        # Of the groups that are due in this step or in the `later` steps after it, those steps can
        # take later * per_step, and this step has to take the rest. Groups of `chosen` count, and
        # so do the places that it leaves free, because these wait for groups that still play.
        # Example: weights 5, staleness 1, 2 groups a step. A and B were sampled by weights 4, so
        # they are due now, and B still plays; C is of weights 5. If the step took A and C, B would
        # be too old in the next one. So the step takes A now, and then waits for B.
        wanted = len(self._indices)
        for later in range(self.window.staleness + 1):
            last = self.version - self.window.staleness + later  # newest weights that are due
            due = sum(item.version <= last for item in self._started)
            taken = sum(item.version <= last for item in chosen)
            needed = min(due - later * self.window.per_step, wanted)
            if taken + wanted - len(chosen) < needed:
                return False
        return True

    def _is_batch(self, more: dict[int, Started[T]], least_tokens: int | None) -> bool:
        tokens = sum(item.tokens or 0 for item in [*self._ready.values(), *more.values()])
        return least_tokens is not None and tokens >= least_tokens

    def _drop_old(self, item: Started[T]) -> None:
        assert self.version is not None
        if _is_played(item) and item.version < self.version - self.window.staleness:
            self._replace(item)
            self._dropped += 1

    def _replace(self, item: Started[T]) -> None:
        """Remove a group, and allow another prompt."""
        self._started.remove(item)
        self._allowed += 1


def _is_played(item: Started[T]) -> bool:
    return item.tokens is not None
