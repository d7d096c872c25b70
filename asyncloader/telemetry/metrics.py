"""Describes a loader's statistics for monitoring systems: type, unit, help and labels of each figure.

`metrics` gives an exporter's input, by Prometheus' model and its naming rules; nothing is served or imported here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from asyncloader.telemetry.counters import STAGES, number_below, stage_times
from asyncloader.telemetry.figures import FIGURES, NODE_FIGURES, Figure

_WAIT_OCTAVES = range(6, 27, 2)
"""Upper bounds of the histogram's buckets, as powers of two of a microsecond: 64 us to a minute."""


class MetricSample(NamedTuple):
    """One value of a metric; `name` has the suffixes that Prometheus' text format wants."""

    name: str
    labels: Mapping[str, str]
    value: float


class Metric(NamedTuple):
    """One metric with all of its values."""

    name: str
    type: Literal["counter", "gauge", "histogram", "summary"]
    unit: str
    help: str
    samples: Sequence[MetricSample]


def metrics(stats: Mapping[str, float], blocks: Mapping[int, Sequence[float]]) -> list[Metric]:
    """Return all metrics of a loader.

    Args:
        stats: its `stats()`; figures that are missing have no metric.
        blocks: what each process has timed, by the worker's number; -1: the main process.
    """
    found = []
    for key, figure in FIGURES.items():
        if figure.kind == "derived" or key not in stats:
            continue
        found.append(_metric(key, figure, [({}, stats[key])]))
    addresses = [key[len("node/") : -len("/workers")] for key in stats if re.fullmatch("node/.*/workers", key)]
    for name, figure in NODE_FIGURES.items() if addresses else ():
        values = [({"node": address}, stats[f"node/{address}/{name}"]) for address in addresses]
        found.append(_metric(f"node/{name}", figure, values))
    return [*found, _waits(blocks), _stages(blocks)]


def definitions() -> list[Metric]:
    """Return all metrics that a loader may have, without values."""
    stats = dict.fromkeys([*FIGURES, *(f"node/ADDRESS/{name}" for name in NODE_FIGURES)], 0.0)
    return [each._replace(samples=()) for each in metrics(stats, {})]


def _metric(key: str, figure: Figure, values: Sequence[tuple[dict[str, str], float]]) -> Metric:
    name = "asyncloader_" + key.replace("/", "_").removesuffix("_s") + ("_seconds" if figure.unit == "s" else "")
    kind: Literal["counter", "gauge"] = "gauge" if figure.kind == "now" else "counter"
    full = name if kind == "gauge" else f"{name}_total"
    samples = [MetricSample(full, labels, value) for labels, value in values]
    return Metric(name, kind, figure.unit, f"{figure.unit} {figure.help}", samples)


def _waits(blocks: Mapping[int, Sequence[float]]) -> Metric:
    """The consumer's waits as a histogram, which unlike quantiles can be added up over ranks."""
    name, samples = "asyncloader_wait_seconds", []
    if (main := blocks.get(-1)) is not None:
        times = stage_times(main, "wait")
        for octave in _WAIT_OCTAVES:
            labels = {"le": str(2**octave / 1e6)}
            samples.append(MetricSample(f"{name}_bucket", labels, number_below(main, "wait", octave)))
        samples.append(MetricSample(f"{name}_bucket", {"le": "+Inf"}, float(times.number)))
        samples.append(MetricSample(f"{name}_sum", {}, times.total))
        samples.append(MetricSample(f"{name}_count", {}, float(times.number)))
    return Metric(name, "histogram", "s", "seconds that the consumer waited for a batch", samples)


def _stages(blocks: Mapping[int, Sequence[float]]) -> Metric:
    name, samples = "asyncloader_stage_seconds", []
    for worker, block in blocks.items():
        for stage in STAGES:
            times = stage_times(block, stage)
            if not times.number:
                continue
            labels = {"stage": stage, "worker": "main" if worker < 0 else str(worker)}
            for quantile, value in (("0.5", times.p50), ("0.95", times.p95), ("0.99", times.p99)):
                samples.append(MetricSample(name, {**labels, "quantile": quantile}, value))
            samples.append(MetricSample(f"{name}_sum", labels, times.total))
            samples.append(MetricSample(f"{name}_count", labels, float(times.number)))
    return Metric(name, "summary", "s", "seconds that a batch spent in a stage of its way, in a process", samples)
