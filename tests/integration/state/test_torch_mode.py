"""States in torch mode: the order is drawn again without fetching a sample, whatever drew it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.helpers.comparing import assert_same
from tests.helpers.running import BOTH
from tests.helpers.seeded_datasets import Lists, Rows
from tests.helpers.seeded_runs import Stepwise
from tests.helpers.state_parts import Counted, Passes

N = 40
BATCH = 4

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def _own(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# From a seed: torch's orders. The resumed loader gets another seed, like another process.
ORDERS: dict[str, Any] = {
    "sequential": lambda _: {"batch_size": BATCH},
    "shuffle": lambda _: {"batch_size": BATCH, "shuffle": True},
    "generator": lambda seed: {"batch_size": BATCH, "shuffle": True, "generator": _own(seed)},
    "sampler's generator": lambda seed: {"batch_size": BATCH, "sampler": RandomSampler(range(N), generator=_own(seed))},
    "both": lambda seed: {
        "batch_size": BATCH,
        "sampler": RandomSampler(range(N), generator=_own(seed)),
        "generator": _own(seed + 1),
    },
    "replacement": lambda _: {"batch_size": BATCH, "sampler": RandomSampler(range(N), True, 60)},
    "weighted": lambda _: {"batch_size": BATCH, "sampler": WeightedRandomSampler([1.0 + i for i in range(N)], N)},
    "weighted, generator": lambda seed: {
        "batch_size": BATCH,
        "sampler": WeightedRandomSampler([1.0 + i for i in range(N)], N, generator=_own(seed)),
    },
    "subset": lambda _: {"batch_size": BATCH, "sampler": SubsetRandomSampler(range(N))},
    "distributed": lambda _: {"batch_size": BATCH, "sampler": DistributedSampler(Rows(N), 1, 0, seed=3)},
    "batch sampler": lambda _: {"batch_sampler": BatchSampler(RandomSampler(range(N)), BATCH, drop_last=False)},
    "single": lambda _: {"batch_size": None, "shuffle": True},
    "list": lambda _: {"batch_size": BATCH, "sampler": [(7 * i) % N for i in range(N)]},
    "lists": lambda _: {"batch_sampler": Lists([[i, i + 1] for i in range(20)])},
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 0), (0, 1)])
@pytest.mark.parametrize("name", ORDERS)
def test_the_rest_of_the_order(kind: str, before: int, after: int, name: str) -> None:
    """The rest of torch's own order follows, in another process, and only its samples are made."""
    taken = 6
    torch.manual_seed(3)
    expected = list(torch.utils.data.DataLoader(Rows(N), **ORDERS[name](5)))
    torch.manual_seed(3)
    with Stepwise(kind, Rows(N), num_workers=before, **ORDERS[name](5)) as run:
        run.begin()
        assert_same(run.take(taken), expected[:taken])
        state = run.loader.state_dict()
    torch.manual_seed(99)
    dataset = Counted(N)
    with Stepwise(kind, dataset, num_workers=after, **ORDERS[name](98)) as run:
        run.loader.load_state_dict(state)
        run.begin()
        got = run.rest()
    assert [torch.as_tensor(b).tolist() for b in got] == [b.tolist() for b in expected[taken:]]
    assert dataset.made.value == sum(b.numel() for b in expected[taken:])


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", ["generator", "sampler's generator", "both", "weighted, generator", "distributed"])
@pytest.mark.parametrize("taken", [3, 10, None])
def test_the_epochs_after_it(kind: str, name: str, taken: int | None) -> None:
    """Where the order's generator is known, the epochs after the resumed one are those of the uninterrupted run, too:
    from the middle, from the last batch, and from the end.
    """
    plain = torch.utils.data.DataLoader(Rows(N), **ORDERS[name](5))
    expected = [list(plain) for _ in range(3)]
    with Stepwise(kind, Rows(N), **ORDERS[name](5)) as run:
        run.begin()
        if taken is None:
            run.rest()
        else:
            run.take(taken)
        state = run.loader.state_dict()
    with Stepwise(kind, Rows(N), **ORDERS[name](98)) as run:
        run.loader.load_state_dict(state)
        got = [run.epoch() for _ in range(2)]
    assert_same(got, expected[1:] if taken is None else [expected[0][taken:], expected[1]])


