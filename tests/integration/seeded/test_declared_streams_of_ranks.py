"""Datasets with `loader_streams` on two ranks, which torch.distributed connects: each rank has streams of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.rank_group import RankGroup

LENGTHS = [[6, 2, 8], [6, 5, 0]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with RankGroup(2, tmp_path_factory.mktemp("two")) as group:
        yield group


@pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=["torch", "seeded"])
def test_the_numbers_of_workers_are_no_part_of_the_batches(two: RankGroup, options: dict[str, Any]) -> None:
    """Nor is a worker that is killed on one rank. In seeded mode the ranks end at the same step; in torch mode a
    stream's random numbers begin anew with each loader.
    """
    ranks = two("declared", LENGTHS, [2, 1, 3], victim=1, **options)
    known = 7 if options else 4
    for whole, parts in ranks:
        assert [[sample[:known] for sample in batch] for batch in parts] == [
            [sample[:known] for sample in batch] for batch in whole
        ]
    first, second = ([int(batch[0][0]) for batch in whole] for whole, _ in ranks)
    assert first == ([0, 1, 2, 0, 2, 0] if options else [0, 1, 2, 0, 2, 0, 2, 2])
    assert second == [0, 1, 0, 1, 0, 1]
    drawn = [{tuple(sample[4:]) for batch in whole for sample in batch} for whole, _ in ranks]
    assert len(drawn[0] | drawn[1]) == sum(len(batch) for whole, _ in ranks for batch in whole)
    assert two("left") == two.held


@pytest.mark.parametrize("declared", [True, False], ids=["streams", "workers"])
def test_ranks_with_other_numbers_of_streams(two: RankGroup, declared: bool) -> None:
    """Some of their streams would have the same random numbers."""
    for text in two("numbered", [[2, 2], [2]], declared=declared):
        assert text.startswith("rank 1 reads 1 stream, but rank 0 reads 2 streams: ")
        assert "the same num_workers; or datasets with the same loader_streams" in text
    assert two("numbered", [[2, 2], [2, 3]], declared=declared) == [""] * 2
    assert two("left") == two.held
