"""Exports loaders' statistics through OpenTelemetry's metrics: observable instruments.

An instrument's callback reads the loaders when the SDK's reader collects; between collections it costs nothing. The
names are those of `loader.metrics()` with dots (``asyncloader.data.batches``), so that a collector which passes them on
to Prometheus gives them the names of `asyncloader.integrations.prometheus`. Attributes are the same labels.

OpenTelemetry has no observable histograms and summaries. The stages are two counters, ``asyncloader.stage.time`` and
``asyncloader.stage.batches``, and a gauge, ``asyncloader.stage.quantile``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic

try:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter_provider
except ImportError as error:
    raise ImportError(f"the instruments need opentelemetry ({error}): pip install opentelemetry-api") from None

from asyncloader.base.version import __version__
from asyncloader.integrations.exported import ExportedLoaders, Loader
from asyncloader.telemetry.metrics import Metric, definitions

__all__ = ["instrument"]

_SAME_S = 0.1
"""Callbacks that follow each other within this time belong to one collection, and share the figures."""
_UNITS = {"s": "s", "bytes": "By"}
_STAGES = "asyncloader_stage_seconds"

_Read = Callable[[CallbackOptions], Iterable[Observation]]


def instrument(meter_provider: MeterProvider | None = None, /, **loaders: Loader) -> ExportedLoaders:
    """Make observable instruments for the metrics of loaders. To be called once in a process.

    Args:
        meter_provider: to make them with. Default: the global one.
        loaders: by name, the value of the attribute ``loader``. They are held weakly: one that is freed is no longer
            exported.

    Returns:
        An object whose ``add(name, loader)`` exports another loader.

    Raises:
        TypeError: a loader is not one of asyncloader.
    """
    exported = ExportedLoaders(loaders)
    meter = (get_meter_provider() if meter_provider is None else meter_provider).get_meter("asyncloader", __version__)
    newest = _Newest(exported)
    for metric in definitions():
        name = "asyncloader." + metric.name.removeprefix("asyncloader_").removesuffix("_seconds").replace("_", ".", 1)
        unit = _UNITS.get(metric.unit, f"{{{metric.unit}}}")
        if metric.type == "counter":
            read = partial(_observe, newest, f"{metric.name}_total")
            meter.create_observable_counter(name, [read], unit, metric.help)
        elif metric.type == "gauge":
            read = partial(_observe, newest, metric.name)
            meter.create_observable_gauge(name, [read], unit, metric.help)
    of_stages = partial(partial, _observe, newest)
    meter.create_observable_counter(
        "asyncloader.stage.time", [of_stages(f"{_STAGES}_sum")], "s", "seconds that batches spent in a stage"
    )
    meter.create_observable_counter(
        "asyncloader.stage.batches", [of_stages(f"{_STAGES}_count")], "{batches}", "batches that passed a stage"
    )
    meter.create_observable_gauge(
        "asyncloader.stage.quantile", [of_stages(_STAGES)], "s", "quantiles of the seconds of a batch in a stage"
    )
    return exported


class _Newest:
    """The observations that are being collected, by the names of their samples."""

    def __init__(self, exported: ExportedLoaders) -> None:
        self._exported = exported
        self._lock = threading.Lock()  # several readers of a provider collect in threads of their own
        self._read_at = float("-inf")
        self._observations: dict[str, list[Observation]] = {}

    def get(self, sample_name: str) -> Sequence[Observation]:
        with self._lock:
            now = monotonic()
            if now - self._read_at > _SAME_S:
                # In one pass: a fleet's stages are hundreds of samples, which several instruments share.
                self._observations = _by_name(self._exported.metrics().values())
                self._read_at = now
            return self._observations.get(sample_name, ())


def _by_name(metrics: Iterable[Metric]) -> dict[str, list[Observation]]:
    found: dict[str, list[Observation]] = {}
    for metric in metrics:
        for each in metric.samples:
            # The labels as they are: the SDK copies them.
            found.setdefault(each.name, []).append(Observation(each.value, each.labels))
    return found


def _observe(newest: _Newest, sample_name: str, _: CallbackOptions) -> Sequence[Observation]:
    return newest.get(sample_name)
