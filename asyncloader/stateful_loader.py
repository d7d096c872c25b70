"""StatefulDataLoader: our loader under torchdata's name, with torchdata's meanings of a state.

Data path: options -> [stateful_loader] -> loader -> epoch/sync_iterator.py.

Users of `torchdata.stateful_dataloader.StatefulDataLoader` only change the import. The batches are the same from the
same seeds, shuffled ones too (except for ``generator=`` without workers, whose first number determines the order in
torchdata, and here the base seed, as in torch). States mean the same at every moment of an epoch. Their layout is ours
(`state/schema.py`); states of torchdata cannot be loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, IterDataPipe, MapDataPipe

from asyncloader.delivery.transfer import DEFAULT_PREFETCH_DEVICE, DeviceLike
from asyncloader.loader import DataLoader
from asyncloader.options import DEFAULT_CONCURRENCY, DEFAULT_MAX_BAD_SAMPLES, OnError
from asyncloader.samplers.generators import draws_when_iterated
from asyncloader.samplers.stateful import StatefulRandomSampler

__all__ = ["StatefulDataLoader"]

T_co = TypeVar("T_co", covariant=True)


class StatefulDataLoader(DataLoader[T_co]):
    """`DataLoader` in torch mode whose ``shuffle=True`` resumes exactly, in later epochs too.

    Takes torch's arguments, then by keyword:

    Args:
        snapshot_every_n_steps: stateful samplers and streams are asked for their states every so many batches (default
            1); a resumed loader reads and drops the batches since. 0 or None: never.
        ring_bytes, concurrency, fetch_threads, decode, decode_threads: see `DataLoader`.
        worker_timeout, max_worker_restarts, on_error, max_bad_samples, worker_memory_limit: see `DataLoader`.
        device, prefetch_device, device_transform, static_buffers: see `DataLoader`.

    ``iter()`` waits until the workers have begun, and raises an error of `worker_init_fn` or of the dataset's
    ``__iter__`` in a worker.

    A stream without a state of its own is read again from its beginning to resume it; what was delivered is dropped,
    with a warning that says how much (``resume="replay"`` of `DataLoader`).

    Raises:
        ValueError, TypeError: as `DataLoader`.
    """

    _asyncloader_replays = True
    _asyncloader_awaits_workers = True

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Any = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Any = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int | None = 1,
        ring_bytes: int | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        fetch_threads: int = 0,
        decode: Callable[[Any], Any] | None = None,
        decode_threads: int = 1,
        worker_timeout: float | None = None,
        max_worker_restarts: int | None = None,
        on_error: OnError = "raise",
        max_bad_samples: int | None = DEFAULT_MAX_BAD_SAMPLES,
        worker_memory_limit: int | None = None,
        device: DeviceLike = None,
        prefetch_device: int = DEFAULT_PREFETCH_DEVICE,
        device_transform: Callable[[Any], Any] | None = None,
        static_buffers: bool = False,
    ) -> None:
        streams = isinstance(dataset, (IterableDataset, IterDataPipe, MapDataPipe))
        if shuffle and sampler is None and batch_sampler is None and not streams:
            sampler, shuffle = StatefulRandomSampler(dataset, generator=generator), None  # type: ignore[arg-type]
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
            snapshot_every_n_steps=snapshot_every_n_steps,
            ring_bytes=ring_bytes,
            concurrency=concurrency,
            fetch_threads=fetch_threads,
            decode=decode,
            decode_threads=decode_threads,
            worker_timeout=worker_timeout,
            max_worker_restarts=max_worker_restarts,
            on_error=on_error,
            max_bad_samples=max_bad_samples,
            worker_memory_limit=worker_memory_limit,
            device=device,
            prefetch_device=prefetch_device,
            device_transform=device_transform,
            static_buffers=static_buffers,
        )

    def _asyncloader_workers_begin(self) -> None:
        # torchdata's iterator with workers calls `iter(batch_sampler)` twice and uses the second: a permutation is
        # drawn and dropped before each order.
        sampler: Any = getattr(self.batch_sampler, "sampler", None)
        if draws_when_iterated(sampler):
            iter(sampler)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `DataLoader.load_state_dict`. Warns where a stream must be read again."""
        super().load_state_dict(state_dict)
        again = self._asyncloader_state.keeper.batches_to_replay
        if again:
            warnings.warn(
                f"neither the dataset nor its iterator has state_dict and load_state_dict: {again} batches that were "
                "delivered already will be read again, and dropped",
                stacklevel=2,
            )
