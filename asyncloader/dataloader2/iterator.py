"""Iterates a DataLoader2 with a plain ``for``. (``async for``: `async_iterator.py`.)

Data path: graph -> reading service -> DataLoader2 -> [iterator] -> the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from asyncloader.dataloader2.error import PauseIteration
from asyncloader.dataloader2.services.worker_streams import has_next

if TYPE_CHECKING:
    from asyncloader.dataloader2.dataloader2 import DataLoader2

T_co = TypeVar("T_co", covariant=True)

_INVALIDATED = (
    "This iterator has been invalidated because another iterator has been created from the same DataLoader2.\n"
    "This may be caused multiple references to the same DataLoader2. For feedback regarding this single iterator per "
    "DataLoader2 constraint, feel free to comment on this issue: https://github.com/pytorch/data/issues/45."
)


class DataLoader2Iterator(Iterator[T_co]):
    """Iterates a `DataLoader2`, until another iterator of the same loader is made.

    Attributes of the graph's own iterator are reachable through it.
    """

    def __init__(self, dataloader: DataLoader2[T_co], iterator_id: int) -> None:
        self.dataloader = dataloader
        self.iterator_id = iterator_id
        self.limit_counter: int | None = None
        self.limit_threshold: int | None = None
        self._counts = True  # each item as delivered; False: `_count` does

    def __next__(self) -> T_co:
        # All in one function: an item may be a single number, which takes little longer than the calls on its way.
        loader = self.dataloader
        try:
            with loader._reading:
                if self.iterator_id != loader.valid_iterator_id:
                    raise RuntimeError(_INVALIDATED)
                loader._reset_iter = True
                try:
                    if loader._is_paused or loader._interrupted or loader._to_drop:
                        loader._before_read()
                    source = loader._datapipe_iter
                    if source is None:
                        raise StopIteration
                    item: T_co = next(source)
                except PauseIteration:
                    raise StopIteration from None
                except StopIteration:
                    loader._end_epoch()
                    raise
                except Exception:
                    if self.iterator_id == loader.valid_iterator_id:
                        loader.shutdown()
                    raise
                if self.limit_threshold is not None:
                    self._count_to_limit(self.limit_threshold)
        except BaseException as error:
            # Ctrl-C, perhaps when the item was read already. The user may go on with the same iterator. The graph's
            # generators are over, so the epoch begins again then, behind the last item that was counted.
            valid = self.iterator_id == loader.valid_iterator_id
            if valid and not isinstance(error, Exception) and loader._delivered is not None:
                loader._interrupted = True
            raise
        # No calls from here on, so that Ctrl-C can come only before the item is counted, and it is read again then.
        if self._counts and self.iterator_id == loader.valid_iterator_id and loader._delivered is not None:
            loader._delivered += 1
        return item

    def _count(self) -> None:
        """Count an item as delivered: a loader that resumes from a state does not give it again."""
        loader = self.dataloader
        if self.iterator_id == loader.valid_iterator_id and loader._delivered is not None:
            loader._delivered += 1

    def _count_to_limit(self, limit: int) -> None:
        assert self.limit_counter is not None
        self.limit_counter += 1
        if self.limit_counter >= limit:
            self._pause()

    def _ready(self) -> bool:
        """Whether the next item has arrived, so that `next` waits for nothing and runs no code of the user's."""
        loader = self.dataloader
        valid = self.iterator_id == loader.valid_iterator_id and not loader._is_paused and not loader._to_drop
        return valid and has_next(loader._datapipe_iter)

    def _pause(self) -> None:
        """Pause: `next` raises StopIteration until `resume`."""
        self.dataloader._pause()

    def resume(self) -> None:
        """Go on after a pause. A limit counts from 0 again."""
        self.dataloader._resume()
        self.limit_counter = None if self.limit_threshold is None else 0

    def limit(self, num_batches: int | None) -> None:
        """Pause after this number of items, now and after each `resume`.

        Args:
            num_batches: from 1; None removes the limit.
        """
        self.limit_counter = None if num_batches is None else 0
        self.limit_threshold = num_batches
        self.dataloader._limit(num_batches)

    def __getattr__(self, name: str) -> Any:
        source = None if name.startswith("__") else vars(self)["dataloader"]._datapipe_iter
        if source is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(source, name)
