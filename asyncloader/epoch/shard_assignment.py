"""Plans the shard assignment of an epoch before its workers start.

Data path: options -> [shard_assignment: plan, assigner] -> pipeline. Of fixed streams it counts the
samples; for datasets that the main process does not plan it does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncloader.samplers.position_source import PositionSource
from asyncloader.state.progress import Progress
from asyncloader.workers.fetch.assignment_client import AssignmentSource
from asyncloader.workers.fetch.seeding import derive
from asyncloader.workers.fetch.setup import EpochStart

# `asyncloader.remote` and the formats of shards are imported late, by epochs that have shards to assign.
if TYPE_CHECKING:
    from asyncloader.remote.assignment_state import EpochAssignment
    from asyncloader.remote.rank_shares import EpochPlan
    from asyncloader.remote.worker_stream import LocalAssignments


async def open_assignment(
    progress: Progress, starts: Sequence[EpochStart]
) -> tuple[EpochAssignment | None, Sequence[EpochStart]]:
    """Plan an epoch.

    Args:
        progress: of the epoch, with its options; saves the assignment from now on.
        starts: where each worker begins; a single one for the main process.

    Returns:
        The epoch's assignment, None for other datasets; and the starts, with the seeds of the shuffle buffers.

    Raises:
        StateError: the epoch resumes from a state of other shards.
        ValueError, TransportError, ShardError: there are no shards, or they cannot be listed.
    """
    config = progress.config
    if isinstance(config.source, PositionSource):
        await config.source.plan(progress)
    if not config.assigns_shards:
        return None, starts
    from asyncloader.remote.assignment_state import EpochAssignment, saved_key, stream_key
    from asyncloader.remote.shard_list import list_in_words
    from asyncloader.remote.shard_splitting import RANGES_PER_WORKER

    dataset, here, workers = config.dataset, config.topology, len(starts)
    saved = progress.saved_assignment
    # An epoch that resumes keeps the key of its first run, from which its shards were shared out.
    key = progress.assignment_key if saved is None else saved_key(saved)
    assert key is not None
    plan: EpochPlan = await dataset.plan(
        workers, here.rank, here.world_size, derive(key, "shards"), common=config.seeded
    )
    assignments = EpochAssignment(
        dataset.shard_urls,
        plan,
        starts,
        saved,
        key=key,
        ordered=config.in_order,
        shuffle=getattr(dataset, "shuffle_buffer", 0),
    )
    progress.assignment = assignments
    if progress.agreement is not None:
        reads = list_in_words(dataset.shard_urls)
        # How many shards are cut, and in seeded mode the samples' random numbers, depend on the workers of a rank.
        if config.seeded or len(dataset.shard_urls) < RANGES_PER_WORKER * workers * here.world_size:
            reads += f" by {workers} workers" if workers > 1 else " by 1 worker"
        progress.agreement.reads = reads
    return assignments, [
        start._replace(stream_key=stream_key(key, here.rank, workers, worker)) for worker, start in enumerate(starts)
    ]


class InlineAssignments:
    """`AssignmentProvider` of a reader in the main process.

    Args:
        progress: of the epoch.
        start: where the reader begins.
    """

    def __init__(self, progress: Progress, start: EpochStart) -> None:
        self._arguments = progress, [start]
        self._source: LocalAssignments | None = None

    async def prepare(self) -> None:
        """Plan the epoch; errors as `open_assignment`."""
        assignments, (start,) = await open_assignment(*self._arguments)
        if assignments is not None:
            from asyncloader.remote.worker_stream import LocalAssignments

            self._source = LocalAssignments(assignments.assigner, start.stream_key)

    def source(self, _: EpochStart) -> AssignmentSource:
        """Return the reader's source. As `AssignmentProvider.source`."""
        assert self._source is not None, "prepare() was not awaited"
        return self._source
