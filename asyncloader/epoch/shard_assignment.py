"""Plans which shards each worker reads in an epoch, before its workers start, and keeps the assignments.

Data path: options -> [shard_assignment] -> pipeline. Only for datasets whose shards are assigned to workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncloader.options import LoaderSpec
from asyncloader.remote.assignment_state import EpochLeases, saved_key, stream_key
from asyncloader.remote.worker_stream import LocalLeases
from asyncloader.samplers.distributed import topology
from asyncloader.state.progress import Progress
from asyncloader.workers.fetch.assignment_client import LeaseSource, is_leased
from asyncloader.workers.fetch.seeding import derive
from asyncloader.workers.fetch.setup import EpochStart

__all__ = ["InlineLeases", "open_leases"]


async def open_leases(
    spec: LoaderSpec[Any], progress: Progress, starts: Sequence[EpochStart]
) -> tuple[EpochLeases | None, Sequence[EpochStart]]:
    """Plan an epoch.

    Args:
        spec: the loader.
        progress: of the epoch; saves the leases from now on.
        starts: what each worker begins with; one for the consumer's own process.

    Returns:
        The leases, None where the dataset is not leased out; the starts, with what belongs to that.

    Raises:
        StateError: the epoch resumes from a state with other shards.
        ValueError, TransportError, ShardError: there are no shards, or they cannot be listed.
    """
    dataset: Any = spec.dataset
    if not is_leased(dataset):
        return None, starts
    here, lanes = topology(spec), len(starts)
    saved = progress.saved_leases
    key = progress.leases_key if saved is None else saved_key(saved)
    assert key is not None
    plan = await dataset.plan(
        lanes, here.rank, here.world_size, derive(key, "shards"), common=spec._asyncloader_options.seed is not None
    )
    leases = EpochLeases(
        dataset.shard_urls,
        plan,
        starts,
        saved,
        key=key,
        ordered=spec.in_order,
        shuffle=getattr(dataset, "shuffle_buffer", 0),
    )
    progress.leases = leases
    return leases, [
        start._replace(stream_key=stream_key(key, here.rank, lanes, lane)) for lane, start in enumerate(starts)
    ]


class InlineLeases:
    """Leases for a reader in the consumer's process.

    Args:
        spec: the loader.
        progress: of the epoch.
        start: what the reader begins with.
    """

    def __init__(self, spec: LoaderSpec[Any], progress: Progress, start: EpochStart) -> None:
        self._arguments = spec, progress, [start]
        self._source: LocalLeases | None = None

    async def prepare(self) -> None:
        """Plan the epoch; errors as `open_leases`."""
        leases, (start,) = await open_leases(*self._arguments)
        if leases is not None:
            self._source = LocalLeases(leases.book, start.stream_key)

    def source(self, _: EpochStart) -> LeaseSource:
        """The reader's leases."""
        assert self._source is not None, "prepare() was not awaited"
        return self._source
