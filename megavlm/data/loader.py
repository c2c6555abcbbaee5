"""Stream of training prompts, prepared ahead by workers; a checkpoint can resume its order."""

import os
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from megavlm.config.data import Data
from megavlm.config.rollout import Rollout
from megavlm.data.processor import Prompt, PromptTooLong
from megavlm.data.rows import Row, Rows
from megavlm.data.shared_pickle import SharedPickle
from megavlm.data.tables.row_order import BatchSampler, DataSetOrder, RowSampler
from megavlm.process import leave_to_parent

Kind = Literal["bad", "long"]
# What a prompt's images hold: their pixels, the text of a request to a server, or nothing.
Held = Literal["pixels", "requests", "nothing"]


@dataclass(frozen=True)
class SkippedRow:
    """A row that cannot be used. `reason` names the row and the error."""

    kind: Kind
    reason: str


class Prompts:
    """Map-style data set for torchdata's loader, which converts rows to prompts."""

    def __init__(self, rows: Rows, make: Callable[[Row], Prompt], held: Held) -> None:
        self.rows, self._make, self._held = rows, make, held

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt | SkippedRow:
        try:
            return holding(self._make(self.rows[index]), self._held)
        except PromptTooLong as error:
            return SkippedRow("long", str(error))
        except ValueError as error:
            return SkippedRow("bad", str(error))


class PromptStream:
    """Endless stream of prompts. Each data set is reshuffled in each of its epochs.

    Prompts are prepared in this process (workers=0) or in worker processes. A worker prepares a
    whole batch, so that an image is processed once per batch. The order does not depend on the
    number of workers.
    """

    def __init__(
        self,
        rows: Rows,
        make: Callable[[Row], Prompt],
        data: Data,
        *,
        seed: int,
        batch_size: int = 1,
        held: Held = "pixels",
    ) -> None:
        """Stream `rows` as prompts that `make` prepares.

        data: Gives the weights of the data sets (see files.expand), the number of workers, and the
            handling of rows that cannot be used or are too long.
        batch_size: Number of rows that a worker prepares together; the order does not depend on it.
        held: Form in which the prompts' images hold their pixels (see `holding`).

        Raises ValueError if there are no rows.
        """
        self._weights = tuple(data.train_weights)
        self._parts = data_sets(rows, self._weights, seed)
        self._prompts = Prompts(rows, make, held)
        self._seed, self._batch_size, self._workers = seed, batch_size, data.workers
        self._policies: dict[Kind, str] = {"bad": data.bad_samples, "long": data.long_prompts}
        self._fingerprint: str | None = None
        self._loader: Any = None
        self._batches: Iterator[Any] | None = None
        self._go_to(self._draws().state_dict())
        self.skipped: Counter[Kind] = Counter()
        self.reasons: deque[str] = deque(maxlen=20)  # why the last rows were skipped
        self._finalizer = weakref.finalize(self, lambda: None)

    def take(self, n: int) -> list[Prompt]:
        """Return the next n prompts, across the ends of epochs.

        Raises ValueError for a row that cannot be used, unless such rows are skipped, and if as
        many rows in a row were skipped as the data has.
        """
        prompts: list[Prompt] = []
        unusable = 0
        while len(prompts) < n:
            sample = self._next()
            if isinstance(sample, Prompt):
                prompts.append(sample)
                unusable = 0
                continue
            if self._policies[sample.kind] == "refuse":
                raise ValueError(sample.reason)
            unusable += 1
            self.skipped[sample.kind] += 1
            self.reasons.append(sample.reason)
            if unusable >= len(self._prompts):
                raise ValueError(
                    f"data.train_files: none of {unusable} rows in a row can be used; the last "
                    f"reason: {sample.reason}"
                )
        return prompts

    @property
    def measures(self) -> dict[str, float]:
        """Numbers of skipped rows under their names in observability/metrics.py."""
        names: tuple[Kind, ...] = ("bad", "long")
        return {f"skipped_{kind}": float(self.skipped[kind]) for kind in names}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: a few numbers, since the seed determines the order."""
        return {
            **self._place(),
            "seed": self._seed,
            "weights": list(self._weights),
            "fingerprint": self._data(),
            "skipped": dict(self.skipped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, with any number of workers and any batch size.

        Raises ValueError if the data, the weights or the seed differ from the state's.
        """
        check_state(state, self._data(), self._seed, self._weights)
        self.close()
        self._go_to({"drawn": list(state["drawn"])})
        self.skipped = Counter(state["skipped"])

    def close(self) -> None:
        """Stop the workers. The next `take` starts new ones."""
        self._finalizer()
        self._batches = self._loader = None
        self._go_to(self._place())

    def _go_to(self, place: dict[str, Any]) -> None:
        """Continue at the given state of RowSampler."""
        self._before = self._after = place  # states at the batch's first row, and after its last
        self._batch: deque[Prompt | SkippedRow] = deque()
        self._taken = 0  # samples taken from the batch

    def _place(self) -> dict[str, Any]:
        """Return the state of RowSampler at the next sample."""
        draws = self._draws()
        draws.load_state_dict(self._before)
        for _ in range(self._taken):
            next(draws)
        return draws.state_dict()

    def _data(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = self._prompts.rows.fingerprint()
        return self._fingerprint

    def _draws(self) -> RowSampler:
        return RowSampler(self._parts, self._weights or [1.0])

    def _next(self) -> Prompt | SkippedRow:
        if not self._batch:
            batches = self._open() if self._batches is None else self._batches
            assert self._loader is not None
            received = next(batches)
            # Copies, because the prompts of a batch do not end together.
            is_shared = isinstance(received, SharedPickle)
            self._batch.extend(received.unpack(copy=True) if is_shared else received)
            self._before, self._taken = self._after, 0
            self._after = _sampler_state(self._loader.state_dict())
        self._taken += 1
        return self._batch.popleft()

    def _open(self) -> Iterator[Any]:
        draws = self._draws()
        draws.load_state_dict(self._before)
        workers = self._workers
        with warnings.catch_warnings():
            # torchdata calls a deprecated function of torch that has no effect.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            self._loader = StatefulDataLoader(
                self._prompts,
                batch_sampler=BatchSampler(draws, self._batch_size),
                num_workers=workers,
                collate_fn=SharedPickle.of if workers else list,
                prefetch_factor=1 if workers else None,
                # The loader draws seeds for its workers, although they use no random numbers. A
                # generator of its own leaves the run's random state unchanged.
                generator=torch.Generator(),
                multiprocessing_context="fork" if workers else None,
                worker_init_fn=_start_worker,
            )
        batches: Any = iter(self._loader)
        if workers:
            # Finalizers run before the interpreter exits; the exit would wait for the workers.
            self._finalizer = weakref.finalize(self, batches._shutdown_workers)
        self._batches = batches
        return batches


