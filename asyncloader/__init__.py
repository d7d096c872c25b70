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
        DataChunk,
        Dataset,
        DFIterDataPipe,
        DistributedSampler,
        IterableDataset,
        IterDataPipe,
        MapDataPipe,
        RandomSampler,
        Sampler,
        SequentialSampler,
        StackDataset,
        Subset,
        SubsetRandomSampler,
        TensorDataset,
        WeightedRandomSampler,
        _DatasetKind,
        argument_validation,
        default_collate,
        default_convert,
        functional_datapipe,
        get_worker_info,
        guaranteed_datapipes_determinism,
        non_deterministic,
        random_split,
        runtime_validation,
        runtime_validation_disabled,
    )

    from asyncloader.async_loader import AsyncDataLoader
    from asyncloader.errors import (
        DeviceUnavailable,
        LoaderClosed,
        LoaderError,
        LoaderTimeout,
        NeverIteratedWarning,
        PageLockError,
        RanksDisagree,
        RingMemoryError,
        ShardError,
        StateError,
        TaskQuarantined,
        TooManyBadSamples,
        UnsupportedPlatform,
        WorkerDied,
    )
    from asyncloader.length_batches import BucketBatchSampler, TokenBudgetBatchSampler
    from asyncloader.loader import DataLoader
    from asyncloader.mixture import MixtureSampler
    from asyncloader.patching import install
    from asyncloader.remote.dataset import RemoteIterableDataset
    from asyncloader.sampler import AsyncSampler
    from asyncloader.seeded_sampler import SeededSampler
    from asyncloader.sharing import SharedDict, SharedList, share
    from asyncloader.stateful_loader import StatefulDataLoader
    from asyncloader.stateful_samplers import StatefulDistributedSampler, StatefulRandomSampler
    from asyncloader.workers.bad_samples import BadSample
    from asyncloader.workers.cursor import Stateful
    from asyncloader.workers.seeding import sample_rng

__version__ = "0.1.0"

_OWN = {
    "AsyncDataLoader": "asyncloader.async_loader",
    "AsyncSampler": "asyncloader.sampler",
    "BadSample": "asyncloader.workers.bad_samples",
    "BucketBatchSampler": "asyncloader.length_batches",
    "DataLoader": "asyncloader.loader",
    "DeviceUnavailable": "asyncloader.errors",
    "LoaderClosed": "asyncloader.errors",
    "LoaderError": "asyncloader.errors",
    "LoaderTimeout": "asyncloader.errors",
    "MixtureSampler": "asyncloader.mixture",
    "NeverIteratedWarning": "asyncloader.errors",
    "PageLockError": "asyncloader.errors",
    "RanksDisagree": "asyncloader.errors",
    "RemoteIterableDataset": "asyncloader.remote.dataset",
    "RingMemoryError": "asyncloader.errors",
    "SeededSampler": "asyncloader.seeded_sampler",
    "ShardError": "asyncloader.errors",
    "SharedDict": "asyncloader.sharing",
    "SharedList": "asyncloader.sharing",
    "StateError": "asyncloader.errors",
    "Stateful": "asyncloader.workers.cursor",
    "StatefulDataLoader": "asyncloader.stateful_loader",
    "StatefulDistributedSampler": "asyncloader.stateful_samplers",
    "StatefulRandomSampler": "asyncloader.stateful_samplers",
    "TaskQuarantined": "asyncloader.errors",
    "TokenBudgetBatchSampler": "asyncloader.length_batches",
    "TooManyBadSamples": "asyncloader.errors",
    "UnsupportedPlatform": "asyncloader.errors",
    "WorkerDied": "asyncloader.errors",
    "install": "asyncloader.patching",
    "sample_rng": "asyncloader.workers.seeding",
    "share": "asyncloader.sharing",
}

__all__ = [
    "AsyncDataLoader",
    "AsyncSampler",
    "BadSample",
    "BatchSampler",
    "BucketBatchSampler",
    "ChainDataset",
    "ConcatDataset",
    "DFIterDataPipe",
    "DataChunk",
    "DataLoader",
    "Dataset",
    "DeviceUnavailable",
    "DistributedSampler",
    "IterDataPipe",
    "IterableDataset",
    "LoaderClosed",
    "LoaderError",
    "LoaderTimeout",
    "MapDataPipe",
    "MixtureSampler",
    "NeverIteratedWarning",
    "PageLockError",
    "RandomSampler",
    "RanksDisagree",
    "RemoteIterableDataset",
    "RingMemoryError",
    "Sampler",
    "SeededSampler",
    "SequentialSampler",
    "ShardError",
    "SharedDict",
    "SharedList",
    "StackDataset",
    "StateError",
    "Stateful",
    "StatefulDataLoader",
    "StatefulDistributedSampler",
    "StatefulRandomSampler",
    "Subset",
    "SubsetRandomSampler",
    "TaskQuarantined",
    "TensorDataset",
    "TokenBudgetBatchSampler",
    "TooManyBadSamples",
    "UnsupportedPlatform",
    "WeightedRandomSampler",
    "WorkerDied",
    "_DatasetKind",
    "argument_validation",
    "default_collate",
    "default_convert",
    "functional_datapipe",
    "get_worker_info",
    "guaranteed_datapipes_determinism",
    "install",
    "non_deterministic",
    "random_split",
    "runtime_validation",
    "runtime_validation_disabled",
    "sample_rng",
    "share",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if sys.platform == "win32" and name in ("AsyncDataLoader", "DataLoader", "StatefulDataLoader", "install"):
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
