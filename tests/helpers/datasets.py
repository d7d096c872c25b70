"""Datasets, batch types and functions of the integration tests, at module level: spawned workers import them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info


def identity(batch: Any) -> Any:
    return batch


class Numbers(Dataset[Any]):
    """`n` rows of float32 that hold their index."""

    def __init__(self, n: int, width: int = 3) -> None:
        self.n = n
        self.width = width

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return torch.arange(self.width, dtype=torch.float32) + index * 100


class Sized(Dataset[Any]):
    """Sample `i` is a uint8 tensor of ``sizes[i]`` bytes, filled with `i`."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.sizes[index],), index % 251, dtype=torch.uint8)


class Augmented(Dataset[Any]):
    """Draws from every global generator for every sample."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return {
            "torch": torch.rand(3) + index,
            "random": random.random(),
            "numpy": np.random.randint(0, 1 << 30, size=2),
            "index": index,
        }


class Pair(NamedTuple):
    left: Any
    right: Any


class Images(Dataset[Any]):
    """Samples with a value of each type that `default_collate` knows."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return {
            "image": torch.full((3, 4, 5), index, dtype=torch.uint8),
            "array": np.full((2, 3), index, np.float64),
            "half": torch.tensor([index, -index], dtype=torch.bfloat16),
            "flag": index % 2 == 0,
            "label": index,
            "weight": index / 7,
            "name": f"sample {index}",
            "raw": bytes([index % 256]),
            "pair": Pair(torch.tensor(index), np.int32(index)),
            "nested": [{"a": torch.zeros(0)}, (np.float32(index), np.bool_(index % 3 == 0))],
            "complex": torch.tensor(complex(index, -1)),
        }


class WholeBatches(Numbers):
    """A dataset that makes a batch's samples in one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] * len(indices) for i in indices]


class UnevenStream(IterableDataset[Any]):
    """Worker `w` gives ``lengths[w]`` samples (without workers: ``lengths[0]``)."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        for i in range(self.lengths[worker]):
            yield torch.tensor([worker, i]), random.random(), float(torch.rand(()))


class CountedStream(IterableDataset[Any]):
    """Gives `n` samples in each worker, while its length is `said`."""

    def __init__(self, n: int, said: int) -> None:
        self.n = n
        self.said = said

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class Pids(Dataset[Any]):
    """Each sample is the pid of the process that fetched it."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return os.getpid()


# ------------------------------------------------------------------------------------------- batch types


class Custom:
    """A user's own batch type, in which tensors are nested deeply."""

    def __init__(self, x: torch.Tensor, meta: Any) -> None:
        self.x = x
        self.meta = meta
        self.pinned_by: str | None = None

    def pin_memory(self) -> Custom:
        self.pinned_by = "pin_memory"
        return self


@dataclass
class Deep:
    inner: Custom
    by_name: dict[str, list[Any]]
    arrays: tuple[np.ndarray[Any, Any], ...] = ()
    notes: list[str] = field(default_factory=list[str])


def collate_deep(samples: list[Any]) -> Deep:
    x = default_collate(samples)
    return Deep(
        Custom(x, {"transposed": x.t(), "rows": list(x)}),
        {"views": [x[0], x[:, 1:], x[0]], "empty": [torch.empty(0, 3), torch.empty(3, 0, dtype=torch.int64)]},
        (x.numpy(), np.array(["text", None, {"k": 1}], dtype=object), np.asfortranarray(np.ones((2, 3)))),
        [f"{len(samples)} samples"],
    )


def collate_strings(samples: list[Any]) -> list[Any]:
    return [["ä" * len(samples), None, {1: "x", 2.5: (True, b"b")}], {"s": samples[0]}]


# ------------------------------------------------------------------------------------------- asynchronous


class DiesOnce(Numbers):
    """Kills its process at sample 13, unless the file exists, which it makes then."""

    def __init__(self, length: int, path: Path) -> None:
        super().__init__(length)
        self.path = path

    def __getitem__(self, index: int) -> Any:
        if index == 13 and not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class AsyncNumbers(Numbers):
    """`Numbers`, awaited."""

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        return super().__getitem__(index)


class AsyncWholeBatches(Numbers):
    async def __getitems__(self, indices: list[int]) -> list[Any]:
        await asyncio.sleep(0)
        return [super(AsyncWholeBatches, self).__getitem__(i) for i in indices]


class AsyncStream:
    """Worker `w` gives ``lengths[w]`` samples, asynchronously."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    async def __aiter__(self) -> AsyncIterator[Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        for i in range(self.lengths[worker]):
            await asyncio.sleep(0)
            yield torch.tensor([worker, i])


class BothStreams(IterableDataset[Any]):
    """An asynchronous stream of torch's type, which demands an `__iter__`."""

    def __init__(self, lengths: list[int]) -> None:
        self._stream = AsyncStream(lengths)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("iterate asynchronously")

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._stream.__aiter__()
