"""Datasets and samplers of the tests of states: some have a state of their own, some count the calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class SharedCount:
    """A count to which workers and this process add, each in a place of its own."""

    def __init__(self) -> None:
        self._memory = torch.zeros(16, dtype=torch.int64).share_memory_()

    def add(self) -> None:
        info = get_worker_info()
        self._memory[0 if info is None else 1 + info.id] += 1

    @property
    def value(self) -> int:
        return int(self._memory.sum())


class Counted(Dataset[Any]):
    """Indices; counts the samples made, in whichever process."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.made = SharedCount()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.made.add()
        return index


class Failing(Dataset[Any]):
    """A dataset of indices, some of which raise."""

    def __init__(self, length: int, bad: tuple[int, ...]) -> None:
        self.length = length
        self.bad = bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise KeyError(index)
        return index


class CursorMap(Dataset[Any]):
    """A map dataset whose samples are (index, number of its reads so far), and whose state is that number."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.tensor([index, self.reads])

    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reads = state["reads"]


class PlainStream(IterableDataset[Any]):
    """The worker's share of ``range(length)``; counts the samples made."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.made = SharedCount()

    def numbers(self) -> range:
        info = get_worker_info()
        return range(self.length) if info is None else range(info.id, self.length, info.num_workers)

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers():
            self.made.add()
            yield number


class StreamOfCursors(PlainStream):
    """A stream whose iterators are Stateful."""

    def __iter__(self) -> Iterator[Any]:
        return _Cursor(self)


class _Cursor:
    def __init__(self, stream: PlainStream) -> None:
        self.stream = stream
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> int:
        numbers = self.stream.numbers()
        if self.next >= len(numbers):
            raise StopIteration
        self.stream.made.add()
        self.next += 1
        return numbers[self.next - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Unsaveable(PlainStream):
    """A Stateful stream whose `state_dict` raises."""

    def state_dict(self) -> dict[str, Any]:
        raise OSError("the shard's index is locked")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("there is no state to be loaded")


class Passes:
    """A Stateful sampler of 0, 1, 2, ... that counts how often its state is asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.next = 0
        self.asked = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        while self.next < self.length:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class _Feeling:
    """Gives the number of reports received; its state is the number of indices given and the reports."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.given = 0
        self.heard: list[int] = []

    def _next(self) -> int:
        self.given += 1
        return len(self.heard)

    def feedback(self, number: int, *, weight: int = 1) -> None:
        self.heard += [number] * weight

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "heard": list(self.heard)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given, self.heard = state["given"], list(state["heard"])


class Curriculum(_Feeling):
    """A sampler whose indices are the number of reports that had reached it."""

    def __iter__(self) -> Iterator[int]:
        while self.given < self.length:
            yield self._next()
        self.given = 0


class AwaitedCurriculum(_Feeling):
    """`Curriculum` as an async sampler."""

    async def __aiter__(self) -> AsyncIterator[int]:
        while self.given < self.length:
            await asyncio.sleep(0)
            yield self._next()
        self.given = 0


class Replayed:
    """An async sampler without a state, which counts the indices that it gave over all its passes."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.given = 0

    async def __aiter__(self) -> AsyncIterator[int]:
        for index in range(self.length):
            await asyncio.sleep(0)
            self.given += 1
            yield index
