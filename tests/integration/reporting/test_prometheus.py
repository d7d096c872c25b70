"""The collector for Prometheus, and the dashboard that shows its metrics."""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

import prometheus_client as prometheus
import torch
from prometheus_client.openmetrics.exposition import generate_latest as as_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from torch.testing._internal.distributed.fake_pg import FakeStore

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.integrations.exported import ExportedLoaders
from asyncloader.integrations.prometheus import LoaderCollector, dashboard
from asyncloader.telemetry.metrics import definitions
from tests.helpers.datasets import Numbers
from tests.helpers.running import run_async

LABELS = {"loader", "rank", "worker", "stage", "node", "quantile", "le"}


def scraped(registry: Any) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Every sample of a scrape, read back by the client's own parser: name, labels, value."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(prometheus.generate_latest(registry).decode()):
        for sample in family.samples:
            assert found.setdefault(sample.name, {}).setdefault(tuple(sorted(sample.labels.items())), sample.value) is (
                sample.value
            ), "no sample comes twice"
    return found


def test_a_scrape_has_all_figures_of_both_loaders() -> None:
    """A registry serves the metrics of `loader.metrics()` with their values, by loader, rank, worker and stage, in both
    of the client's formats. Further scrapes are the same.
    """
    registry = prometheus.CollectorRegistry()
    with (
        DataLoader(Numbers(12), batch_size=2, num_workers=2, seed=1, rank=3, world_size=4) as train,
        AsyncDataLoader(Numbers(5), batch_size=1) as valid,
    ):
        registry.register(LoaderCollector(train=train, valid=valid))

        async def run() -> None:
            async for _ in valid:
                pass

        steps = sum(1 for _ in train)
        run_async(run())
        got = scraped(registry)
        assert got["asyncloader_data_batches_total"] == {
            (("loader", "train"), ("rank", "3")): steps,
            (("loader", "valid"), ("rank", "0")): 5,
        }
        for metric in train.metrics():
            for sample in metric.samples:
                labels = tuple(sorted({**sample.labels, "loader": "train", "rank": "3"}.items()))
                assert got[sample.name][labels] == pytest.approx(sample.value)
        workers = {dict(labels)["worker"] for labels in got["asyncloader_stage_seconds_count"]}
        assert workers == {"main", "0", "1"}
        buckets = [
            value for labels, value in got["asyncloader_wait_seconds_bucket"].items() if ("loader", "valid") in labels
        ]
        assert buckets == sorted(buckets)
        assert buckets[-1] == got["asyncloader_wait_seconds_count"][("loader", "valid"), ("rank", "0")] == 5
        assert {name for labels in got.values() for each in labels for name, _ in each} <= LABELS
        text: bytes = as_openmetrics(registry)  # type: ignore[no-untyped-call]
        assert text.endswith(b"# EOF\n")
        assert scraped(registry) == got


def test_loaders_come_and_go() -> None:
    """A loader that is freed is no longer exported; another may take its name; two collectors of one registry do not
    read the loaders when they are registered.
    """
    registry = prometheus.CollectorRegistry()
    collector = LoaderCollector()
    registry.register(collector)
    assert scraped(registry) == {}
    first: Any = DataLoader(Numbers(4), batch_size=2)
    collector.add("train", first)
    assert scraped(registry)["asyncloader_data_batches_total"].values()
    del first
    gc.collect()
    assert scraped(registry) == {}
    again = DataLoader(Numbers(4), batch_size=2)
    collector.add("train", again)
    assert sum(1 for _ in again) == 2
    assert list(scraped(registry)["asyncloader_data_batches_total"].values()) == [2]


def test_other_objects_are_refused() -> None:
    """The error names the argument and the type."""
    with pytest.raises(TypeError, match=r"^train should be a loader of asyncloader, but is a list$"):
        ExportedLoaders({"train": []})  # type: ignore[dict-item]


def test_the_dashboard_shows_what_is_exported() -> None:
    """Each expression's metrics are exported, by a type that suits the function around them, with the labels that it
    selects and groups by. The panels have numbers, titles and places of their own.
    """
    found = json.loads(dashboard())
    types = {each.name: each.type for each in definitions()}
    of_type = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    of_type["summary"] = ["", "_sum", "_count"]
    exported = {f"{name}{suffix}": kind for name, kind in types.items() for suffix in of_type[kind]}
    variables = {each["name"] for each in found["templating"]["list"]}
    used = Counter[str]()
    for panel in found["panels"]:
        assert panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            expression = target["expr"]
            names = re.findall(r"\basyncloader_\w+", expression)
            assert names
            used.update(names)
            assert set(names) <= exported.keys(), expression
            for name in names:
                increases = exported[name] == "counter" or name.endswith(("_bucket", "_sum", "_count"))
                assert increases == bool(re.search(rf"(?:rate|increase)\({name}\b", expression)), expression
            labels = set(re.findall(r"(\w+)[!=]?[=~]+\"", expression))
            for group in re.findall(r"by \(([^)]*)\)", expression):
                labels |= {label.strip() for label in group.split(",")}
            labels |= set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert labels <= LABELS, expression
            assert set(re.findall(r"\$(?!__)(\w+)", expression)) <= variables
            for opening, closing in ("()", "{}", "[]"):
                assert expression.count(opening) == expression.count(closing), expression
    assert len(used) > 15
    assert len({panel["id"] for panel in found["panels"]}) == len(found["panels"])
    places = Counter[tuple[int, int]]()
    for place in (panel["gridPos"] for panel in found["panels"]):
        assert place["x"] + place["w"] <= 24
        places.update((place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"]))
    assert set(places.values()) == {1}


@pytest.mark.parametrize("grouped", [False, True])
def test_the_rank_outlives_the_process_group(grouped: bool) -> None:
    """A scrape after torch.distributed was shut down, as at the end of a run, has the rank of before, and no error."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        group: Any = torch.distributed.new_group([0, 1], backend="fake") if grouped else None
        loader = DataLoader[Any](Numbers(8), batch_size=2, seed=1, group=group)
        exported = ExportedLoaders({"train": loader})
    finally:
        torch.distributed.destroy_process_group()
    for metric in exported.metrics().values():
        assert {dict(sample.labels)["rank"] for sample in metric.samples} <= {"1"}
