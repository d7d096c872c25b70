"""The forms `sharding_round_robin_dispatch` and `round_robin_demux`, which deal items to several readers in turn, and
`unzip`, which gives each reader a place of the items.

Data path: graph -> [dispatch] -> the workers' parts of the graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter.combining import _ChildDataPipe, _DemultiplexerIterDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES


class ShardingRoundRobinDispatcher(IterDataPipe[Any]):
    """Form ``sharding_round_robin_dispatch``. Marks a cut: the parts before it run in one process, which deals their
    items to the workers in turn. Without workers it changes nothing.

    Args:
        source_datapipe: a part that cannot be split among workers.
        sharding_group_filter: must be ``SHARDING_PRIORITIES.MULTIPROCESSING``: items are dealt to workers alone.

    Raises:
        NotImplementedError: another sharding priority.
    """

    def __init__(
        self, source_datapipe: IterDataPipe[Any], sharding_group_filter: SHARDING_PRIORITIES | None = None
    ) -> None:
        if sharding_group_filter != SHARDING_PRIORITIES.MULTIPROCESSING:
            raise NotImplementedError(
                "`sharding_round_robin_dispatch` currently only supports `SHARDING_PRIORITIES.MULTIPROCESSING`. "
                "Please open issue on github for your feature request."
            )
        self.source_datapipe: Any = source_datapipe
        self.sharding_group_filter = sharding_group_filter

    def __iter__(self) -> Any:
        yield from self.source_datapipe

    def __len__(self) -> int:
        return len(self.source_datapipe)


class _InTurn:
    """Returns the reader of the next item. Pickled, it begins with the first reader again."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self.dealt = -1

    def __call__(self, _: Any) -> int:
        self.dealt += 1
        return self.dealt % self.readers

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(self), (self.readers,)


class _Dealer(_DemultiplexerIterDataPipe):
    """Reads the source for all readers. Each epoch's first item goes to the first reader."""

    def reset(self) -> None:
        super().reset()
        self.classifier_fn = _InTurn(self.num_instances)


class RoundRobinDemultiplexer(IterDataPipe[Any]):
    """Form ``round_robin_demux``. Splits a datapipe: item ``i`` goes to reader ``i % num_instances``.

    Args:
        datapipe: is read once for all readers.
        num_instances: number of readers; 1 gives the datapipe itself, in a list.
        buffer_size: items that may wait for a reader that is behind; default 1000; -1: any number.

    Returns:
        A list of datapipes.

    Raises:
        ValueError: `num_instances` is less than 1, or the buffer size is 0.
        BufferError: when iterated: more items wait than the buffer holds.
    """

    def __new__(cls, datapipe: IterDataPipe[Any], num_instances: int, buffer_size: int = 1000) -> Any:
        """Make the readers."""
        if num_instances < 1:
            raise ValueError(f"Expected `num_instances` larger than 0, but {num_instances} is found")
        if num_instances == 1:
            return [datapipe]
        if not buffer_size:
            raise ValueError(f"Expected `buffer_size` larger than 0 or -1, but {buffer_size} is found")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unlimited buffer size", UserWarning)  # it was asked for
            dealer: Any = _Dealer(
                datapipe, num_instances, _InTurn(num_instances), drop_none=False, buffer_size=buffer_size
            )  # type: ignore[abstract]
        return [_ChildDataPipe(dealer, reader) for reader in range(num_instances)]


def unzip(
    source_datapipe: Any, sequence_length: int, buffer_size: int = 1000, columns_to_skip: Sequence[int] | None = None
) -> list[Any]:
    """Form ``unzip``. Makes a datapipe for each place of the sequences.

    Args:
        source_datapipe: gives sequences.
        sequence_length: length of each.
        buffer_size: items by which one datapipe may be ahead of another; default 1000; -1: no limit.
        columns_to_skip: places that get no datapipe; default None: each place gets a datapipe.

    Raises:
        RuntimeError: all places are left out.
        BufferError: when read: a datapipe is further ahead of another.
    """
    places = [place for place in range(sequence_length) if place not in set(columns_to_skip or ())]
    if not places:
        raise RuntimeError(
            "All instances are being filtered out in UnZipperIterDataPipe. Please check"
            "the input `sequence_length` and `columns_to_skip`."
        )
    readers = source_datapipe.fork(len(places), buffer_size)
    return [reader.map(itemgetter(place)) for reader, place in zip(readers, places, strict=True)]
