"""Collects the metrics of several loaders for an exporter, with the labels ``loader`` and ``rank``."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from asyncloader.base.topology import topology
from asyncloader.loaders.async_loader import AsyncDataLoader
from asyncloader.loaders.loader import DataLoader
from asyncloader.telemetry.metrics import Metric, MetricSample

Loader: TypeAlias = "DataLoader[Any] | AsyncDataLoader[Any]"


class ExportedLoaders:
    """Loaders by the names under which they are exported. They are held weakly: a loader that is freed leaves.

    Args:
        loaders: by name, the value of the label ``loader``.
    """

    def __init__(self, loaders: dict[str, Loader]) -> None:
        self._loaders: dict[str, weakref.ref[Loader]] = {}
        self._ranks: dict[str, int] = {}  # the newest; they outlive the process group
        for name, loader in loaders.items():
            self.add(name, loader)

    def add(self, name: str, loader: Loader) -> None:
        """Export a loader from now on, in place of an earlier loader of this name. Any thread.

        Raises:
            TypeError: it is no loader of asyncloader.
        """
        if not isinstance(loader, (DataLoader, AsyncDataLoader)):
            raise TypeError(f"{name} should be a loader of asyncloader, but is a {type(loader).__name__}")
        self._ranks[name] = _rank(loader)
        self._loaders[name] = weakref.ref(loader)

    def metrics(self) -> dict[str, Metric]:
        """Return the metrics of all loaders by name; each sample has its loader's labels. Any thread."""
        merged: dict[str, tuple[Metric, list[MetricSample]]] = {}
        for name, reference in self._loaders.copy().items():
            loader = reference()
            if loader is None:
                continue
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                with suppress(ValueError, RuntimeError):  # the loader's group is of an earlier initialization
                    self._ranks[name] = _rank(loader)
            labels = {"loader": name, "rank": str(self._ranks[name])}
            for metric in loader.metrics():
                samples = merged.setdefault(metric.name, (metric, []))[1]
                samples += [MetricSample(each.name, labels | dict(each.labels), each.value) for each in metric.samples]
        return {name: metric._replace(samples=samples) for name, (metric, samples) in merged.items()}


def _rank(loader: Loader) -> int:
    return topology(getattr(loader, "_spec", loader)).rank
