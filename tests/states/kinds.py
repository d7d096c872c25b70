"""What a kind of saved states is: how a loader of it is made, what its states determine, and how it is run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from asyncloader import AsyncDataLoader
from asyncloader.dataloader2 import DataLoader2


class Kind(NamedTuple):
    """A kind of loader, made of fixed parameters.

    Attributes:
        make: makes a loader over the files in a folder, see `files.make_files`.
        later: whether a state also determines the epochs after the one in which it was taken.
        taken: batches before the state that is taken within an epoch.
        prepare: called with the loader that saves, and the folder, before its first epoch.
        needs: a package without which there is no such loader.
    """

    make: Callable[[Path], Any]
    later: bool = True
    taken: int = 3
    prepare: Callable[[Any, Path], object] = lambda *_: None
    needs: str = "torch"


class Run:
    """A loader that is iterated, and closed after ``with``; an async loader in an event loop of its own."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._async = isinstance(getattr(loader, "loader", loader), AsyncDataLoader)
        self._runner = asyncio.Runner()

    def batches(self) -> Iterator[Any]:
        """Yield the batches of an epoch, as plain values."""
        if not self._async:
            for batch in self.loader:
                yield plain(batch)
            return
        iterator = aiter(self.loader)
        while (batch := self._runner.run(_next(iterator))) is not _END:
            yield plain(batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        inner = getattr(self.loader, "loader", self.loader)
        if self._async:
            self._runner.run(inner.aclose())
        elif isinstance(inner, DataLoader2):
            inner.shutdown()
        else:
            inner.close()
        self._runner.close()


_END = object()


async def _next(iterator: Any) -> Any:
    return await anext(iterator, _END)


def plain(value: Any) -> Any:
    """Return a batch as JSON has it."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
