"""States of loaders over shards: resumed epochs equal uninterrupted ones, and invalid states are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncloader import StateError
from asyncloader.transports import ObjectNotFound
from tests.helpers.remote_folders import ALL, SIZES, dataset_of, epochs_of, flat, make_shards, resumed, with_method
from tests.helpers.running import BOTH
from tests.helpers.seeded_runs import Stepwise

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def plain(batches: list[torch.Tensor]) -> list[Any]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_states_between_epochs(workers: int, tars: str) -> None:
    """A state saved at the end of an epoch leads to the next epoch."""
    dataset = dataset_of(tars, shuffle_buffer=6)
    options = with_method({"batch_size": 4, "num_workers": workers, "seed": 5})
    with Stepwise("sync", dataset, **options) as run:
        run.epoch()
        state = run.loader.state_dict()
        second = [batch.tolist() for batch in run.epoch()]
    with Stepwise("sync", dataset, **options) as run:
        run.loader.load_state_dict(state)
        assert [batch.tolist() for batch in run.epoch()] == second


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_later_epochs_with_a_generator(kind: str, workers: int, tars: str) -> None:
    """Without `seed=` the order of each epoch is drawn from `generator=`, which a state has: those after a resumed one,
    too, are those of the uninterrupted run, in whatever state the process's generators are.
    """
    dataset = dataset_of(tars, shuffle_buffer=6)

    def run(seed: int) -> Stepwise:
        generator = torch.Generator().manual_seed(seed)
        return Stepwise(kind, dataset, **with_method({"batch_size": 4, "num_workers": workers, "generator": generator}))

    states: list[tuple[dict[str, Any], list[Any]]] = []  # and what follows
    with run(3) as first:
        first.epoch()
        first.begin()
        first.take(2)
        within = first.loader.state_dict()
        rest = plain(first.rest())
        ended = first.loader.state_dict()
        later = [plain(first.epoch()) for _ in range(2)]
        states += [(within, [rest, *later]), (ended, later)]
    for state, following in states:
        with run(4) as second:
            second.loader.load_state_dict(state)
            assert [plain(second.epoch()) for _ in following] == following


@pytest.mark.parametrize("at", ["the middle", "the end"])
def test_states_of_another_epoch(at: str, tars: str) -> None:
    """Once `set_epoch` has chosen another epoch than the position's, a state is of its beginning."""
    dataset = dataset_of(tars, shuffle_buffer=6)
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "seed": 5}
    chosen = epochs_of("sync", dataset, 8, **options)[7]
    states: list[dict[str, Any]] = []
    with Stepwise("sync", dataset, **options) as run:
        run.begin()
        run.rest() if at == "the end" else run.take(2)
        saved = run.loader.state_dict()
        if at == "the end":
            run.loader.set_epoch(7)
            states.append(run.loader.state_dict())
    with Stepwise("sync", dataset, **options) as run:
        run.loader.load_state_dict(saved)
        run.loader.set_epoch(7)
        states.append(run.loader.state_dict())
        assert [batch.tolist() for batch in run.epoch()] == chosen
    for state in states:
        with Stepwise("sync", dataset, **options) as run:
            run.loader.load_state_dict(state)
            assert [batch.tolist() for batch in run.epoch()] == chosen


@pytest.mark.thorough
def test_out_of_order_resumes(tars: str) -> None:
    """With ``in_order=False`` each sample is still delivered once, for any `snapshot_every_n_steps`."""
    for every in (1, 4, 0):
        options: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "in_order": False}
        batches = resumed("sync", dataset_of(tars), 3, **options, snapshot_every_n_steps=every)
        assert sorted(flat(batches)) == ALL


def begin_with(run: Stepwise, state: dict[str, Any]) -> None:
    run.loader.load_state_dict(state)
    run.epoch()


@pytest.mark.parametrize("workers", [0, 2])
def test_states_that_do_not_fit(workers: int, tars: str, tmp_path: Path) -> None:
    """Other shards, another shuffle buffer, a broken part: StateError, from both loaders, before any batch."""
    options = with_method({"batch_size": 4, "num_workers": workers, "seed": 5})
    dataset = dataset_of(tars, shuffle_buffer=6)
    with Stepwise("sync", dataset, **options) as run:
        run.begin()
        run.take(2)
        state = run.loader.state_dict()
    worker = state["workers"]["cursors"][0]["iterator"]
    assert {"key", "plan", "done", "back", "returned"} == set(state["workers"]["leases"])

    def spoiled(**assignments: Any) -> dict[str, Any]:
        changed: dict[str, Any] = state | {
            "workers": state["workers"] | {"leases": state["workers"]["leases"] | assignments}
        }
        return changed

    def with_stream(**fields: Any) -> dict[str, Any]:
        first = state["workers"]["cursors"][0] | {"iterator": worker | fields}
        changed: dict[str, Any] = state | {
            "workers": state["workers"] | {"cursors": [first, *state["workers"]["cursors"][1:]]}
        }
        return changed

    (tmp_path / "other").mkdir()
    other = dataset_of(make_shards(tmp_path / "other", SIZES), shuffle_buffer=6)
    cases = [
        (other, state, "of other shards"),
        (dataset_of(tars, shuffle_buffer=7), state, "shuffled differently"),
        (dataset_of(tars), state, "shuffled differently"),
        (dataset, spoiled(done=99), "the state is broken"),
        (dataset, spoiled(back=[[[77, 0, None, False]]]), "the state is broken"),
        (dataset, spoiled(plan=7), "of other shards"),
        (dataset, spoiled(key=-7), "the state is broken"),
        (dataset, {**state, "workers": {k: v for k, v in state["workers"].items() if k != "leases"}}, "which are left"),
        (dataset, state | {"workers": state["workers"] | {"leases": 5}}, "the state is broken"),
        (dataset, with_stream(todo=[[0, "x", None, False]]), "the state is broken"),
        (dataset, with_stream(batch="x"), "the state is broken"),
    ]
    for kind in BOTH:
        for data, bad, words in cases:
            with Stepwise(kind, data, **options) as run, pytest.raises(StateError, match=words):
                begin_with(run, bad)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", BOTH)
def test_a_buffer_that_cannot_be_filled_again(kind: str, workers: int, tmp_path: Path) -> None:
    """The error is raised also with ``on_error="skip"``: it does not belong to a sample."""
    options = with_method({"batch_size": 4, "num_workers": workers, "seed": 5, "on_error": "skip"})
    dataset = dataset_of(make_shards(tmp_path, SIZES), shuffle_buffer=6)
    with Stepwise(kind, dataset, **options) as run:
        run.begin()
        run.take(2)
        state = run.loader.state_dict()
    for path in tmp_path.glob("*.tar"):
        path.write_bytes(bytes(path.stat().st_size))  # an empty archive
    with Stepwise(kind, dataset, **options) as run, pytest.raises(StateError, match="the shards are not the same"):
        begin_with(run, state)
    for path in tmp_path.glob("*.tar"):
        path.unlink()
    with Stepwise(kind, dataset, **options) as run, pytest.raises(ObjectNotFound):
        begin_with(run, state)
