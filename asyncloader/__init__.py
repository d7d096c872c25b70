"""asyncloader: a data loader for PyTorch that moves batches through shared-memory rings, for ``for`` and ``async for``.

    from asyncloader import AsyncDataLoader, DataLoader

Names are looked up when first used: a worker process, which imports parts of this package, must not pay for the rest.
torch's own datasets, samplers and functions are re-exported as they are.
"""

from __future__ import annotations

import gc
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

from asyncloader.base.version import __version__ as __version__

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
        default_collate,
        default_convert,
        functional_datapipe,
        get_worker_info,
        random_split,
    )

    from asyncloader.base.events import SkippedSample
    from asyncloader.errors import (
        DeviceUnavailable,
        LoaderClosed,
        LoaderError,
        LoaderTimeout,
        NoEffectWarning,
        PageLockError,
        RanksDisagree,
        RingMemoryError,
        ServiceUnavailable,
        ShardError,
        ShardWriteError,
        StateError,
        TaskQuarantined,
        TooManySkippedSamples,
        UnsupportedPlatform,
        WorkerDied,
    )
    from asyncloader.loaders.async_loader import AsyncDataLoader
    from asyncloader.loaders.install import install
    from asyncloader.loaders.loader import DataLoader
    from asyncloader.loaders.stateful_loader import StatefulDataLoader
    from asyncloader.loaders.writing import write_shards
    from asyncloader.loaders.writing import write_shards_sync as write_shards_sync
    from asyncloader.options.objects import DeviceOptions, Recovery, Tuning
    from asyncloader.packing.collate import PackSequences as PackSequences
    from asyncloader.packing.packed_loader import PackedLoader as PackedLoader
    from asyncloader.packing.sampler import PackingSampler as PackingSampler
    from asyncloader.packing.sampler import SequenceRows as SequenceRows
    from asyncloader.packing.windows import JoinSequences as JoinSequences
    from asyncloader.remote.dataset import RemoteIterableDataset
    from asyncloader.remote.mixture import Mixture
    from asyncloader.remote.random_access.dataset import (
        RemoteMapDataset,
        index_shards,
    )
    from asyncloader.remote.random_access.dataset import (
        index_shards_sync as index_shards_sync,
    )
    from asyncloader.remote.shard_writing import WrittenShard
    from asyncloader.samplers.async_sampler import AsyncSampler
    from asyncloader.samplers.balance import Balance as Balance
    from asyncloader.samplers.by_length import (
        BucketBatchSampler as BucketBatchSampler,
    )
    from asyncloader.samplers.by_length import (
        TokenBudgetBatchSampler as TokenBudgetBatchSampler,
    )
    from asyncloader.samplers.mixture import MixtureSampler as MixtureSampler
    from asyncloader.samplers.seeded import SeededSampler as SeededSampler
    from asyncloader.samplers.stateful import (
        StatefulDistributedSampler as StatefulDistributedSampler,
    )
    from asyncloader.samplers.stateful import (
        StatefulRandomSampler as StatefulRandomSampler,
    )
    from asyncloader.service.protocol.address import Service as Service
    from asyncloader.service.protocol.batch_types import register_batch_type
    from asyncloader.service.protocol.definition import definition as definition
    from asyncloader.shared.layout import SharedDict, SharedList
    from asyncloader.shared.share import share
    from asyncloader.sources.lance_table import LanceTable as LanceTable
    from asyncloader.sources.litdata_folder import LitDataFolder as LitDataFolder
    from asyncloader.sources.megatron import MegatronTokens as MegatronTokens
    from asyncloader.sources.tokens import TokenFile as TokenFile
    from asyncloader.telemetry.diagnosis import Diagnosis
    from asyncloader.telemetry.metrics import Metric, MetricSample
    from asyncloader.telemetry.trace import Trace
    from asyncloader.workers.fetch.dataset_state import Stateful
    from asyncloader.workers.fetch.seeding import sample_rng as sample_rng
    from asyncloader.workers.fetch.worker_resource import worker_resource as worker_resource

