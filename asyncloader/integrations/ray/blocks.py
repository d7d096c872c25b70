"""Ray Data's blocks as a dataset, and an order of its rows that reads few blocks at a time.

Data path: Ray's object store -> [blocks] -> collate.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from importlib import import_module
from operator import index
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

from asyncloader.samplers.permutation import Permutation
from asyncloader.samplers.surviving import Restarting

_KEPT = 4  # blocks that a process keeps
_MIX = 0x9E3779B97F4A7C15  # makes a different seed for each block


class RayBlocks(Dataset[dict[str, Any]]):
    """The rows of a Ray dataset, each a dictionary of its columns: numbers, texts and numpy arrays.

    The constructor executes the dataset's pending operations, in the cluster. The rows are in the order of its blocks,
    which Ray Data keeps only with its option `preserve_order`. The blocks stay in Ray's object store. A process reads
    them in the memory of its own machine, to which Ray brings a block once for all processes. Use `BlockSampler`, so
    that few batches need the same block.

    Workers of any kind can read it. Workers that Ray has not started join the cluster when they first read.

    Args:
        dataset: a `ray.data.Dataset`.

    Raises:
        RuntimeError: this process is not connected to a Ray cluster.
    """

    def __init__(self, dataset: Any) -> None:
        ray = import_module("ray")
        if not ray.is_initialized():
            raise RuntimeError("RayBlocks needs a Ray cluster: call ray.init() before")
        refs = dataset.to_arrow_refs()
        count = ray.remote(num_cpus=0)(_rows)
        self.block_sizes: list[int] = ray.get([count.remote(ref) for ref in refs])
        """Rows of each block."""
        self._ends: list[int] = np.cumsum(self.block_sizes, dtype=np.int64).tolist()
        # Unpickled only by a process that reads: that takes a connection to the cluster.
        self._packed: bytes = ray.cloudpickle.dumps(refs)
        self._address: str = ray.get_runtime_context().gcs_address
        self._refs: list[Any] | None = None
        self._at_hand: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_refs": None, "_at_hand": OrderedDict()}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row.

        Raises:
            IndexError: the index is below 0, or not below the number of rows.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} rows")
        block = bisect_right(self._ends, index)
        row = index - self._ends[block] + self.block_sizes[block]
        # Copies, because the store's arrays are read-only, and torch warns of tensors over such arrays.
        return {name: np.array(column[row])[()] for name, column in self._columns(block).items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of a batch, in the order of their indices."""
        return [self[index] for index in indices]

    def _columns(self, block: int) -> dict[str, Any]:
        columns = self._at_hand.get(block)
        if columns is None:
            accessor = import_module("ray.data.block").BlockAccessor
            columns = self._at_hand[block] = accessor.for_block(self._fetch(block)).to_numpy()
            if len(self._at_hand) > _KEPT:
                self._at_hand.popitem(last=False)
        else:
            with contextlib.suppress(KeyError):  # another thread may have dropped it since
                self._at_hand.move_to_end(block)
        return columns

    def _fetch(self, block: int) -> Any:
        ray = import_module("ray")
        if not ray.is_initialized():
            ray.init(address=self._address, log_to_driver=False, logging_level="WARNING")
        refs = self._refs
        if refs is None:
            refs = self._refs = ray.cloudpickle.loads(self._packed)
        return ray.get(refs[block])


class BlockSampler(Sampler[int]):
    """Gives all rows of a `RayBlocks`, block by block: in a shuffled order of the blocks, each block's rows shuffled,
    too.

    The order follows from seed and epoch alone, like that of `SeededSampler`.

    Args:
        dataset: gives the sizes of the blocks.
        seed: 0 to 2**64 - 1.

    Raises:
        ValueError: the seed is out of range.
    """

    def __init__(self, dataset: RayBlocks, seed: int) -> None:
        Permutation(0, seed)  # checks the seed
        self.block_sizes = dataset.block_sizes
        self.seed = index(seed)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration give the order of epoch `epoch`, 0 to 2**64 - 1.

        Raises:
            ValueError: the number is out of range.
        """
        Permutation(0, self.seed, epoch)  # checks the number
        self.epoch = index(epoch)

    def __len__(self) -> int:
        return sum(self.block_sizes)

    def __iter__(self) -> Iterator[int]:
        return self.iter_from(0)

    def iter_from(self, start: int) -> Iterator[int]:
        """Give the present epoch's order from position `start` on. Skips whole blocks without drawing them.

        Raises:
            ValueError: `start` is not between 0 and the length.
        """
        if not 0 <= start <= len(self):
            raise ValueError(f"start should be between 0 and {len(self)}, but got start={start}")
        epoch = self.epoch
        return Restarting(lambda position: self._rows(position, epoch), start)

    def _rows(self, start: int, epoch: int) -> Iterator[int]:
        starts = np.cumsum([0, *self.block_sizes], dtype=np.int64)
        blocks = len(self.block_sizes)
        for block in Permutation(blocks, self.seed, epoch)(np.arange(blocks)).tolist():
            size = self.block_sizes[block]
            if start < size:
                order = Permutation(size, (self.seed + _MIX * (block + 1)) % 2**64, epoch)
                yield from (starts[block] + order(np.arange(start, size))).tolist()
            start = max(0, start - size)


def _rows(table: Any) -> int:
    return int(table.num_rows)
