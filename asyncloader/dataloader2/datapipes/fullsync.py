"""The form `fullsync`: the ranks' epochs end together, when the first rank has no item left.

Data path: graph -> [fullsync: thread, agreement over gloo] -> DataLoader2.

Each rank reads one item ahead, and the ranks agree for each item that all of them have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe

from asyncloader.dataloader2.datapipes.forms import state_with
from asyncloader.dataloader2.datapipes.prefetch import Pausable
from asyncloader.dataloader2.datapipes.read_ahead import STOP_S, ReadAhead
from asyncloader.errors import RanksDisagree
from asyncloader.ranks.process_group import destroy

_LONGEST_S = 1e8  # gloo refuses longer timeouts


class PrefetchTimeoutError(RuntimeError):
    """No item came, or the ranks did not agree on an item, within `timeout` seconds.

    Attributes:
        timeout: the limit in seconds.
    """

    def __init__(self, timeout: float) -> None:
        super().__init__(f"Fail to fetch data within {timeout} seconds")
        self.timeout = timeout

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(self), (self.timeout,)


class FullSync(Pausable):
    """Form ``fullsync``. Ends in all ranks at once: when the first rank has no item left, the others drop theirs.

    It is not replicable: the main process of each rank runs it.

    Args:
        datapipe: gives this rank's items; is read in a thread, one item ahead.
        timeout: seconds to wait for an item, in this and in the other ranks; default 1800.

    Raises:
        RuntimeError: when iterated without an initialized `torch.distributed`.
        PrefetchTimeoutError: when iterated, after the timeout.
        RanksDisagree: when iterated: the ranks left an epoch at different items.
    """

    def __init__(self, datapipe: IterDataPipe[Any], timeout: float = 1800) -> None:
        if not dist.is_available():
            raise RuntimeError("Torch Distributed is required to be available to use `FullSync`.")
        self.datapipe: Any = datapipe
        self.timeout = timeout
        # A group of its own: in a shared group the thread's collective operations would mix with those of other code.
        self._group: Any = None
        self._numbers = torch.zeros(0, dtype=torch.int32, device="cpu")
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("Torch Distributed is required to be initialized to use `FullSync`.")
        if dist.get_world_size() == 1:
            yield from self.datapipe
            return
        if self._group is None:
            limit = timedelta(seconds=min(self.timeout, _LONGEST_S))
            self._group = dist.new_group(backend="gloo", timeout=limit)
            self._numbers = torch.zeros(3, dtype=torch.int32, device="cpu")
        self._epoch += 1
        late = partial(PrefetchTimeoutError, self.timeout)
        begin = partial(_agree, self.datapipe, self._group, self._numbers, self._epoch, late)
        # `even`: how often a rank agrees must follow from the number of items it has taken alone, and not from how far
        # its thread has come. Then ranks that leave an epoch at the same item also agree in the next epoch.
        self._ahead = ReadAhead(begin, 1, even=True, timeout=self.timeout, late=late)
        yield from self._ahead

    def __len__(self) -> int:
        return len(self.datapipe)

    def __getstate__(self) -> Any:
        return state_with(self, _ahead=None, _group=None)

    def is_replicable(self) -> bool:
        """Return False: the main processes of the ranks agree."""
        return False

    def reset(self) -> None:
        """End the epoch before: wait for an agreement that is under way."""
        # As long as the other ranks may take for it: the next epoch's agreements must not begin before.
        self._stop(self.timeout)

    def shutdown(self) -> None:
        """End the thread, and wait for it, at most 20 seconds; then the process group. Idempotent."""
        # First the thread, which may be in an operation of the group.
        self._stop(STOP_S)
        groups, self._group = [self._group], None
        if groups[0] is not None:
            destroy(groups.pop(), self._numbers)

    def _stop(self, seconds: float) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop(seconds)


def _agree(
    source: IterDataPipe[Any],
    group: dist.ProcessGroup,
    numbers: torch.Tensor,
    epoch: int,
    late: Callable[[], Exception],
) -> Iterator[Any]:
    """Give the items for whose position every rank has an item. In the thread."""
    iterator = _items(source)
    while True:
        failure: Exception | None = None
        item, have = None, 1
        try:
            item = next(iterator)
        except StopIteration:
            have = 0
        except Exception as error:
            # Raised only after the operation below: the other ranks wait in theirs, and must learn that this rank ends.
            failure, have = error, 0
        # With the least of all ranks' numbers each knows whether all have an item, and the first and the last epoch.
        numbers[0], numbers[1], numbers[2] = have, epoch, -epoch
        try:
            dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=group)
        except RuntimeError as error:
            if failure is None and "timed out" in str(error).lower():
                raise late() from error
            raise failure or error from None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure
        all_have, first, last = numbers.tolist()
        if first != -last:
            raise RanksDisagree(
                f"the ranks are in different epochs, {first} to {-last}: some left one at an earlier item than others. "
                "Have all of them leave it at the same item, or read it to its end"
            )
        if not all_have:
            return
        yield item


def _items(source: IterDataPipe[Any]) -> Iterator[Any]:
    # Its `__iter__` is called with the first item: the other ranks must learn of an error of that, too.
    yield from source
