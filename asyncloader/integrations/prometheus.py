"""Exports loaders' statistics to Prometheus: a collector for `prometheus_client`, and a dashboard for Grafana.

The collector reads the loaders when it is scraped, in the thread that serves the scrape; between scrapes it costs
nothing. The metrics are those of `loader.metrics()`, with the labels ``loader`` and ``rank``, and ``worker``, ``stage``
or ``node`` where there are several. URLs and numbers of samples are never labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

try:
    from prometheus_client import Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(f"the collector needs prometheus_client ({error}): pip install prometheus-client") from None

from asyncloader.integrations.exported import ExportedLoaders, Loader

__all__ = ["LoaderCollector", "dashboard"]


class LoaderCollector(Collector):
    """A collector of loaders' metrics: ``REGISTRY.register(LoaderCollector(train=loader))``.

    A process needs one collector, for all of its loaders. The loaders are held weakly: one that is freed is no longer
    exported.

    Args:
        loaders: by name, the value of the label ``loader``. The label ``rank`` is the loader's own rank.

    Raises:
        TypeError: a loader is not one of asyncloader.
    """

    def __init__(self, **loaders: Loader) -> None:
        self._exported = ExportedLoaders(loaders)

    def add(self, name: str, loader: Loader) -> None:
        """Export a loader from now on, in place of an earlier loader of this name. Any thread.

        Raises:
            TypeError: it is no loader of asyncloader.
        """
        self._exported.add(name, loader)

    def describe(self) -> list[Metric]:
        """Return nothing: a registry need not read the loaders when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all loaders. `prometheus_client` calls this."""
        for metric in self._exported.metrics().values():
            family = Metric(metric.name, metric.help, metric.type)
            for sample in metric.samples:
                family.add_sample(sample.name, dict(sample.labels), sample.value)
            yield family


def dashboard() -> str:
    """Return a dashboard for these metrics as JSON, to be imported into Grafana."""
    return Path(__file__).with_name("grafana.json").read_text()
