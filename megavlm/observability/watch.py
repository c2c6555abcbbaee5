"""`megavlm watch`: a live view of a run in the terminal.

It only reads the files of the run directory, so it works on any machine that sees them.
"""

import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from yaml import YAMLError

from megavlm.observability.console import metric_rows
from megavlm.observability.metrics import EVALUATIONS_FILE, METRICS_FILE, evaluation_scalars
from megavlm.observability.progress import Output
from megavlm.observability.records import SERVERS_FILE, Record
from megavlm.observability.report import CONFIG_FILE
from megavlm.observability.result import RESULT_FILE
from megavlm.observability.samples import SAMPLES_FILE, SAMPLES_FOLDER
from megavlm.observability.terminal_chart import terminal_chart
from megavlm.observability.text import duration, number, percent, shorten, visible

RECENT = 20  # number of last steps from which means and the time left are computed
SAMPLES, RESPONSES, LINE = 2, 3, 100  # groups, responses of each, characters of a line
OLD = 30.0  # seconds after which the servers' states are shown as old
QUIET = 10.0  # the view warns if there is no record for this many mean step times


class Tail:
    """Reader of a JSON-lines file that grows. Each record is read once, when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0
        self.is_new = False  # the last `read` began at the start of a file

    def read(self) -> list[Record]:
        """Return the records added since the last call, or all records if the file was replaced."""
        try:
            with self._path.open("rb") as file:
                # A process that resumes the run replaces the file, which changes the inode.
                inode, size = self._path.stat().st_ino, file.seek(0, 2)
                self.is_new = inode != self._inode or size < self._offset
                self._inode, self._offset = inode, 0 if self.is_new else self._offset
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        *lines, rest = content.split(b"\n")
        self._offset += len(content) - len(rest)
        records = []
        for line in lines:
            with suppress(ValueError):  # torn by a kill
                records.append(json.loads(line))
        return records


class WatchedRun:
    """Progress, metrics and samples of a run, as far as they are in its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tails = [
            Tail(folder / name)
            for name in (METRICS_FILE, EVALUATIONS_FILE, f"{SAMPLES_FOLDER}/{SAMPLES_FILE}")
        ]
        self.curve: list[tuple[int, float]] = []  # reward, or loss
        self.curve_name = "Reward"
        self.recent: deque[Record] = deque(maxlen=RECENT)
        self.evaluations: list[Record] = []
        self.samples: deque[Record] = deque(maxlen=SAMPLES)
        self.num_steps: int | None = None
        self.is_finished = False
        self.servers: Record | None = None

    def read(self) -> None:
        """Read the records that were written since the last call."""
        metrics, evaluations, samples = (tail.read() for tail in self._tails)
        if self._tails[0].is_new:  # another process resumed the run, or started it anew
            self.curve.clear()
            self.recent.clear()
        if self._tails[1].is_new:
            self.evaluations.clear()
        for record in metrics:
            name = "loss" if record.get("reward") is None else "reward"
            self.curve_name = name.capitalize()
            if record.get(name) is not None:
                self.curve.append((record["step"], record[name]))
        self.recent += metrics
        self.evaluations += evaluations
        self.samples += samples
        self.is_finished = (self.folder / RESULT_FILE).exists()
        self.servers = None
        with suppress(FileNotFoundError):  # a run without servers, or one that has ended
            self.servers = json.loads((self.folder / SERVERS_FILE).read_bytes())
        with suppress(OSError, YAMLError, OmegaConfBaseException):  # not there yet
            config = OmegaConf.load(self.folder / CONFIG_FILE)
            self.num_steps = OmegaConf.select(config, "algorithm.steps")

    @property
    def step(self) -> int:
        return self.recent[-1]["step"] if self.recent else 0

    @property
    def seconds_per_step(self) -> float | None:
        """Mean time from step to step, with evaluations and checkpoints between them."""
        if len(self.recent) < 2:
            return None
        first, last = self.recent[0], self.recent[-1]
        return float(last["time"] - first["time"]) / (len(self.recent) - 1)

    def mean(self, name: str) -> float | None:
        values = [r[name] for r in self.recent if r.get(name) is not None]
        return sum(values) / len(values) if values else None