# The names of each module.
_MODULES = {
    "errors": (
        "DeviceUnavailable LoaderClosed LoaderError LoaderTimeout NoEffectWarning "
        "PageLockError RanksDisagree RingMemoryError ServiceUnavailable ShardError ShardWriteError StateError "
        "TaskQuarantined TooManySkippedSamples UnsupportedPlatform WorkerDied"
    ),
    "base.events": "SkippedSample",
    "loaders.async_loader": "AsyncDataLoader",
    "loaders.install": "install",
    "loaders.loader": "DataLoader",
    "loaders.stateful_loader": "StatefulDataLoader",
    "loaders.writing": "write_shards write_shards_sync",
    "options.objects": "DeviceOptions Recovery Tuning",
    "packing.collate": "PackSequences",
    "packing.packed_loader": "PackedLoader",
    "packing.sampler": "PackingSampler SequenceRows",
    "packing.windows": "JoinSequences",
    "remote.dataset": "RemoteIterableDataset",
    "remote.mixture": "Mixture",
    "remote.random_access.dataset": "RemoteMapDataset index_shards index_shards_sync",
    "remote.shard_writing": "WrittenShard",
    "samplers.async_sampler": "AsyncSampler",
    "samplers.balance": "Balance",
    "samplers.by_length": "BucketBatchSampler TokenBudgetBatchSampler",
    "samplers.mixture": "MixtureSampler",
    "samplers.seeded": "SeededSampler",
    "samplers.stateful": "StatefulDistributedSampler StatefulRandomSampler",
    "service.protocol.definition": "definition",
    "service.protocol.address": "Service",
    "service.protocol.batch_types": "register_batch_type",
    "shared.layout": "SharedDict SharedList",
    "shared.share": "share",
    "sources.lance_table": "LanceTable",
    "sources.litdata_folder": "LitDataFolder",
    "sources.megatron": "MegatronTokens",
    "sources.tokens": "TokenFile",
    "telemetry.diagnosis": "Diagnosis",
    "telemetry.metrics": "Metric MetricSample",
    "telemetry.trace": "Trace",
    "workers.fetch.dataset_state": "Stateful",
    "workers.fetch.seeding": "sample_rng",
    "workers.fetch.worker_resource": "worker_resource",
}
_OWN = {name: f"asyncloader.{module}" for module, names in _MODULES.items() for name in names.split()}

_TORCHS = {
    "_DatasetKind",
    "argument_validation",
    "guaranteed_datapipes_determinism",
    "non_deterministic",
    "runtime_validation",
    "runtime_validation_disabled",
}

# The names to know first; the rest of `_OWN` and `_TORCHS` is imported from here, too.
__all__ = [
    "AsyncDataLoader",
    "AsyncSampler",
    "BatchSampler",
    "ChainDataset",
    "ConcatDataset",
    "DFIterDataPipe",
    "DataChunk",
    "DataLoader",
    "Dataset",
    "DeviceOptions",
    "DeviceUnavailable",
    "Diagnosis",
    "DistributedSampler",
    "IterDataPipe",
    "IterableDataset",
    "LoaderClosed",
    "LoaderError",
    "LoaderTimeout",
    "MapDataPipe",
    "Metric",
    "MetricSample",
    "Mixture",
    "NoEffectWarning",
    "PageLockError",
    "RandomSampler",
    "RanksDisagree",
    "Recovery",
    "RemoteIterableDataset",
    "RemoteMapDataset",
    "RingMemoryError",
    "Sampler",
    "SequentialSampler",
    "ServiceUnavailable",
    "ShardError",
    "ShardWriteError",
    "SharedDict",
    "SharedList",
    "SkippedSample",
    "StackDataset",
    "StateError",
    "Stateful",
    "StatefulDataLoader",
    "Subset",
    "SubsetRandomSampler",
    "TaskQuarantined",
    "TensorDataset",
    "TooManySkippedSamples",
    "Trace",
    "Tuning",
    "UnsupportedPlatform",
    "WeightedRandomSampler",
    "WorkerDied",
    "WrittenShard",
    "default_collate",
    "default_convert",
    "functional_datapipe",
    "get_worker_info",
    "index_shards",
    "install",
    "random_split",
    "register_batch_type",
    "share",
    "write_shards",
]


def __getattr__(name: str) -> Any:
    if name not in __all__ and name not in _OWN and name not in _TORCHS:
        gone = ": it is gone, use asyncloader.install()" if name == "NeverIteratedWarning" else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{gone}")
    if sys.platform == "win32" and name == "install":
        from asyncloader.errors import NO_PROCESSES, UnsupportedPlatform

        raise UnsupportedPlatform(f"install() would give {NO_PROCESSES}")
    value = globals()[name] = getattr(_imported(_OWN.get(name, "torch.utils.data")), name)
    return value


def _imported(module: str) -> Any:
    # Modules live as long as the process, but each object that they make brings a full collection nearer. With torch
    # imported that takes 60 ms, as long as the imports, and finds none of them. Only if no other thread could fork
    # at that time, as its child would be left without a collector.
    pauses = gc.isenabled() and threading.active_count() == 1
    try:
        if pauses:
            gc.disable()
        return import_module(module)
    finally:
        if pauses:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_OWN})
