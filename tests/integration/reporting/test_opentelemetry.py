"""The instruments for OpenTelemetry, read by its SDK; and both exporters of graphs."""

from __future__ import annotations

import gc
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from asyncloader import DataLoader
from asyncloader.integrations import opentelemetry
from asyncloader.telemetry.metrics import definitions
from tests.helpers.datasets import Numbers


def collected(reader: InMemoryMetricReader) -> dict[str, Any]:
    """The metrics of a collection, by name."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        metric.name: metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def values(metric: Any, **attributes: str) -> list[float]:
    """The values with these attributes."""
    points = metric.data.data_points
    return [point.value for point in points if attributes.items() <= dict(point.attributes).items()]


def test_instruments_have_the_loaders_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection has the figures of `loader.metrics()` by name, unit and attributes, as sums that only grow or as
    momentary values; a loader that is freed leaves, and another may be added.
    """
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    loader = DataLoader(Numbers(12), batch_size=2, num_workers=2)
    exported = opentelemetry.instrument(provider, train=loader)
    assert sum(1 for _ in loader) == 6
    got = collected(reader)
    batches = got["asyncloader.data.batches"]
    assert batches.unit == "{batches}"
    assert batches.data.is_monotonic
    assert values(batches, loader="train", rank="0") == [6]
    assert got["asyncloader.data.wait"].unit == "s"
    assert got["asyncloader.data.bytes"].unit == "By"
    assert not hasattr(got["asyncloader.data.queue_depth"].data, "is_monotonic")
    for worker in ("0", "1"):
        assert values(got["asyncloader.stage.batches"], stage="fetch", worker=worker) == [2]  # after `first_read`
        assert len(values(got["asyncloader.stage.quantile"], stage="fetch", worker=worker)) == 3
    assert values(got["asyncloader.stage.time"], stage="wait", worker="main")[0] > 0
    plain = {each.name for each in definitions() if each.type in ("counter", "gauge") and "node" not in each.name}
    assert len(got) == len(plain) + 3
    loader.close()
    del loader, got, batches
    gc.collect()
    monkeypatch.setattr(opentelemetry, "_SAME_S", 0.0)
    assert collected(reader) == {}
    again = DataLoader(Numbers(4), batch_size=2)
    exported.add("valid", again)
    assert sum(1 for _ in again) == 2
    assert values(collected(reader)["asyncloader.data.batches"], loader="valid") == [2]
    provider.shutdown()