def test_the_process_generator_is_where_the_user_wants_it() -> None:
    """Resuming repeats the order's draws, and moves the resumed process's global generator by no more than a loader
    that begins at the beginning.
    """
    with Stepwise("sync", Rows(N), batch_size=BATCH, shuffle=True) as run:
        run.begin()
        run.take(3)
        state = run.loader.state_dict()
    after: list[float] = []
    for resumes in (False, True):
        with Stepwise("sync", Rows(N), batch_size=BATCH, shuffle=True) as run:
            torch.manual_seed(12)
            if resumes:
                run.loader.load_state_dict(state)
            run.begin()
            run.step()
            after.append(float(torch.rand(())))
    torch.manual_seed(12)
    torch.empty((), dtype=torch.int64).random_()  # the loader's base seed
    torch.empty((), dtype=torch.int64).random_()  # the sampler's seed, which a resumed loader takes from the state
    assert after[0] == float(torch.rand(()))
    torch.manual_seed(12)
    torch.empty((), dtype=torch.int64).random_()
    assert after[1] in (after[0], float(torch.rand(())))


# ------------------------------------------------------------------------------------------- stateful samplers


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", [{}, {"seed": 4}], ids=["torch", "seeded"])
def test_a_stateful_sampler_is_asked_at_the_delivered_position(kind: str, workers: int, mode: dict[str, Any]) -> None:
    """Its state is that after the delivered batches, although it was read ahead."""
    for taken in range(6):
        with Stepwise(kind, Rows(20), batch_size=4, sampler=Passes(20), num_workers=workers, **mode) as run:
            run.begin()
            got = run.take(taken)
            state = run.loader.state_dict()
        assert [row for batch in got for row in batch.tolist()] == list(range(4 * taken))
        sampler = Passes(20)
        if taken:
            assert (state["sampler"]["at"], state["sampler"]["sampler"]) == (taken, {"next": 4 * taken})
        with Stepwise(kind, Rows(20), batch_size=4, sampler=sampler, **mode) as run:
            run.loader.load_state_dict(state)
            assert [row for batch in run.epoch() for row in batch.tolist()] == list(range(4 * taken, 20))
            assert len(torch.cat(run.epoch())) == 20, "the next epoch is whole"


class AwaitedRows(Rows):
    """The samples of `Rows`, awaited."""

    async def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


class Asked(Iterator[list[int]]):
    """Batches from a service that fails once to answer, and answers the next request."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.number = 0

    def __len__(self) -> int:
        return 20

    def __next__(self) -> list[int]:
        if self.number == 3 and self.fails:
            self.fails = False
            raise ConnectionError
        if self.number == 20:
            raise StopIteration
        self.number += 1
        return [self.number - 1, self.number]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", [Rows, AwaitedRows])
def test_a_sampler_that_raised_and_went_on(kind: str, workers: int, make: Any) -> None:
    """Its error stands for no batch, so the state counts none. Without workers the same iterator goes on."""
    with Stepwise(kind, make(N), num_workers=workers, batch_sampler=Asked(fails=True)) as run:
        run.begin()
        with pytest.raises(ConnectionError):
            run.take(4)
        if workers:
            assert run.rest() == []
        else:
            run.take(4)
        state = run.loader.state_dict()
    with Stepwise(kind, make(N), num_workers=workers, batch_sampler=Asked(fails=False)) as run:
        whole = run.epoch()
    with Stepwise(kind, make(N), num_workers=workers, batch_sampler=Asked(fails=False)) as run:
        run.loader.load_state_dict(state)
        assert_same(run.epoch(), whole[3:] if workers else whole[7:])
