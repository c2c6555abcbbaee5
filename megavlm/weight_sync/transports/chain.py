"""Transport through a folder or an object store: a base and a chain of changes, from which servers
anywhere bring their weights up to date, also without a push.

Each push adds a link to the chain: a base (every byte that a rank of a server stores) or the
changes since the link before. A server loads the links that it lacks, and the checksums of all its
weights are compared before it serves. It needs no connection to the trainer's ranks.
"""

import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megavlm.config.transports import TRANSPORT_TRAITS
from megavlm.data.tables.files import find_filesystem
from megavlm.inference.errors import TrainerFault
from megavlm.inference.server_main import LOADER
from megavlm.inference.server_support.megavlm_weights import checksum
from megavlm.parallel import platform
from megavlm.weight_sync.schedule import Server, SyncSchedule, make_schedule
from megavlm.weight_sync.server_api import Servers
from megavlm.weight_sync.sglang_layout import ServerLayout
from megavlm.weight_sync.transports.base import Sending
from megavlm.weight_sync.transports.buckets import difference, num_checked
from megavlm.weight_sync.transports.packer import LastSent, Packer
from megavlm.weight_sync.transports.payload import payload
from megavlm.weight_sync.transports.server_requests import UPDATE, content_of
from megavlm.weight_sync.transports.store import Fault, Rendezvous
from megavlm.weight_sync.update import SendReport, SyncAttempt

MOST_LINKS = 16  # after a base, a joining server loads at most so many links of changes
OWNER, ANSWERS = "owner.json", "answers"
_WRITTEN = re.compile(rf"[0-9a-f]{{16}}|{ANSWERS}|{re.escape(OWNER)}")  # names in a store
POLL = 0.05  # seconds


@dataclass
class Chain:
    """Links of a chain, on rank 0. sums: Checksums of the last link's weights, by stream. bytes:
    Bytes of the base, and of all changes since.
    """

    schedule: SyncSchedule
    links: list[str] = field(default_factory=list)
    sums: dict[int, Any] = field(default_factory=dict)
    bytes: list[int] = field(default_factory=list)
    version: str = ""

    @property
    def is_full(self) -> bool:
        return len(self.links) > MOST_LINKS or sum(self.bytes[1:]) > self.bytes[0]


