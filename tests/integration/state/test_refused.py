"""States that cannot be loaded are refused, with both values and the remedy; the loader does not change."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncloader import DataLoader, Recovery, StateError
from asyncloader.errors import LoaderError
from tests.helpers.running import BOTH
from tests.helpers.seeded_datasets import Lists, Rows
from tests.helpers.seeded_runs import Stepwise
from tests.helpers.state_parts import CursorMap, PlainStream, StreamOfCursors, Unsaveable

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

BASE: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 7}


def state_of(dataset: Any, taken: int = 2, **options: Any) -> dict[str, Any]:
    """The state of a loader after `taken` batches."""
    with Stepwise("sync", dataset, **options) as run:
        run.begin()
        run.take(taken)
        state: dict[str, Any] = run.loader.state_dict()
        return state


MISMATCHES: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "length": (31, {}, ["length=30", "length=31"]),
    "batch size": (30, {"batch_size": 5}, ["batch of 4", "is 5", "use batch_size=4"]),
    "drop_last": (30, {"drop_last": True}, ["drop_last=False", "drop_last=True"]),
    "seed": (30, {"seed": 8}, ["seed=7", "seed=8"]),
    "order": (30, {"shuffle": False}, ["order='shuffled'", "order='sequential'"]),
    "torch mode": (30, {"seed": None}, ["mode='seeded'", "mode='torch'"]),
    "a user's sampler": (30, {"shuffle": None, "sampler": Lists([])}, ["order='shuffled'", "order='sampler'"]),
    "ranks that do not divide": (30, {"rank": 0, "world_size": 3}, ["4", "world_size=3", "does not divide"]),
    "ranks that divide": (30, {"batch_size": 3, "rank": 0, "world_size": 2}, ["4", "6", "use batch_size=2 on 2 ranks"]),
}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", MISMATCHES)
def test_another_loaders_state(kind: str, name: str) -> None:
    """All settings that decide the order must agree; the error names both values, and nothing has changed."""
    length, changes, texts = MISMATCHES[name]
    state = state_of(Rows(30), **BASE)
    with Stepwise(kind, Rows(length), **BASE | changes) as run:
        before = run.loader.state_dict()
        with pytest.raises(StateError) as caught:
            run.loader.load_state_dict(state)
        for text in texts:
            assert text in str(caught.value)
        assert run.loader.state_dict() == before
    assert isinstance(caught.value, LoaderError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": None, "shuffle": True},
        {"batch_sampler": Lists([[i, i] for i in range(24)])},
        {"batch_size": None, "sampler": list(range(24))},
    ],
    ids=["single samples", "batch sampler", "sampler of single samples"],
)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_ranks_of_which_a_step_is_made(options: dict[str, Any], before: int, after: int) -> None:
    """Where a step has an item for each rank, another number of ranks either continues at the same item of the order,
    or is refused by name: no item may be lost or doubled.
    """
    with Stepwise("sync", Rows(24), seed=7, rank=0, world_size=before, **options) as run:
        run.begin()
        run.take(6)
        state = run.loader.state_dict()
    with Stepwise("sync", Rows(24), seed=7, **options) as run:
        whole = [torch.as_tensor(batch).reshape(-1).tolist() for batch in run.epoch()]
    rest: list[list[Any]] = []
    for rank in range(after):
        with Stepwise("sync", Rows(24), seed=7, rank=rank, world_size=after, **options) as run:
            try:
                run.loader.load_state_dict(state)
            except StateError as error:
                text = str(error)
                assert {str(before), str(after)} <= set(re.findall(r"\d+", text)), text
                return
            rest.append([torch.as_tensor(batch).reshape(-1).tolist() for batch in run.epoch()])
    got = [batch for step in zip(*rest, strict=True) for batch in step]
    assert got == whole[6 * before :]


# ------------------------------------------------------------------------------------------- broken states


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {key: value for key, value in state.items() if key != name}


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no dictionary": (lambda state: [state], "dictionary.*list"),
    "another library's": (lambda _: {"_snapshot": {}, "_num_yielded": 3}, "torchdata"),
    "a newer version's": (lambda s: s | {"version": 99}, "version 99.*reads version 2"),
    "an older version's": (lambda s: s | {"version": 1}, "version 1.*reads version 2. Finish the epoch"),
    "truncated": (without("step"), "'step'"),
    "arguments of another type": (lambda s: s | {"arguments": ["seed"]}, r"arguments=\['seed'\]"),
    "a digest of another type": (lambda s: s | {"data_digest": 5}, "data_digest=5"),
    "a step past the end": (lambda s: s | {"step": 1000}, "1000"),
    "beyond past the end": (lambda s: s | {"beyond": [1000]}, "100[01]"),
}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_states(kind: str, name: str) -> None:
    """A broken or incomplete state is refused; the error names the fault."""
    change, text = BROKEN[name]
    with Stepwise(kind, Rows(30), **BASE) as run:
        run.begin()
        run.take(2)
        state = run.loader.state_dict()
        with pytest.raises(StateError, match=text):
            run.loader.load_state_dict(change(state))
        assert run.loader.state_dict() == state


# ------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("kind", BOTH)
def test_a_stream_without_a_state_is_refused(kind: str) -> None:
    """By default nothing is replayed silently: the error names the reason, the remedy and its cost."""
    state = state_of(PlainStream(30), batch_size=4)
    with (
        Stepwise(kind, PlainStream(30), batch_size=4) as run,
        pytest.raises(StateError, match=r"state_dict.*Recovery\(allow_replay=True\).*2 batches"),
    ):
        run.loader.load_state_dict(state)
    with Stepwise(kind, PlainStream(30), batch_size=4, recovery=Recovery(allow_replay=True)) as run:
        run.loader.load_state_dict(state)
        assert torch.cat(run.epoch()).tolist() == list(range(8, 30))
        assert run.loader.dataset.made.value == 30


def test_a_state_that_could_not_be_saved_is_refused_with_its_reason() -> None:
    """A dataset whose `state_dict` raises does not spoil the run; loading the state raises with that error."""
    state = state_of(Unsaveable(30), batch_size=4, num_workers=1)
    with (
        Stepwise("sync", Unsaveable(30), batch_size=4, num_workers=1) as run,
        pytest.raises(StateError, match="OSError: the shard's index is locked"),
    ):
        run.loader.load_state_dict(state)


@pytest.mark.parametrize("make", [StreamOfCursors, CursorMap])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (0, 1), (2, 0)])
def test_another_number_of_workers_is_refused(make: Any, before: int, after: int) -> None:
    """Each worker's copy of the dataset has its own place, where other numbers of workers cannot continue."""
    state = state_of(make(30), batch_size=4, num_workers=before)
    with (
        Stepwise("sync", make(30), batch_size=4, num_workers=after) as run,
        pytest.raises(StateError, match=f"num_workers={before}.*num_workers={after}"),
    ):
        run.loader.load_state_dict(state)


def test_another_number_of_workers_between_epochs_is_fine() -> None:
    """Before the first batch and after the last no worker has a place."""
    for taken in (False, True):
        with Stepwise("sync", StreamOfCursors(30), batch_size=4, num_workers=2) as run:
            run.begin()
            if taken:
                run.rest()
            state = run.loader.state_dict()
        with Stepwise("sync", StreamOfCursors(30), batch_size=4) as run:
            run.loader.load_state_dict(state)
            assert torch.cat(run.epoch()).tolist() == list(range(30))


def test_a_refused_position_leaves_the_epoch_as_it_was() -> None:
    """The epoch was set to find its length; it is set back."""
    loader = DataLoader(Rows(10), batch_size=2, seed=1, shuffle=True)
    state = loader.state_dict()
    with pytest.raises(StateError, match="9 batches of an epoch"):
        loader.load_state_dict({**state, "epoch": 3, "step": 9})
    assert (getattr(loader.sampler, "epoch", None), loader.state_dict()["epoch"]) == (0, 0)
