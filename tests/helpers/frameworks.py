"""The uses that frameworks make of a loader, in a few lines each: read it, wrap it, copy it, rebuild it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.running import run_async


def epoch(loader: Any) -> list[Any]:
    """Return all batches of either loader."""
    if not isinstance(loader, AsyncDataLoader):
        return list(loader)

    async def run() -> list[Any]:
        return [batch async for batch in loader]

    return run_async(run())


def public(loader: Any) -> set[str]:
    """Return the names of its public instance attributes."""
    return {name for name in vars(loader) if not name.startswith("_")}


def rebuilt(loader: Any, **changes: Any) -> Any:
    """Build a new loader from another's attributes that are not identical with the constructor's defaults."""
    attributes = {name: vars(loader)[name] for name in public(loader)}
    attributes["multiprocessing_context"] = loader.multiprocessing_context
    parameters = inspect.signature(type(loader).__init__).parameters
    arguments = {
        name: attributes[name]
        for name, parameter in parameters.items()
        if name in attributes and parameter.default is not attributes[name]
    }
    for name in ("batch_size", "shuffle", "sampler", "drop_last"):
        arguments.pop(name, None)
    return type(loader)(**(arguments | changes))


class _Endless:
    """A batch sampler that starts over for ever."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.batch_sampler


class OneIteratorForAllEpochs(DataLoader[Any]):
    """Replaces the batch sampler after construction, with torch's guard disabled (timm)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.batches_an_epoch = len(self)
        self._DataLoader__initialized = False
        self.batch_sampler = _Endless(self.batch_sampler)
        self._DataLoader__initialized = True
        self.endless = super().__iter__()

    def __iter__(self) -> Any:
        for _ in range(self.batches_an_epoch):
            yield next(self.endless)


class DictCopy:
    """A wrapper that copies its loader's `__dict__` (Fabric)."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.__dict__.update(loader.__dict__)
        self._wrapped = loader

    def __len__(self) -> int:
        return len(self._wrapped)

    def __iter__(self) -> Iterator[Any]:
        yield from self._wrapped


class DictCopyOfTorchsType(torch.utils.data.DataLoader[Any]):
    """A wrapper like `DictCopy` that is a torch DataLoader whose constructor never ran (Ray Train)."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.__dict__.update(loader.__dict__)
        self._wrapped = loader

    def __iter__(self) -> Any:
        return iter(self._wrapped)
