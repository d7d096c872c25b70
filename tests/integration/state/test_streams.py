"""States of loaders over streams: cursors that travel with the batches, replay where no cursors exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from asyncloader import Recovery, StateError
from tests.helpers.comparing import assert_same
from tests.helpers.running import BOTH
from tests.helpers.seeded_runs import Stepwise
from tests.helpers.state_parts import PlainStream, StreamOfCursors
from tests.property.resume_streams import AwaitedStream, DatasetStream, IteratorStream, OwnIterator
from tests.property.resume_streams import PlainStream as Drawing

N = 30
STATEFUL = [IteratorStream, DatasetStream, OwnIterator, AwaitedStream]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "workers"), [("sync", 0), ("sync", 3), ("asyncio", 0), ("asyncio", 2)])
@pytest.mark.parametrize("make", STATEFUL)
@pytest.mark.parametrize("mode", [{}, {"seed": 5}], ids=["torch", "seeded"])
def test_every_position_of_a_stateful_stream(kind: str, workers: int, make: Any, mode: dict[str, Any]) -> None:
    """From any batch on, also the last and the end: the rest of the stream follows, and then whole epochs."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, **mode}
    columns = slice(None) if mode else slice(1)  # in torch mode random numbers are not promised
    with Stepwise(kind, make(N, 0), **options) as run:
        expected = [[batch[:, columns] for batch in run.epoch()] for _ in range(3)]
    steps = len(expected[0])
    for taken in (1, 2, steps - 1, steps, steps + 1):
        with Stepwise(kind, make(N, 0), **options) as run:
            run.begin()
            run.take(min(taken, steps))
            if taken > steps:
                assert run.rest() == []
            state = run.loader.state_dict()
        with Stepwise(kind, make(N, 0), **options) as run:
            run.loader.load_state_dict(state)
            got = [[batch[:, columns] for batch in run.epoch()] for _ in range(2)]
        rest = expected[1:] if taken > steps else [expected[0][taken:], expected[1]]
        assert_same(got, rest, f"after {taken}")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cursor_costs_no_data(workers: int) -> None:
    """A stream that has a cursor is not read again."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": workers}
    with Stepwise("sync", StreamOfCursors(N), **options) as run:
        run.begin()
        run.take(8)
        state = run.loader.state_dict()
    dataset = StreamOfCursors(N)
    with Stepwise("sync", dataset, **options) as run:
        run.loader.load_state_dict(state)
        assert len(torch.cat(run.epoch())) == N - 16
    assert dataset.made.value == N - 16


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", [{}, {"seed": 5}], ids=["torch", "seeded"])
def test_replay(kind: str, workers: int, mode: dict[str, Any]) -> None:
    """``allow_replay=True`` reads the stream again from its beginning, and drops the batches delivered before: random
    numbers, too, are those of an uninterrupted run.
    """
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "recovery": Recovery(allow_replay=True), **mode}
    torch.manual_seed(1)
    with Stepwise(kind, Drawing(N, 0), **options) as run:
        expected = run.epoch()
    torch.manual_seed(1)
    with Stepwise(kind, Drawing(N, 0), **options) as run:
        run.begin()
        run.take(4)
        state = run.loader.state_dict()
    torch.manual_seed(2)
    with Stepwise(kind, Drawing(N, 0), **options) as run:
        run.loader.load_state_dict(state)
        got = run.epoch()
    if not mode and not workers:  # in the caller's own process torch mode's draws are the caller's
        expected, got = [b[:, :1] for b in expected], [b[:, :1] for b in got]
    assert_same(got, expected[4:])


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_is_not_the_same_any_more(kind: str, workers: int) -> None:
    """A stream that ends before the place to be found is an error that has both numbers."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "recovery": Recovery(allow_replay=True)}
    with Stepwise(kind, PlainStream(N), **options) as run:
        run.begin()
        run.take(5)
        state = run.loader.state_dict()
    with Stepwise(kind, PlainStream(7), **options) as run:
        run.loader.load_state_dict(state)
        with pytest.raises(StateError, match=r"ended after 2 batches, but 5 had been delivered"):
            run.epoch()


@pytest.mark.parametrize("workers", [0, 2])
def test_another_ranks_cursor_is_refused(workers: int) -> None:
    """A stream's state is of one rank: the refusal names both ranks."""
    with Stepwise("sync", StreamOfCursors(N), batch_size=4, num_workers=workers) as run:
        run.begin()
        run.take(2)
        state = run.loader.state_dict()
        assert (state["workers"]["rank"], state["workers"]["world_size"]) == (0, 1)
        other = state | {"workers": state["workers"] | {"rank": 1, "world_size": 2}}
        with pytest.raises(StateError, match="rank 1 of 2, but this is rank 0 of 1"):
            run.loader.load_state_dict(other)


class Told(IterableDataset[Any]):
    """A stream like Hugging Face's: Stateful, and shuffled by the epoch that `set_epoch` gives."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0
        self.next = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        while self.next < self.length:
            self.next += 1
            yield 100 * self.epoch + self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.next = state["epoch"], state["next"]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("mode", [{}, {"seed": 5}], ids=["torch", "seeded"])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_a_dataset_that_is_told_the_epoch(kind: str, mode: dict[str, Any], workers: int, persistent: bool) -> None:
    """``loader.set_epoch`` reaches the dataset's copies, also in persistent workers, for the resumed epoch and
    later.
    """
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "persistent_workers": persistent, **mode}

    def rows(batches: list[Any]) -> list[int]:
        return [row for batch in batches for row in batch.tolist()]

    with Stepwise(kind, Told(10), **options) as run:
        for epoch in (0, 1):
            run.loader.set_epoch(epoch)
            assert rows(run.epoch()) == [100 * epoch + i for i in range(10)]
        run.loader.set_epoch(2)
        run.begin()
        assert rows(run.take(1)) == [200, 201, 202, 203]
        state = run.loader.state_dict()
    with Stepwise(kind, Told(10), **options) as run:
        run.loader.load_state_dict(state)
        assert rows(run.epoch()) == list(range(204, 210))
        run.loader.set_epoch(3)
        assert rows(run.epoch()) == list(range(300, 310))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("mode", [{}, {"seed": 5}], ids=["torch", "seeded"])
@pytest.mark.parametrize("before", [0, 1])
def test_a_shuffled_datapipe(kind: str, workers: int, persistent: bool, mode: dict[str, Any], before: int) -> None:
    """A datapipe's shuffle is drawn from a seed that all workers share: replay reads the same order again."""
    options: dict[str, Any] = {
        "num_workers": workers,
        "persistent_workers": persistent,
        "recovery": Recovery(allow_replay=True),
        **mode,
    }

    def run_of(seed: int) -> Stepwise:
        torch.manual_seed(seed)
        pipe = IterableWrapper(range(40)).shuffle().sharding_filter()
        return Stepwise(kind, pipe, batch_size=4, shuffle=True, **options)

    with run_of(1) as run:
        expected = [run.epoch() for _ in range(before + 1)][-1]
    with run_of(1) as run:
        for _ in range(before):
            run.epoch()
        run.begin()
        assert_same(run.take(3), expected[:3])
        state = run.loader.state_dict()
    with run_of(2) as run:
        run.loader.load_state_dict(state)
        assert_same(run.epoch(), expected[3:])
    assert sorted(torch.cat(expected).tolist()) == list(range(40))
