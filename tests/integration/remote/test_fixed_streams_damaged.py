"""Damaged shards of fixed streams: what each costs, and that the same samples are lost wherever a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.remote_folders import dataset_of, flat, make_shards, number_of, plain
from tests.helpers.seeded_runs import Stepwise

pytestmark = pytest.mark.independent


@pytest.mark.parametrize("step", [0, 3, 4])
def test_a_missing_shard_costs_its_own_samples(step: int, tmp_path: Path) -> None:
    """A block that begins in a missing MDS shard and ends in the next has the samples of the next."""
    url = make_shards(tmp_path, (9, 13), ending="mds")
    (tmp_path / "shard.00000.mds").unlink()
    options = {"batch_size": 2, "seed": 3, "on_error": lambda error, index: -1}
    dataset = dataset_of(url, streams=1, decode=number_of)
    with Stepwise("sync", dataset, **options) as run:
        run.begin()
        head = [plain(batch) for batch in run.take(step)]
        state = run.loader.state_dict()
    with Stepwise("sync", dataset, **options) as run:
        run.loader.load_state_dict(state)
        found = flat(head + [plain(batch) for batch in run.epoch()])
    assert sorted(found) == [-1] * 9 + [*range(9, 22)]
