"""StatefulDataLoader: our loader under torchdata's name, with torchdata's meanings of a state.

Data path: options -> [stateful_loader] -> loader -> epoch/sync_iterator.py.

Users of `torchdata.stateful_dataloader.StatefulDataLoader` only change the import. The batches are the same from the
same seeds, shuffled ones too (except for ``generator=`` without workers, whose first number determines the order in
torchdata, and here the base seed, as in torch). States mean the same at every moment of an epoch. Their layout is ours
(`state/schema.py`); states of torchdata cannot be loaded.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from asyncloader.loaders.loader import DataLoader
from asyncloader.options.declaration import B_co, T_co, own_constructor
from asyncloader.samplers.generators import draws_when_iterated
from asyncloader.samplers.stateful import StatefulRandomSampler
from asyncloader.workers.fetch.dataset_kinds import is_async_stream


class StatefulDataLoader(DataLoader[T_co, B_co]):
    """`DataLoader` in torch mode whose ``shuffle=True`` resumes exactly, in later epochs too.

    Takes the arguments of `DataLoader` except those of seeded mode: `seed`, `rank`, `world_size`, `group`,
    `on_uneven`, and `balance`; its `workers` are processes or threads of this machine.

    ``iter()`` waits until the workers have begun, and raises an error of `worker_init_fn` or of the dataset's
    ``__iter__`` in a worker.

    A stream without a state of its own is read again from its beginning to resume it; delivered batches are dropped,
    with a warning that has their number (``Recovery(allow_replay=True)`` of `DataLoader`).

    Raises:
        ValueError, TypeError: as `DataLoader`.
    """

    _asyncloader_replays = True
    _asyncloader_awaits_workers = True

    def _asyncloader_construct(self, arguments: dict[str, Any]) -> None:
        dataset, given = arguments["dataset"], dict(arguments)
        streams = isinstance(dataset, (IterableDataset, IterDataPipe, MapDataPipe)) or is_async_stream(dataset)
        if given["shuffle"] and given["sampler"] is None and given["batch_sampler"] is None and not streams:
            sampler = StatefulRandomSampler(given["dataset"], generator=given["generator"])
            given |= {"sampler": sampler, "shuffle": None}
            self._asyncloader_shuffled = sampler  # so that a clone, perhaps of another dataset, makes its own
        super()._asyncloader_construct(given)

    def _asyncloader_workers_begin(self) -> None:
        # torchdata's iterator with workers calls `iter(batch_sampler)` twice and uses the second: a permutation is
        # drawn and dropped before each order.
        sampler: Any = getattr(self.batch_sampler, "sampler", None)
        if draws_when_iterated(sampler):
            iter(sampler)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at this position, as `DataLoader.load_state_dict`. Warns where a stream must be read again."""
        super().load_state_dict(state_dict)
        again = self._asyncloader_state.keeper.batches_to_replay
        if again:
            warnings.warn(
                f"neither the dataset nor its iterator has state_dict and load_state_dict: {again} batches that were "
                "delivered already will be read again, and dropped",
                stacklevel=2,
            )


own_constructor(
    StatefulDataLoader,
    "StatefulDataLoader",
    without=("seed", "rank", "world_size", "group", "on_uneven", "balance"),
)