def view(run: WatchedRun, now: float) -> RenderableType:
    """Return the terminal's view of a run. now: Unix seconds."""
    parts: list[RenderableType] = [Text(_head(run, now), style="bold")]
    if len(run.curve) > 1:
        parts.append(Text("\n" + terminal_chart(run.curve, run.curve_name), no_wrap=True))
    if run.recent:
        columns = Table.grid(padding=(0, 4))
        columns.add_row(_metrics(run), _phases(run))
        parts += [Text(), columns]
    if run.servers is not None:
        parts += [Text(), servers_table(run.servers, now)]
    if run.evaluations:
        parts.append(Text("\n" + _evaluation(run.evaluations[-1])))
    parts += [Text("\n" + _sample(group), no_wrap=True) for group in run.samples]
    return Group(*parts)


def _head(run: WatchedRun, now: float) -> str:
    parts = [f"{run.folder.resolve().name}: step {run.step}"]
    if run.num_steps is not None:
        parts[0] += f" of {run.num_steps}"
    each = run.seconds_per_step
    since = now - run.recent[-1]["time"] if run.recent else 0.0
    if run.is_finished:
        parts.append("finished")
    elif run.recent:
        if run.num_steps is not None and each is not None:
            parts.append(f"about {duration(each * max(run.num_steps - run.step, 0))} left")
        parts.append(f"last step {duration(max(since, 0.0))} ago")
        if each is not None and since > max(QUIET * each, 60.0):
            parts.append("no step for long: stopped, evaluating, or hanging")
    return ", ".join(parts)


def _table(head: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in head:
        table.add_column(name, justify="left" if name == head[0] else "right", no_wrap=True)
    return table


def _metrics(run: WatchedRun) -> Table:
    table, last = _table(["metric", "last", f"mean of {len(run.recent)}"]), run.recent[-1]
    means = {name: run.mean(name) for name in last}
    known = {name: value for name, value in means.items() if value is not None}
    for label, name, form in metric_rows(known):
        value = last[name]
        table.add_row(label, "-" if value is None else form(value), form(known[name]))
    return table


def _phases(run: WatchedRun) -> Table:
    table = _table(["phase", f"mean of {len(run.recent)}", "share"])
    names = [name for name in run.recent[-1] if name.startswith("seconds/")]
    means = {name.removeprefix("seconds/"): run.mean(name) or 0.0 for name in names}
    total = means.pop("total", 0.0)
    for phase, value in sorted(means.items(), key=lambda item: -item[1]):
        share = percent(value / total if total else None, 0)
        table.add_row(phase.replace("_", " "), duration(value), share)
    table.add_row("all", duration(total), "")
    return table


def servers_table(status: Record, now: float) -> RenderableType:
    """Return the states of a run's servers, as servers.json has them. now: Unix seconds."""
    table = _table(["server", "state", "for", "weights", "running", "waiting", "restarts"])
    notes = []
    for server in status["servers"]:
        running, waiting = server["queue"] or ("-", "-")
        table.add_row(
            server["url"],
            server["state"],
            duration(server["seconds"]),
            server["version"] or "-",
            str(running),
            str(waiting),
            str(server["restarts"]),
        )
        if server["state"] != "healthy" and server["reason"]:
            notes.append(Text(f"{server['url']}: {_line(server['reason'])}", no_wrap=True))
    age = now - status["time"]
    if age > OLD:
        notes.append(Text(f"the states of the servers are {duration(age)} old"))
    return Group(table, *notes)


def _evaluation(record: Record) -> str:
    scalars = evaluation_scalars(record)
    measures = ("greedy", "sampled", "shuffled", "blind")
    shown = {name: scalars.get(f"evaluation/{name}") for name in measures}
    values = ", ".join(f"{name} {percent(x)}" for name, x in shown.items() if x is not None)
    return f"Evaluation after {record['step']} steps: {values}"


def _sample(group: Record) -> str:
    lines = [f"Step {group['step']}: {_line(group['prompt'])}  (answer {_line(group['answer'])})"]
    for response in islice(group["responses"], RESPONSES):
        lines.append(f"{number(response['reward']):>7}  {_line(response['text'])}")
    return "\n".join(lines)


def _line(text: str) -> str:
    """Return the first non-empty line of a text, cut to the width."""
    lines = (line for line in text.splitlines() if line.strip())
    return shorten(visible(next(lines, "").strip()), LINE)


def watch(folder: Path, *, once: bool, every: float) -> None:
    """Show a run until it is finished or the user ends it; once if the output is not a terminal."""
    run, output = WatchedRun(folder), Output(highlight=False)
    run.read()
    if once or not output.is_terminal:
        output.print(view(run, time.time()))
        return
    with suppress(KeyboardInterrupt), Live(console=output, auto_refresh=False) as live:
        while True:
            live.update(view(run, time.time()), refresh=True)
            if run.is_finished:
                return
            time.sleep(every)
            run.read()