class ChainTransport:
    """Writes the links of this run to `store`, a path or a URL that fsspec opens.

    run: Run directory of the store's owner. timeout: Seconds in which a server must load a file.
    """

    traits = TRANSPORT_TRAITS["store"]

    def __init__(self, store: str, run: str, *, timeout: float) -> None:
        self._url, self._run, self._timeout = store, run, timeout
        self._fs, self._root = find_filesystem(store)
        self._last = LastSent()
        self._schedules: dict[object, SyncSchedule] = {}
        self._chain: Chain | None = None  # on rank 0; None if the next link must be a base
        # Names of links in the store: of the chain before the last base, and since then, with
        # those of attempts that failed.
        self._old: list[str] = []
        self._current: list[str] = []
        self._owns = False
        self._base: str | None = None  # of the attempt
        self._before: Chain | None = None  # on rank 0; the chain before the attempt

    def prepare(self, servers: Servers, attempt: SyncAttempt) -> Rendezvous:
        self._own()
        chain, self._chain = self._chain, None  # until this attempt has written its link
        self._before = chain
        base = None if chain is None or chain.is_full else chain.links[-1]
        link = secrets.token_hex(8)
        self._current.append(link)
        return Rendezvous("", 0, link, "", base)

    def send(self, sending: Sending) -> SendReport:
        """Write this rank's buckets."""
        rendezvous, rank = sending.attempt.rendezvous, dist.get_rank()
        schedule = self._schedule(sending)
        self._base = self._last.begin(schedule, rendezvous)
        packer = Packer(sending.shards, sending.settings.dtype, self._last, self._base)
        files: dict[int, list[Any]] = {}
        mine = {i: stream for i, stream in enumerate(schedule.streams) if stream.sender == rank}
        error = None
        try:
            with torch.no_grad():
                for number in range(schedule.rounds):
                    for index, stream in mine.items():
                        device = platform.device()
                        buffer = torch.empty(stream.room, dtype=torch.uint8, device=device)
                        bucket = stream.buckets[number]
                        part, changes = packer.pack(index, number, bucket, buffer)
                        content = part.cpu()
                        name = f"{rendezvous.attempt}/{index}.{number}"
                        self._write(name, content.numpy().tobytes())
                        words = checksum(content).tolist()
                        files.setdefault(index, []).append((name, len(content), words, changes))
                    packer.next_round()
        except (Fault, TrainerFault) as fault:
            error = str(fault)
        packed = packer.result()
        return SendReport(
            sum(packed.bytes.values()),
            schedule.tensors if rank == 0 else 0,
            {index: (packed.sums[index], files[index]) for index in mine} if error is None else {},
            {},
            error,
            is_own_fault=error is not None,
            changed=packed.changed,
            compared=packed.compared,
        )

    def complete(self, sending: Sending, reports: Sequence[SendReport]) -> int:
        attempt, servers = sending.attempt, sending.servers
        assert servers is not None
        schedule, link = self._schedule(sending), attempt.rendezvous.attempt
        sent = {index: part for report in reports for index, part in report.sums.items()}
        for number in range(len(schedule.targets)):
            streams = [i for i, x in enumerate(schedule.streams) if x.target == number]
            manifest = {
                "version": attempt.version,
                "parent": self._base,
                "files": [sent[index][1] for index in streams],
            }
            self._write(f"{link}/{number}.json", json.dumps(manifest).encode())
        size, before = sum(report.bytes for report in reports), self._before
        if self._base is None or before is None:
            self._remove(self._old)
            self._old, self._current = self._current[:-1], [link]
            before = Chain(schedule)
        sums = {index: part[0] for index, part in sent.items()}
        links, sizes = [*before.links, link], [*before.bytes, size]
        chain = Chain(schedule, links, sums, sizes, attempt.version)
        flush = sending.settings.pause_mode == "retract"
        layouts = {url: attempt.layouts[url] for url in attempt.loading}
        count, faults = self._load(servers, chain, layouts, flush=flush)
        self._chain = None if faults else chain  # the files may be damaged
        for url, fault in faults.items():
            servers.lose(url, fault)
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the chain."""
        return 0 if self._chain is None else sum(self._chain.bytes)

    def catch_up(self, servers: Servers, url: str, layout: ServerLayout) -> str | None:
        """Bring a server up to date from the chain, on rank 0 and from any thread. Returns the
        version that it has then, None if the chain has nothing for servers of its layout. A server
        that fails is marked as lost.
        """
        chain = self._chain
        if chain is None or layout not in [target.layout for target in chain.schedule.targets]:
            return None
        _, faults = self._load(servers, chain, {url: layout}, flush=False)
        if faults:
            if self._chain is chain:
                self._chain = None
            servers.lose(url, faults[url])
        return chain.version

    def close(self) -> None:
        """Remove what this run wrote, on rank 0."""
        if self._owns:
            self._remove([*self._old, *self._current, ANSWERS, OWNER])

    def _load(
        self,
        servers: Servers,
        chain: Chain,
        layouts: Mapping[str, ServerLayout],
        *,
        flush: bool,
    ) -> tuple[int, dict[str, str]]:
        """Have servers load what they lack, and compare their checksums. Returns the number of
        parameters that were compared, and the faults of servers by URL.
        """
        call, bodies = secrets.token_hex(8), {}
        answers = {
            (url, rank): f"{ANSWERS}/{call}-{place}-{rank}"
            for place, (url, layout) in enumerate(layouts.items())
            for rank in range(layout.tensor_parallel)
        }
        for url, layout in layouts.items():
            tasks = []
            for rank in range(layout.tensor_parallel):
                target = chain.schedule.target(name_of(layout), rank)
                digest, content = content_of(chain.schedule, target)
                tasks.append(
                    {
                        "folder": self._url,
                        "links": chain.links,
                        "target": target,
                        "answer": answers[url, rank],
                        "plan": digest,
                        "content": content,
                    }
                )
            bodies[url] = {
                "serialized_named_tensors": [
                    payload([(json.dumps(task), torch.empty(0))]) for task in tasks
                ],
                "load_format": LOADER,
                "weight_version": chain.version,
                "flush_cache": flush,
            }
        limit = self._timeout * (1 + chain.schedule.rounds * len(chain.links))
        servers.request_each(UPDATE, bodies, timeout=limit)
        count, faults = 0, dict[str, str]()
        for (url, rank), name in answers.items():
            if url in servers.lost or url in faults:
                continue
            answer = self._answer(name)
            if "error" in answer:
                faults[url] = f"{url} did not load weights on its rank {rank}: {answer['error']}"
                continue
            streams = chain.schedule.to(name_of(layouts[url]), rank)
            if where := difference(chain.schedule, streams, chain.sums, answer["sums"]):
                servers.mismatched.add(url)
                faults[url] = f"{url}: checksum mismatch on rank {rank} in {where}"
            count += num_checked(chain.schedule, streams)
        return count, faults

    def _answer(self, name: str) -> Any:
        """Take the answer of a server's rank. SGLang may answer before its last rank does."""
        deadline, path = time.monotonic() + self._timeout, f"{self._root}/{name}"
        while True:
            try:
                self._fs.invalidate_cache()
                answer = json.loads(self._fs.cat_file(path))
                self._fs.rm_file(path)
                return answer
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    return {"error": f"it did not write {name} to {self._url}"}
            except (OSError, ValueError) as error:
                return {"error": f"its answer cannot be read: {error!r}"}
            time.sleep(POLL)

    def _own(self) -> None:
        """Take the store for this run, and see before each push that it still has it. Raises
        TrainerFault if another run has it, or if it holds files that no run wrote, because the
        links of an earlier start are removed.
        """
        owner, path = {"run": self._run}, f"{self._root}/{OWNER}"
        try:
            self._fs.invalidate_cache()
            if not self._owns:
                paths = self._fs.ls(self._root, detail=False) if self._fs.exists(self._root) else []
                held = [path.rstrip("/").rpartition("/")[2] for path in paths]
                foreign = [name for name in held if not _WRITTEN.fullmatch(name)]
                if foreign:
                    raise TrainerFault(
                        f"rollout.store={self._url} holds {foreign[0]}, but a store has only what "
                        "a run writes: choose another folder"
                    )
            if not self._fs.exists(path):
                self._fs.makedirs(self._root, exist_ok=True)
                with suppress(FileExistsError), self._fs.open(path, "xb") as file:
                    file.write(json.dumps(owner).encode())  # of two runs, one creates it
            found = json.loads(self._fs.cat_file(path) or "{}")  # empty while another creates it
            if found != owner:
                self._owns = False  # what is there now is not to be removed at the end
                name = found.get("run", "another folder")
                raise TrainerFault(
                    f"rollout.store={self._url} is used by the run in {name}: "
                    f"choose another, or remove its {OWNER} if that run has ended"
                )
            if not self._owns:
                # What its ranks sent is not known any more.
                self._remove([name for name in held if name != OWNER])
        except (OSError, ValueError) as error:
            raise TrainerFault(f"rollout.store={self._url} cannot be used: {error}") from error
        self._owns = True

    def _write(self, name: str, content: bytes) -> None:
        try:
            path = f"{self._root}/{name}"
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, content)
        except OSError as error:
            raise TrainerFault(
                f"{name} cannot be written to rollout.store={self._url}: {error}"
            ) from error

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self._fs.rm(f"{self._root}/{name}", recursive=True)
            except OSError:
                pass  # it was not written, or the store is away

    def _schedule(self, sending: Sending) -> SyncSchedule:
        layouts = dict.fromkeys(sending.attempt.layouts.values())
        servers = sorted((Server(name_of(x), x, full=True) for x in layouts), key=lambda x: x.url)
        key, settings = tuple(servers), sending.settings
        if key not in self._schedules:
            self._schedules = {
                key: make_schedule(sending.plan, servers, settings.dtype, settings.bucket_bytes)
            }
        return self._schedules[key]


def name_of(layout: ServerLayout) -> str:
    """Return a name of a layout, as which the schedule knows all servers that have it."""
    return hashlib.sha256(repr(layout).encode()).hexdigest()[:8]


def store_url(run_dir: str, store: str | None) -> str:
    """Return the URL of a run's store."""
    return str(Path(run_dir, "store").resolve()) if store is None else store.rstrip("/")
