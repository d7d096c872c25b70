"""Reads torch's `StackDataset` over asynchronous datasets: a sample combines one sample of each part, awaited.

Data path: scheduler -> worker: [async_stack: one sample of each part] -> map_async -> collate -> codec -> ring.

torch's own class would return the parts' coroutines, in a tuple or a dictionary. Here the parts of a sample are awaited
one after the other, while other samples are in flight.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import ConcatDataset, StackDataset, Subset

from asyncloader.workers.fetch.dataset_kinds import fetches_batches, fetches_samples


def awaited_view(dataset: Any, is_async: Callable[[Any], bool]) -> Any:
    """Replace the stacks in a dataset by stacks that can be awaited, and torch's views of stacks by new views."""
    if type(dataset) is StackDataset:
        return _awaited_stack(dataset, is_async)
    if type(dataset) is Subset:
        inner = awaited_view(dataset.dataset, is_async)
        return dataset if inner is dataset.dataset else Subset(inner, dataset.indices)
    if type(dataset) is ConcatDataset:
        parts = [awaited_view(part, is_async) for part in dataset.datasets]
        return dataset if all(map(_is, parts, dataset.datasets)) else ConcatDataset(parts)
    return dataset


def _awaited_stack(stack: StackDataset[Any], is_async: Callable[[Any], bool]) -> AwaitedStack:
    """Like torch's, it has a `__getitems__` if a part has one; but not if the samples of another part would then no
    longer be awaited concurrently.
    """
    given: Any = stack.datasets
    names = list(given) if isinstance(given, dict) else None
    parts = [awaited_view(part, is_async) for part in (given if names is None else given.values())]
    slow = any(is_async(part) and not fetches_batches(part) for part in parts)
    batched = any(map(fetches_batches, parts)) and not (slow and all(map(fetches_samples, parts)))
    return (_BatchedStack if batched else AwaitedStack)(parts, names, len(stack))


def _is(one: Any, other: Any) -> bool:
    return one is other


class AwaitedStack:
    """A `StackDataset` whose samples are awaited.

    Args:
        parts: the datasets.
        names: the parts' names, if samples are dictionaries; None: samples are tuples.
        length: number of samples.
    """

    def __init__(self, parts: list[Any], names: list[Any] | None, length: int) -> None:
        self._parts = parts
        self._names = names
        self._length = length

    def __len__(self) -> int:
        return self._length

    async def __getitem__(self, index: Any) -> Any:
        # Each part is awaited before the next is asked: they draw from the sample's random numbers in their order, as
        # in a blocking stack.
        return self._stacked([await _awaited(part[index]) for part in self._parts])

    def _stacked(self, row: list[Any]) -> Any:
        return tuple(row) if self._names is None else dict(zip(self._names, row, strict=True))


class _BatchedStack(AwaitedStack):
    """A stack with a `__getitems__`."""

    async def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        columns = [await self._column(part, indices) for part in self._parts]
        return [self._stacked(list(row)) for row in zip(*columns, strict=True)]

    async def _column(self, part: Any, indices: Sequence[Any]) -> list[Any]:
        if not callable(getattr(part, "__getitems__", None)):
            return [await _awaited(part[index]) for index in indices]
        items = list(await _awaited(part.__getitems__(indices)))
        if len(items) != len(indices):
            for item in filter(inspect.iscoroutine, items):
                item.close()
            raise ValueError(f"Nested dataset's output size mismatch. Expected {len(indices)}, got {len(items)}")
        try:
            return [await _awaited(item) for item in items]
        finally:
            for item in filter(inspect.iscoroutine, items):
                item.close()  # not awaited because of an error; a no-op for the others


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
