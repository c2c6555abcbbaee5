"""Prompts for training, in an order that a checkpoint continues exactly; made ahead by workers."""

import os
import signal
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from megavlm.config.data import Data
from megavlm.data.order import BatchDraws, Draws, Part
from megavlm.data.parcel import Parcel
from megavlm.data.processor import Prompt, PromptTooLong
from megavlm.data.rows import Row, Rows

Kind = Literal["bad", "long"]


@dataclass(frozen=True)
class Skipped:
    """A row that gives no prompt. `reason` names it."""

    kind: Kind
    reason: str


class Prompts:
    """The rows as prompts; what torchdata's loader takes as a map-style data set."""

    def __init__(self, rows: Rows, make: Callable[[Row], Prompt]) -> None:
        self.rows, self._make = rows, make

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt | Skipped:
        try:
            return self._make(self.rows[index])
        except PromptTooLong as error:
            return Skipped("long", str(error))
        except ValueError as error:
            return Skipped("bad", str(error))


class PromptStream:
    """An endless stream of prompts: each data set shuffled anew in each of its epochs.

    What makes the prompts runs here (workers=0) or in worker processes, a batch in each, so that a
    image is decoded and processed once in a batch. The order is the same for any number of them.
    """

    def __init__(
        self,
        rows: Rows,
        make: Callable[[Row], Prompt],
        data: Data,
        *,
        seed: int,
        batch_size: int = 1,
    ) -> None:
        """`data` has the weights of the data sets (see files.expand), the number of workers, and
        how rows are handled that cannot be used or are too long. batch_size: rows that a worker
        prepares together; the order does not depend on it.

        Raises ValueError if there are no rows.
        """
        self._weights = tuple(data.train_weights)
        self._parts = data_sets(rows, self._weights, seed)
        self._prompts = Prompts(rows, make)
        self._seed, self._batch_size, self._workers = seed, batch_size, data.workers
        self._policies: dict[Kind, str] = {"bad": data.bad_samples, "long": data.long_prompts}
        self._fingerprint: str | None = None
        self._loader: Any = None
        self._batches: Iterator[Any] | None = None
        self._go_to(self._draws().state_dict())
        self.skipped: Counter[Kind] = Counter()
        self.reasons: deque[str] = deque(maxlen=20)  # of those last skipped
        self._finalizer = weakref.finalize(self, lambda: None)

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts; an epoch's end is no border.

        Raises ValueError for a row that cannot be used where that is to be refused, and where not
        one of as many rows as there are can be.
        """
        prompts: list[Prompt] = []
        in_vain = 0
        while len(prompts) < n:
            sample = self._next()
            if isinstance(sample, Prompt):
                prompts.append(sample)
                in_vain = 0
                continue
            if self._policies[sample.kind] == "refuse":
                raise ValueError(sample.reason)
            in_vain += 1
            self.skipped[sample.kind] += 1
            self.reasons.append(sample.reason)
            if in_vain >= len(self._prompts):
                raise ValueError(
                    f"data.train_files: none of {in_vain} rows in a row can be used; the last "
                    f"reason: {sample.reason}"
                )
        return prompts

    def measures(self) -> dict[str, float]:
        """By the names of observability/metrics.py."""
        names: tuple[Kind, ...] = ("bad", "long")
        return {f"skipped_{kind}": float(self.skipped[kind]) for kind in names}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: a few numbers, not the order (the seed gives that again)."""
        return {
            **self._place(),
            "seed": self._seed,
            "weights": list(self._weights),
            "fingerprint": self._data(),
            "skipped": dict(self.skipped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, with any number of workers and any batch size; raises
        ValueError for other data, weights or another seed.
        """
        if state["fingerprint"] != self._data():
            raise ValueError(
                "data.train_files: the checkpoint was made with other data, other columns or files "
                "in another order; use its data, or start with run.resume=never"
            )
        for key, mine in (("seed", self._seed), ("weights", list(self._weights))):
            if state[key] != mine:
                name = {"seed": "run.seed", "weights": "data.train_weights"}[key]
                raise ValueError(
                    f"{name}: {mine}, but the checkpoint was made with {state[key]}; use that, or "
                    "start with run.resume=never"
                )
        self.close()
        self._go_to({"drawn": list(state["drawn"])})
        self.skipped = Counter(state["skipped"])

    def close(self) -> None:
        """Ends the workers. The stream starts them again when it is asked for more."""
        self._finalizer()
        self._batches = self._loader = None
        self._go_to(self._place())

    def _go_to(self, place: dict[str, Any]) -> None:
        """`place`: a state of Draws."""
        self._before = self._after = place  # of the batch's first row, and of what follows it
        self._batch: deque[Prompt | Skipped] = deque()
        self._taken = 0  # of the batch

    def _place(self) -> dict[str, Any]:
        """The state of Draws at the next sample."""
        draws = self._draws()
        draws.load_state_dict(self._before)
        for _ in range(self._taken):
            next(draws)
        return draws.state_dict()

    def _data(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = self._prompts.rows.fingerprint()
        return self._fingerprint

    def _draws(self) -> Draws:
        return Draws(self._parts, self._weights or [1.0])

    def _next(self) -> Prompt | Skipped:
        if not self._batch:
            batches = self._open() if self._batches is None else self._batches
            assert self._loader is not None
            received = next(batches)
            self._batch.extend(received.unpack() if isinstance(received, Parcel) else received)
            self._before, self._taken = self._after, 0
            self._after = _sampler_state(self._loader.state_dict())
        self._taken += 1
        return self._batch.popleft()

    def _open(self) -> Iterator[Any]:
        draws = self._draws()
        draws.load_state_dict(self._before)
        workers = self._workers
        with warnings.catch_warnings():
            # torchdata calls a function of torch that does nothing any more.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            self._loader = StatefulDataLoader(
                self._prompts,
                batch_sampler=BatchDraws(draws, self._batch_size),
                num_workers=workers,
                collate_fn=Parcel.pack if workers else list,
                prefetch_factor=1 if workers else None,
                # The seeds of workers, which draw no random numbers: the run's own are left alone.
                generator=torch.Generator(),
                multiprocessing_context="fork" if workers else None,
                worker_init_fn=_start_worker,
            )
        batches: Any = iter(self._loader)
        if workers:
            # Before the interpreter's own end, which would wait for them.
            self._finalizer = weakref.finalize(self, batches._shutdown_workers)
        self._batches = batches
        return batches


def data_sets(rows: Rows, weights: Sequence[float], seed: int) -> list[Part]:
    """One part for each data set of the rows, or one for all of them where there are no weights."""
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
        first = sum(rows.block_rows[: blocks[0]])  # a set's rows are next to each other
        parts.append(Part(first, sizes, [rows.block_bytes[i] for i in blocks], seed))
    return parts


def _sampler_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The batch sampler when the batch was drawn that the loader gave last, out of torchdata's
    state, which is another with workers and without.
    """
    main = state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state
    return main["_sampler_iter_state"]


def _start_worker(_: int) -> None:
    # A signal that asks the run to end is the trainer's to answer, which then ends its workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads did not survive the fork
