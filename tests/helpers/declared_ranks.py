"""What a rank of `ranks_script.py` does for the tests of datasets with `loader_streams`."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import torch

from asyncloader.errors import RanksDisagree
from tests.helpers.declared_streams import Streams
from tests.helpers.seeded_runs import Stepwise


class Declared:
    """The function that a test may call, of one rank."""

    rank: int

    def declared(
        self, lengths: list[list[int]], parts: list[int], *, victim: int, **options: Any
    ) -> tuple[list[Any], list[Any]]:
        """Return an epoch of this rank's declared streams that is read without workers; and one in which a new loader
        goes on after each two batches, with another number of workers.

        Args:
            lengths: of each rank's streams.
            parts: the loaders' numbers of workers.
            victim: the rank of which a worker of each loader is killed.
            options: the loaders'.
        """
        options = {"batch_size": 2, **options}
        torch.manual_seed(1000 + self.rank)
        with Stepwise("sync", Streams(lengths[self.rank]), **options) as run:
            whole = run.epoch()
        torch.manual_seed(1000 + self.rank)
        got: list[Any] = []
        state: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of workers that are many, or replaced
            for workers in parts:
                options |= {"num_workers": workers, "max_worker_restarts": 1}
                with Stepwise("sync", Streams(lengths[self.rank]), **options) as run:
                    run.loader.load_state_dict(state)
                    run.begin()
                    if workers and self.rank == victim:
                        os.kill(run.iterator._workers[0].pid, signal.SIGKILL)
                    got += run.take(2)
                    # The first batch of all is that worker's.
                    killed = workers and self.rank == victim and not state
                    assert not killed or run.loader.stats()["data/worker_restarts"] == 1
                    state = run.loader.state_dict()
                    if len(got) == 2 * len(parts):
                        got += run.rest()
        return [batch.tolist() for batch in whole], [batch.tolist() for batch in got]

    def numbered(self, lengths: list[list[int]], *, declared: bool) -> str:
        """Read streams of these lengths in seeded mode. Returns the error.

        Args:
            lengths: of each rank's streams.
            declared: whether the dataset says their number, and is read without workers; otherwise each worker reads
                one.
        """
        mine = lengths[self.rank]
        dataset = Streams(mine) if declared else Streams(mine, loader_streams=None)
        try:
            with Stepwise("sync", dataset, seed=3, num_workers=0 if declared else len(mine)) as run:
                run.epoch()
        except RanksDisagree as error:
            return str(error)
        return ""
