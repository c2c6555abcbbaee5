"""A run's state as text for Prometheus, for the textfile collector of its node exporter."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

SERVERS_TEXT = "servers.prom"  # in the run directory
METRICS_TEXT = "metrics.prom"  # in the run directory


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def servers_text(run: str, servers: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the states of servers, as servers.json has them. run: Name of the run."""
    labels = ["run", "url"]
    state = GaugeMetricFamily(
        "megavlm_server_state", "1 for the present state.", labels=[*labels, "state"]
    )
    seconds = GaugeMetricFamily(
        "megavlm_server_state_seconds", "Seconds since the state changed.", labels=labels
    )
    restarts = CounterMetricFamily(
        "megavlm_server_restarts", "Restarts in this run.", labels=labels
    )
    queue = GaugeMetricFamily(
        "megavlm_server_requests",
        "Requests that a healthy server computes or that wait in it.",
        labels=[*labels, "kind"],
    )
    for server in servers:
        names = [run, server["url"]]
        state.add_metric([*names, server["state"]], 1)
        seconds.add_metric(names, server["seconds"])
        restarts.add_metric(names, server["restarts"])
        for kind, number in zip(("running", "waiting"), server["queue"] or (), strict=False):
            queue.add_metric([*names, kind], number)
    return _text([state, seconds, restarts, queue])


def metrics_text(run: str, metrics: Mapping[str, float]) -> bytes:
    """Return the metrics of a step, one sample for each name of metrics.jsonl."""
    family = GaugeMetricFamily(
        "megavlm_metric", "A metric of the last training step.", labels=["run", "name"]
    )
    for name, value in metrics.items():
        family.add_metric([run, name], value)
    return _text([family])


def _text(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)
