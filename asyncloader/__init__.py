"""asyncloader: a data loader for PyTorch that moves batches through shared-memory rings, for ``for`` and ``async for``.

    from asyncloader import AsyncDataLoader, DataLoader

Names are looked up when first used: a worker process, which imports parts of this package, must not pay for the rest.
torch's own datasets, samplers and functions are re-exported as they are.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import (
        BatchSampler,
        ChainDataset,
        ConcatDataset,
        Dataset,
        DistributedSampler,
        IterableDataset,
        RandomSampler,
        Sampler,
        SequentialSampler,
        StackDataset,
        Subset,
        SubsetRandomSampler,
        TensorDataset,
        WeightedRandomSampler,
        default_collate,
        default_convert,
        get_worker_info,
        random_split,
    )

    from asyncloader.async_loader import AsyncDataLoader
    from asyncloader.errors import (
        LoaderClosed,
        LoaderError,
        LoaderTimeout,
        RingMemoryError,
        UnsupportedPlatform,
        WorkerDied,
    )
    from asyncloader.loader import DataLoader
    from asyncloader.sampler import AsyncSampler

__version__ = "0.1.0"

_OWN = {
    "AsyncDataLoader": "asyncloader.async_loader",
    "AsyncSampler": "asyncloader.sampler",
    "DataLoader": "asyncloader.loader",
    "LoaderClosed": "asyncloader.errors",
    "LoaderError": "asyncloader.errors",
    "LoaderTimeout": "asyncloader.errors",
    "RingMemoryError": "asyncloader.errors",
    "UnsupportedPlatform": "asyncloader.errors",
    "WorkerDied": "asyncloader.errors",
}

__all__ = [
    "AsyncDataLoader",
    "AsyncSampler",
    "BatchSampler",
    "ChainDataset",
    "ConcatDataset",
    "DataLoader",
    "Dataset",
    "DistributedSampler",
    "IterableDataset",
    "LoaderClosed",
    "LoaderError",
    "LoaderTimeout",
    "RandomSampler",
    "RingMemoryError",
    "Sampler",
    "SequentialSampler",
    "StackDataset",
    "Subset",
    "SubsetRandomSampler",
    "TensorDataset",
    "UnsupportedPlatform",
    "WeightedRandomSampler",
    "WorkerDied",
    "default_collate",
    "default_convert",
    "get_worker_info",
    "random_split",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if sys.platform == "win32" and name in ("AsyncDataLoader", "DataLoader"):
        from asyncloader.errors import UnsupportedPlatform

        raise UnsupportedPlatform(
            "asyncloader's workers need Unix sockets that pass file descriptors, which Windows does not have. "
            "Use torch.utils.data.DataLoader here, or run under WSL."
        )
    value = getattr(import_module(_OWN.get(name, "torch.utils.data")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
