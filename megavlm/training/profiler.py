"""Traces of chosen steps, of trainer ranks and rollout servers on one timeline."""

import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from torch.profiler import profile

from megavlm.inference.protocol import bearer
from megavlm.inference.server_pool.pool import ServerPool
from megavlm.inference.server_pool.receivers import Receiver
from megavlm.observability.traces import joined, read_trace, write_trace
from megavlm.parallel.collectives import barrier
from megavlm.training.train_state import TrainState

SERVER_TIMEOUT = 600.0  # seconds; a server answers when it has written its trace


class StepProfiler:
    """Context manager for each step; it profiles the steps of `run.profile`.

    It writes RUN_DIR/profile/step_<step>.json.gz with the ranks of `run.profile_ranks` and all
    servers that answered when the step began. A server that fails costs its part of the timeline.
    """

    def __init__(self, train_state: TrainState, server_pool: ServerPool | None) -> None:
        """Store the parts. server_pool: The rollout servers, on the driver; None without any."""
        self._state, self._server_pool = train_state, server_pool
        self._folder = Path(train_state.config.run.dir, "profile").absolute()

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Profile what runs within, if `step` is one of the chosen. Collective."""
        state = self._state
        run, mesh = state.config.run, state.mesh
        if step not in run.profile:
            yield
            return
        folder = self._folder / f"step_{step}"
        servers: dict[str, Receiver] = {}
        if mesh.is_driver:
            shutil.rmtree(folder, ignore_errors=True)  # of a start that ended within the step
            folder.mkdir(parents=True)
            servers = self._start_servers(folder)
        barrier(mesh)
        if mesh.rank in run.profile_ranks:
            with profile() as trace:
                yield
            path = str(folder / f"rank_{mesh.rank}.json.gz")
            state.progress.attempt("the profile", lambda: trace.export_chrome_trace(path))
        else:
            yield
        if mesh.is_driver:
            self._post("/stop_profile", servers, {name: {} for name in servers})
        barrier(mesh)
        if mesh.is_driver:
            state.progress.attempt("the profile", lambda: self._join(folder, servers))

    def _start_servers(self, folder: Path) -> dict[str, Receiver]:
        """Start the profilers of all servers. Returns the servers that answered, by the names of
        their traces.
        """
        answering = [] if self._server_pool is None else self._server_pool.answering()
        servers = {f"server_{index}": server for index, server in enumerate(answering)}
        bodies = {
            name: {"output_dir": str(folder), "profile_id": name, "with_stack": False}
            for name in servers
        }
        return self._post("/start_profile", servers, bodies)

    def _post(
        self, path: str, servers: Mapping[str, Receiver], bodies: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Receiver]:
        """Post to all servers at once. Returns the ones that answered; the others are named."""

        def post(name: str) -> bool:
            server = servers[name]
            try:
                httpx.post(
                    server.url + path,
                    json=bodies[name],
                    headers=bearer(server.admin_key),
                    timeout=SERVER_TIMEOUT,
                    trust_env=False,
                ).raise_for_status()
            except httpx.HTTPError as error:
                self._state.progress.line(f"{server.url} has no profile of this step: {error!r}")
                return False
            return True

        with ThreadPoolExecutor(max(len(servers), 1)) as pool:
            answered = dict(zip(servers, pool.map(post, servers), strict=True))
        return {name: server for name, server in servers.items() if answered[name]}

    def _join(self, folder: Path, servers: Mapping[str, Receiver]) -> None:
        """Join the traces of a step in one file, in place of them."""
        progress = self._state.progress
        files = {path.name.partition(".")[0]: path for path in sorted(folder.iterdir())}
        for name, server in servers.items():
            if not any(trace.startswith(f"{name}-") for trace in files):
                progress.line(f"{server.url} wrote its profile to {folder} of another machine")
        target = folder.with_name(f"{folder.name}.json.gz")
        write_trace(target, joined({name: read_trace(path) for name, path in files.items()}))
        shutil.rmtree(folder)
        progress.line(f"the profile is in {target}: open it in https://ui.perfetto.dev")
