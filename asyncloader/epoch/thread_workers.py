"""Serves loaders whose multiprocessing context makes threads: torch's own iterator with workers reads them.

Data path: options -> [thread_workers] -> the user.

Our workers need a process: memory, signals and descriptors of their own, and the possibility to be killed when they
hang. torch's workers can run in a thread, so such a loader keeps giving torch's batches at torch's speed. Options that
torch does not know are refused.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from asyncloader.options.auto import makes_threads
from asyncloader.options.declaration import LoaderSpec, async_index_source, given_options
from asyncloader.workers.fetch.dataset_kinds import is_async_dataset
from asyncloader.workers.fetch.dataset_streams import count_streams

_INSTEAD = (
    'use processes ("fork", "spawn" or "forkserver"), or num_workers=0 with concurrency=, which are threads of this '
    "process"
)


def has_thread_workers(spec: LoaderSpec[Any]) -> bool:
    """Whether the loader's multiprocessing context makes threads."""
    context: Any = spec.multiprocessing_context
    if context is None or not spec.num_workers:
        return False
    # The usual case without a call: this runs in each epoch.
    return (
        issubclass(context.Process, threading.Thread) if isinstance(context.Process, type) else makes_threads(context)
    )


class ThreadIterator(_MultiProcessingDataLoaderIter):
    """torch's iterator with workers, over a loader of ours whose workers are threads. Warns when it is made.

    Raises:
        ValueError: the loader has options, or a dataset or sampler, that torch does not support.
    """

    def __init__(self, loader: LoaderSpec[Any]) -> None:
        unknown = given_options(loader)
        if is_async_dataset(loader.dataset):
            unknown.append("an async dataset")
        if async_index_source(loader) is not None:
            unknown.append("an async sampler")
        if isinstance(loader.dataset, IterableDataset) and count_streams(loader.dataset) is not None:
            unknown.append("a dataset with loader_streams")
        if unknown:
            self._shutdown = True  # there is nothing to shut down
            raise ValueError(refusal(loader, f"know no {', '.join(unknown)}"))
        warnings.warn(
            f"{_reason(loader)}: the batches are torch's, stats() does not count them, and state_dict() is empty. For "
            f"more, {_INSTEAD}",
            RuntimeWarning,
            stacklevel=4,
        )
        super().__init__(loader)


def refusal(spec: LoaderSpec[Any], what: str) -> str:
    """Why a loader whose workers are threads cannot have this, and what to use instead."""
    return f"{_reason(spec)}, which {what}: {_INSTEAD}"


def _reason(spec: LoaderSpec[Any]) -> str:
    return f"multiprocessing_context={spec.multiprocessing_context!r} makes threads, so torch's own workers serve it"
