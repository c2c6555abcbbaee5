"""Servers of a run, listed and changed from outside: `megavlm servers`."""

import time
from dataclasses import replace
from pathlib import Path

from megavlm.config.load import load
from megavlm.config.rollout import Rollout
from megavlm.inference.server_pool.changes import Change, ask_for, asked_changes, changed_urls
from megavlm.observability.progress import Output
from megavlm.observability.report import CONFIG_FILE
from megavlm.observability.watch import WatchedRun, servers_table


def list_servers(run_dir: Path) -> None:
    """Print the states of a run's servers, and the changes that it has not made yet."""
    rollout, run, output = _rollout_of(run_dir), WatchedRun(run_dir), Output(highlight=False)
    run.read()
    wanted = _urls(run_dir, rollout)
    if run.servers is None:
        output.print(f"{run_dir} has no running servers", *wanted, sep="\n")
        return
    output.print(servers_table(run.servers, time.time()))
    if rollout.takes_changes:
        known = [server["url"] for server in run.servers["servers"]]
        changes = {"added": set(wanted).difference(known), "removed": set(known).difference(wanted)}
        for change, urls in changes.items():
            for url in sorted(urls):
                output.print(f"{url}: to be {change}")


def change_servers(run_dir: Path, url: str, change: Change) -> str:
    """Ask a run to add or remove a server. Returns a sentence for the user.

    Raises ValueError if the run starts its own servers, or if too few would be left.
    """
    url, rollout = url.rstrip("/"), _rollout_of(run_dir)
    if not rollout.takes_changes:
        has, fix = "rollout.mode=managed starts its own servers", "rollout.mode=external"
        if rollout.router is not None:
            has, fix = f"rollout.router={rollout.router} chooses them", "rollout.router=null"
        raise ValueError(
            f"servers cannot join and leave {run_dir}, whose {has}: start it with {fix}"
        )
    urls = _urls(run_dir, rollout)
    if change == "add":
        replace(rollout, urls=(*urls, url)).check()
        told = "is added: it is probed, gets the weights with the next update, and then requests"
    elif url not in urls:
        raise ValueError(f"{url} is not a server of {run_dir}: name one of {', '.join(urls)}")
    elif len(urls) <= rollout.min_servers:
        raise ValueError(
            f"{url} cannot leave, because {len(urls) - 1} servers would be left, but "
            f"rollout.min_servers={rollout.min_servers}: add another server first"
        )
    else:
        told = "is removed: it gets no more requests; stop it when the list no longer has it"
    ask_for(run_dir, url, change)
    return f"{url} {told} (megavlm servers list {run_dir})"


def _urls(run_dir: Path, rollout: Rollout) -> list[str]:
    named = [url.rstrip("/") for url in rollout.urls]
    return changed_urls(named, asked_changes(run_dir))


def _rollout_of(run_dir: Path) -> Rollout:
    if not (path := run_dir / CONFIG_FILE).is_file():
        raise ValueError(f"{run_dir} is not a run directory: it has no {CONFIG_FILE}")
    return load(path).rollout
