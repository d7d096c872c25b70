"""torch's `StackDataset` over asynchronous datasets: its sample is one of each part, awaited.

Data path: scheduler -> worker: [async_stack: one sample of each part] -> async_fetch -> collate -> codec -> ring.

torch's own gives the parts' coroutines, in a tuple or a dictionary. Here a sample's parts are awaited one after the
other, in their order, so that they draw from its random numbers in that order, as in a blocking stack; other samples
are in flight meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import ConcatDataset, StackDataset, Subset

from asyncloader.workers.guarded_fetch import fetches_single
from asyncloader.workers.seeded_fetch import fetches_batches

__all__ = ["AwaitedStack", "awaited_view"]


def awaited_view(dataset: Any, is_async: Callable[[Any], bool]) -> Any:
    """The dataset, with stacks that can be awaited in it. torch's views of stacks are made anew, over those."""
    if type(dataset) is StackDataset:
        return AwaitedStack(dataset, is_async)
    if type(dataset) is Subset:
        inner = awaited_view(dataset.dataset, is_async)
        return dataset if inner is dataset.dataset else Subset(inner, dataset.indices)
    if type(dataset) is ConcatDataset:
        parts = [awaited_view(part, is_async) for part in dataset.datasets]
        return dataset if all(map(_is, parts, dataset.datasets)) else ConcatDataset(parts)
    return dataset


def _is(one: Any, other: Any) -> bool:
    return one is other


class AwaitedStack:
    """A `StackDataset` with coroutines for methods.

    It makes batches at once (`__getitems__`) where a part does, as torch's: but not where that would keep the samples
    of another part from being awaited concurrently.

    Args:
        stack: torch's.
        is_async: tells whether a part's samples are awaited.
    """

    def __init__(self, stack: StackDataset[Any], is_async: Callable[[Any], bool]) -> None:
        parts: Any = stack.datasets
        self._names = list(parts) if isinstance(parts, dict) else None
        self._parts = [awaited_view(part, is_async) for part in (parts.values() if self._names is not None else parts)]
        self._length = len(stack)
        slow = any(is_async(part) and not fetches_batches(part) for part in self._parts)
        if not any(map(fetches_batches, self._parts)) or (slow and all(map(fetches_single, self._parts))):
            self.__getitems__ = None

    def __len__(self) -> int:
        return self._length

    async def __getitem__(self, index: Any) -> Any:
        return self._stacked([await _settled(part[index]) for part in self._parts])

    async def __getitems__(self, indices: Sequence[Any]) -> list[Any]:  # type: ignore[no-redef]
        columns = [await self._column(part, indices) for part in self._parts]
        return [self._stacked(list(row)) for row in zip(*columns, strict=True)]

    async def _column(self, part: Any, indices: Sequence[Any]) -> list[Any]:
        if not callable(getattr(part, "__getitems__", None)):
            return [await _settled(part[index]) for index in indices]
        items = list(await _settled(part.__getitems__(indices)))
        if len(items) != len(indices):
            for item in filter(inspect.iscoroutine, items):
                item.close()
            raise ValueError(f"Nested dataset's output size mismatch. Expected {len(indices)}, got {len(items)}")
        try:
            return [await _settled(item) for item in items]
        finally:
            for item in filter(inspect.iscoroutine, items):
                item.close()  # those that an error kept from being awaited; a no-op for the others

    def _stacked(self, row: list[Any]) -> Any:
        return tuple(row) if self._names is None else dict(zip(self._names, row, strict=True))


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
