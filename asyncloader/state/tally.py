"""Counts the samples that were dropped or repeated to keep the ranks even.

Data path: progress -> [tally] -> statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncloader.remote.assignment_state import EpochAssignment
    from asyncloader.samplers.distributed import RankView


class Tally:
    """Counts samples that were dropped or repeated to keep the ranks even, over all ranks and completed epochs."""

    def __init__(self) -> None:
        self.dropped = 0
        self.repeated = 0

    def add(self, view: RankView | None, assignment: EpochAssignment | None, steps: int, batch_size: int) -> None:
        """Add a completed epoch.

        Args:
            view: this rank's share of a sampler's order; None for streams, and outside seeded mode.
            assignment: of a stream whose shards are assigned; None for others.
            steps: batches of each rank.
            batch_size: their size.
        """
        if view is not None:
            _, dropped, repeated = view.tail()
            self.dropped += dropped
            self.repeated += repeated
        elif assignment is not None:
            self.dropped += assignment.shares.dropped(steps, batch_size)

    def snapshot(self) -> dict[str, float]:
        """For `stats()`."""
        return {"dropped_samples": self.dropped, "repeated_samples": self.repeated}
