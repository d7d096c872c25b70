"""asyncloader: a data loader for PyTorch that moves batches through shared-memory rings, for ``for`` and ``async for``.

    from asyncloader import AsyncDataLoader, DataLoader

Names are looked up when first used: a worker process, which imports parts of this package, must not pay for the rest.
torch's own datasets, samplers and functions are re-exported as they are.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import (
        BatchSampler as BatchSampler,
    )
    from torch.utils.data import (
        ChainDataset as ChainDataset,
    )
    from torch.utils.data import (
        ConcatDataset as ConcatDataset,
    )
    from torch.utils.data import (
        Dataset as Dataset,
    )
    from torch.utils.data import (
        DistributedSampler as DistributedSampler,
    )
    from torch.utils.data import (
        IterableDataset as IterableDataset,
    )
    from torch.utils.data import (
        RandomSampler as RandomSampler,
    )
    from torch.utils.data import (
        Sampler as Sampler,
    )
    from torch.utils.data import (
        SequentialSampler as SequentialSampler,
    )
    from torch.utils.data import (
        StackDataset as StackDataset,
    )
    from torch.utils.data import (
        Subset as Subset,
    )
    from torch.utils.data import (
        SubsetRandomSampler as SubsetRandomSampler,
    )
    from torch.utils.data import (
        TensorDataset as TensorDataset,
    )
    from torch.utils.data import (
        WeightedRandomSampler as WeightedRandomSampler,
    )
    from torch.utils.data import (
        default_collate as default_collate,
    )
    from torch.utils.data import (
        default_convert as default_convert,
    )
    from torch.utils.data import (
        get_worker_info as get_worker_info,
    )
    from torch.utils.data import (
        random_split as random_split,
    )

    from asyncloader.async_loader import AsyncDataLoader as AsyncDataLoader
    from asyncloader.errors import (
        LoaderClosed as LoaderClosed,
    )
    from asyncloader.errors import (
        LoaderError as LoaderError,
    )
    from asyncloader.errors import (
        LoaderTimeout as LoaderTimeout,
    )
    from asyncloader.errors import (
        RingMemoryError as RingMemoryError,
    )
    from asyncloader.errors import (
        UnsupportedPlatform as UnsupportedPlatform,
    )
    from asyncloader.errors import (
        WorkerDied as WorkerDied,
    )
    from asyncloader.loader import DataLoader as DataLoader
    from asyncloader.sampler import AsyncSampler as AsyncSampler

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

_TORCH = [
    "BatchSampler",
    "ChainDataset",
    "ConcatDataset",
    "Dataset",
    "DistributedSampler",
    "IterableDataset",
    "RandomSampler",
    "Sampler",
    "SequentialSampler",
    "StackDataset",
    "Subset",
    "SubsetRandomSampler",
    "TensorDataset",
    "WeightedRandomSampler",
    "default_collate",
    "default_convert",
    "get_worker_info",
    "random_split",
]

__all__ = sorted([*_OWN, *_TORCH])  # noqa: PLE0605 - a list of names, made once


def __getattr__(name: str) -> Any:
    module = _OWN.get(name, "torch.utils.data" if name in _TORCH else None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
