"""`SequenceRows`: a map dataset whose indices are rows of another dataset's sequences.

Data path: worker: [sequence_rows] -> collate -> codec -> ring.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Sequence
from typing import Any, TypeAlias

from torch.utils.data import Dataset, Subset

from asyncloader.packing.fields import cut
from asyncloader.workers.fetch.dataset_kinds import fetches_batches

Row: TypeAlias = tuple[int, ...] | tuple[tuple[int, int, int], ...]
"""A row's sequences: their indices; or slices ``(index, start, stop)``, tokens `start` to `stop` of a sequence."""


class Sequences(list[Any]):
    """The sequences of a row."""


class SequenceRows(Subset[Any]):
    """The rows of a dataset's sequences. Its indices are rows, as `PackingSampler` gives them; a sample is a row.

    The sequences of a row are read one after the other; by one call of `__getitems__`, if the dataset has its own; or,
    if the dataset is asynchronous, all at the same time. In seeded mode they share the random numbers of their row. A
    sequence that raises is an error of its row, which `on_error` skips or replaces.

    A slice reads its whole sequence and cuts it. A dataset that can read parts (a memory-mapped file) may take rows as
    its indices itself, and return a list of sequences, without `SequenceRows`.

    Args:
        dataset: a map dataset of sequences as `PackSequences` takes them, with a length, and `__getitem__` or
            `__getitems__`, which may be asynchronous.
    """

    # A Subset, because loaders know that it enters the contexts, and awaits the samples, of the dataset within.

    def __init__(self, dataset: Dataset[Any]) -> None:
        super().__init__(dataset, range(len(dataset)))  # type: ignore[arg-type]

    @property
    def __getitems__(self) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        """None: rows are read one by one."""
        return

    def __getitem__(self, index: Row) -> Any:
        """Return the list of a row's sequences; or an awaitable of it, if the dataset is asynchronous.

        Raises:
            TypeError, ValueError: an object is no sequence, or has fewer than `stop` tokens.
        """
        numbers = [each if isinstance(each, int) else each[0] for each in index]
        if fetches_batches(self.dataset):
            found = self.dataset.__getitems__(numbers)  # type: ignore[attr-defined]
        else:
            found = [self.dataset[number] for number in numbers]
        if inspect.isawaitable(found) or any(map(inspect.isawaitable, found)):
            return _await(found, index)
        return _cut(found, index)


async def _await(found: Any, row: Row) -> Sequences:
    if inspect.isawaitable(found):
        found = await found
    sequences = list(found)
    try:
        async with asyncio.TaskGroup() as group:
            pending = {
                number: group.create_task(_result(each))
                for number, each in enumerate(sequences)
                if inspect.isawaitable(each)
            }
    except ExceptionGroup as errors:
        # The first that was raised: as where one sequence is read after the other.
        raise errors.exceptions[0] from None
    for number, task in pending.items():
        sequences[number] = task.result()
    return _cut(sequences, row)


async def _result(sequence: Awaitable[Any]) -> Any:
    return await sequence


def _cut(found: Sequence[Any], row: Sequence[Any]) -> Sequences:
    return Sequences(
        sequence if isinstance(each, int) else cut(sequence, *each[1:])
        for sequence, each in zip(found, row, strict=True)
    )
