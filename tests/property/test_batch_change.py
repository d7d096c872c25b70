"""A seeded run continues with another global batch where one of its batches begins: no sample is lost or repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch.utils.data import SequentialSampler

from asyncloader import StateError
from tests.drawn import scaled
from tests.helpers.running import BOTH
from tests.helpers.seeded_datasets import AllDraws
from tests.helpers.seeded_runs import Stepwise, epochs_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

ORDERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "in order": lambda _: {},
    "shuffled": lambda _: {"shuffle": True},
    "a sampler of torch's": lambda length: {"sampler": SequentialSampler(range(length // 2 + 1))},
}
SEED = 5


@dataclass(frozen=True)
class Layout:
    """The batch size of each rank, and the number of ranks."""

    each: int
    ranks: int

    @property
    def size(self) -> int:
        return self.each * self.ranks

    def options(self, rank: int) -> dict[str, Any]:
        return {"batch_size": self.each, "rank": rank, "world_size": self.ranks, "seed": SEED}


layouts = st.builds(Layout, st.integers(1, 6), st.integers(1, 3))


def rows(batches: list[Any]) -> list[list[float]]:
    return [row for batch in batches for row in batch.tolist()]


def joined(ranks: list[list[Any]]) -> list[list[float]]:
    """Return the rows of the ranks' batches, joined in rank order at each step."""
    return rows([torch.cat(step) for step in zip(*ranks, strict=True)])


def state_after(kind: str, layout: Layout, rank: int, state: Any, length: int, steps: int, options: Any) -> Any:
    """Begin a run from a state and take `steps` batches. Returns these and the run's state."""
    with Stepwise(kind, AllDraws(length), **layout.options(rank), **options) as run:
        if state is not None:
            run.loader.load_state_dict(state)
        run.begin()
        return run.take(steps), run.loader.state_dict()


def rest_of(kind: str, layout: Layout, state: Any, length: int, options: Any) -> list[list[Any]]:
    """Return each rank's batches of the epoch from a state on."""
    ranks = []
    for rank in range(layout.ranks):
        with Stepwise(kind, AllDraws(length), **layout.options(rank), **options) as run:
            run.loader.load_state_dict(state)
            ranks.append(run.epoch())
    return ranks


@given(
    layouts=st.lists(layouts, min_size=2, max_size=4),
    length=st.integers(1, 60),
    order=st.sampled_from(list(ORDERS)),
    kind=st.sampled_from(BOTH),
    drop_last=st.booleans(),
    data=st.data(),
)
@settings(max_examples=scaled(300), deadline=None)
def test_it_goes_on_in_other_batches(
    layouts: list[Layout], length: int, order: str, kind: str, drop_last: bool, data: st.DataObject
) -> None:
    """Runs with other batch sizes and numbers of ranks follow each other. Each begins where the previous run
    stopped, if a batch of its own begins there; else it refuses, and the error names the setting. The samples,
    joined, are those of one run.
    """
    made: dict[str, Any] = {**ORDERS[order](length), "drop_last": drop_last}
    samples = length if order != "a sampler of torch's" else length // 2 + 1
    whole = rows(epochs_of(kind, AllDraws(length), seed=SEED, batch_size=1, **made)[0])
    at, state = 0, None
    for number, layout in enumerate(layouts):
        if at < samples and at % layout.size:
            with pytest.raises(StateError, match=rf"divides the {at} samples|batch_size="):
                rest_of(kind, layout, state, length, made)
            event("refused")
            return
        steps = (samples - at) // layout.size
        if number < len(layouts) - 1:
            steps = data.draw(st.integers(0, steps))
        parts = [state_after(kind, layout, rank, state, length, steps, made) for rank in range(layout.ranks)]
        end = at + steps * layout.size
        if steps:
            assert joined([batches for batches, _ in parts]) == whole[at:end]
        assert all(found == parts[0][1] for _, found in parts), "the same on every rank"
        at, state = end, parts[0][1]
    event("went on to the end")


@given(before=layouts, after=layouts, length=st.integers(1, 40), rule=st.sampled_from(["drop", "repeat", "pad"]))
@settings(max_examples=scaled(200), deadline=None)
def test_after_the_last_batch(before: Layout, after: Layout, length: int, rule: str) -> None:
    """From a state after all batches, of which the last may be short, no batch is delivered; then the next epoch is."""
    made: dict[str, Any] = {"shuffle": True, "on_uneven": rule}
    with Stepwise("sync", AllDraws(length), **before.options(0), **made) as run:
        assume(len(run.loader) * before.size >= length)
        run.begin()
        run.take(len(run.loader))
        state = run.loader.state_dict()
    expected = epochs_of("sync", AllDraws(length), 2, **after.options(0), **made)[1]
    with Stepwise("sync", AllDraws(length), **after.options(0), **made) as run:
        run.loader.load_state_dict(state)
        assert run.epoch() == []
        assert rows(run.epoch()) == rows(expected)


@given(before=layouts, after=layouts, length=st.integers(1, 40), epoch=st.integers(0, 3))
@settings(max_examples=scaled(200), deadline=None)
def test_between_epochs(before: Layout, after: Layout, length: int, epoch: int) -> None:
    """The next epoch is that of a run which always had these batches."""
    with Stepwise("sync", AllDraws(length), **before.options(0), shuffle=True) as run:
        run.loader.set_epoch(epoch)
        run.epoch()
        state = run.loader.state_dict()
    with Stepwise("sync", AllDraws(length), **after.options(0), shuffle=True) as run:
        run.loader.set_epoch(epoch + 1)
        expected = rows(run.epoch())
    with Stepwise("sync", AllDraws(length), **after.options(0), shuffle=True) as run:
        run.loader.load_state_dict(state)
        assert run.loader.epoch == epoch + 1
        assert rows(run.epoch()) == expected


@pytest.mark.parametrize(
    "made",
    [
        {"seed": None},
        {"sampler": range(24)},
        {"shuffle": True, "generator": torch.Generator(), "seed": None},
    ],
    ids=["torch mode", "a sampler of the user's", "a generator"],
)
def test_other_orders_are_refused(made: dict[str, Any]) -> None:
    """Where the order is not computed from the seed, the batch size must stay."""
    options: dict[str, Any] = {"seed": SEED, **made}
    with Stepwise("sync", AllDraws(24), batch_size=4, **options) as run:
        run.begin()
        run.take(2)
        state = run.loader.state_dict()
    with (
        Stepwise("sync", AllDraws(24), batch_size=8, **options) as run,
        pytest.raises(StateError, match=r"batch of 4 samples, but this loader.s is 8; use batch_size=4$"),
    ):
        run.loader.load_state_dict(state)


def test_batches_out_of_order_are_refused() -> None:
    """A state in which later batches were delivered before an earlier batch is no number of samples."""
    with Stepwise("sync", AllDraws(24), batch_size=4, seed=SEED) as run:
        run.begin()
        run.take(2)
        state = run.loader.state_dict() | {"beyond": [3]}
    with (
        Stepwise("sync", AllDraws(24), batch_size=8, seed=SEED) as run,
        pytest.raises(StateError, match=r"use batch_size=4$"),
    ):
        run.loader.load_state_dict(state)


def test_a_step_beyond_the_end_is_refused() -> None:
    """A broken state is not taken for a state after the last batch."""
    with Stepwise("sync", AllDraws(24), batch_size=4, seed=SEED) as run:
        state = run.loader.state_dict() | {"step": 100}
    with Stepwise("sync", AllDraws(24), batch_size=8, seed=SEED) as run, pytest.raises(StateError):
        run.loader.load_state_dict(state)
