"""The uses that frameworks make of a loader, in a few lines each: they read it, wrap it, copy it, make it again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.running import run_async


def epoch(loader: Any) -> list[Any]:
    """All batches of either loader."""
    if not isinstance(loader, AsyncDataLoader):
        return list(loader)

    async def run() -> list[Any]:
        return [batch async for batch in loader]

    return run_async(run())


def public(loader: Any) -> set[str]:
    """Names of its public instance attributes."""
    return {name for name in vars(loader) if not name.startswith("_")}


def rebuilt(loader: Any, **changes: Any) -> Any:
    """A new loader from another's attributes, those that differ from the constructor's defaults by identity."""
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
    """Exchanges the batch sampler after construction, while torch's guard is down (timm)."""

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
    """A wrapper that has its loader's `__dict__` (Fabric)."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.__dict__.update(loader.__dict__)
        self._wrapped = loader

    def __len__(self) -> int:
        return len(self._wrapped)

    def __iter__(self) -> Iterator[Any]:
        yield from self._wrapped


class DictCopyOfTorchsType(torch.utils.data.DataLoader[Any]):
    """The same as a DataLoader of torch's type whose constructor never ran (Ray Train)."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.__dict__.update(loader.__dict__)
        self._wrapped = loader

    def __iter__(self) -> Any:
        return iter(self._wrapped)
