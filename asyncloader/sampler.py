"""Samplers that are asynchronous: what they must offer, and how their indices become batches.

Data path: [sampler] -> scheduler.

A plain sampler is torch's business and is advanced as torch does it: in the caller's thread, once a delivery. An async
one may wait (for a queue, a server, feedback), so it is read ahead by a task of the loop, as far as credits allow.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator
from typing import Any, Protocol, TypeGuard, runtime_checkable

from torch.utils.data import BatchSampler

__all__ = ["AsyncIndexSource", "AsyncSampler", "as_async_source", "is_async_sampler"]


@runtime_checkable
class AsyncSampler(Protocol):
    """An async iterable of indices (as `sampler`) or of lists of indices (as `batch_sampler`).

    Each ``aiter()`` begins an epoch. A `__len__` is optional; without it ``len(loader)`` is a TypeError.
    """

    def __aiter__(self) -> AsyncIterator[Any]: ...


def is_async_sampler(sampler: object) -> TypeGuard[AsyncIterable[Any]]:
    """Whether it can only be read with ``async for``."""
    return hasattr(type(sampler), "__aiter__") and not hasattr(type(sampler), "__iter__")


class AsyncIndexSource:
    """What the scheduler is fed from when the sampler is async: single indices, the user's batches, or batches of ours.

    Args:
        sampler: an async iterable.
        batch_size: gather as many indices into a list; None to pass on what the sampler gives.
        drop_last: leave out a last short batch.
    """

    def __init__(self, sampler: AsyncIterable[Any], batch_size: int | None, drop_last: bool) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[Any]:
        """Nothing: torch's machinery asks for a plain iterator, which an async sampler does not have."""
        return iter(())

    def __len__(self) -> int:
        length = len(self.sampler)  # type: ignore[arg-type]
        if self.batch_size is None:
            return length
        return length // self.batch_size if self.drop_last else -(-length // self.batch_size)

    async def __aiter__(self) -> AsyncIterator[Any]:
        indices = aiter(self.sampler)
        batch: list[Any] = []
        try:
            async for index in indices:
                if self.batch_size is None:
                    yield index
                    continue
                batch.append(index)
                if len(batch) == self.batch_size:
                    yield batch
                    batch = []
            if batch and not self.drop_last:
                yield batch
        finally:
            # Closed with this generator, rather than whenever the loop finds it abandoned.
            if isinstance(indices, AsyncGenerator):
                await indices.aclose()


def as_async_source(index_sampler: Any) -> AsyncIndexSource | None:
    """The async source behind a loader's index sampler, None when the sampler is a plain one."""
    if type(index_sampler) is BatchSampler and is_async_sampler(index_sampler.sampler):
        return AsyncIndexSource(index_sampler.sampler, index_sampler.batch_size, index_sampler.drop_last)
    if is_async_sampler(index_sampler):
        return AsyncIndexSource(index_sampler, None, False)
    return None