def check_state(
    state: Mapping[str, Any], fingerprint: str, seed: int, weights: Sequence[float]
) -> None:
    """Raise ValueError if a run cannot continue from the state of a stream, because its data, its
    seed or the weights of its data sets differ. fingerprint: Result of `Rows.fingerprint`.
    """
    if state["fingerprint"] != fingerprint:
        raise ValueError(
            "data.train_files: the checkpoint was made with other data, other columns or files "
            "in another order; use its data, or start with run.resume=never"
        )
    for key, name, mine in (
        ("seed", "run.seed", seed),
        ("weights", "data.train_weights", list(weights)),
    ):
        if state[key] != mine:
            raise ValueError(
                f"{name}: {mine}, but the checkpoint was made with {state[key]}; use that, or "
                "start with run.resume=never"
            )


def held_for(rollout: Rollout) -> Held:
    """Return the image form that the rollout mode needs: raw pixels for managed servers, which read
    them from the run's memory, and encoded requests for other servers.
    """
    return "pixels" if rollout.mode == "managed" else "requests"


def holding(prompt: Prompt, held: Held) -> Prompt:
    """Return a prompt whose images hold their pixels, the text of a request instead ("requests"),
    or neither ("nothing").

    With "nothing" the ranks read the pixels from the data files again. Images that were fetched
    from the network keep their pixels, so that they are not fetched again.
    """
    if held == "pixels" or (held == "nothing" and prompt.row.is_fetched):
        return prompt
    if held == "nothing":
        return replace(prompt, images=tuple(image.for_plan for image in prompt.images))
    kept = (x.medium != "image" or x.format.sends_frames for x in prompt.images)
    images = (x if keeps else x.for_request for x, keeps in zip(prompt.images, kept, strict=True))
    return replace(prompt, images=tuple(images))


def data_sets(rows: Rows, weights: Sequence[float], seed: int) -> list[DataSetOrder]:
    """Return the order of each data set of `rows`, or one for all rows if there are no weights.

    Raises ValueError for a data set without rows.
    """
    entries = [file.entry if weights else 0 for file in rows.files]
    sets = sorted(set(entries)) or [0]
    assert not weights or len(sets) == len(weights), "one weight for each data set"
    parts = []
    for entry in sets:
        blocks = [i for i, (file, _) in enumerate(rows.blocks) if entries[file] == entry]
        sizes = [rows.block_rows[i] for i in blocks]
        if not sum(sizes):
            named = f" in entry {entry}" if weights else ""
            raise ValueError(f"data.train_files: there are no rows to train on{named}")
        first = sum(rows.block_rows[: blocks[0]])  # the rows of a data set are consecutive
        parts.append(DataSetOrder(first, sizes, [rows.block_bytes[i] for i in blocks], seed))
    return parts


def _sampler_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch sampler's state after the last batch that the loader returned. It is read
    from torchdata's state, whose layout differs with and without workers.
    """
    main = state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state
    return main["_sampler_iter_state"]


def _start_worker(_: int) -> None:
    leave_to_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizer's threads do not survive a fork
