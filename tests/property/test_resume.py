"""A run that is killed and resumed gives exactly the uninterrupted batches, in order and bytes, for random cases.

The uninterrupted run for comparison has no workers; in torch mode torch's own loader makes it, if that can read the
dataset. 100 cases per run, 1,000 in the slow part. For more:

    ASYNCLOADER_CONFIGURATIONS=5000 make test ARGS="--timeout=0 tests/property/test_resume.py"
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, example, given, settings

from tests.drawn import scaled
from tests.property.resume_cases import DATASETS, LOOPS, PASSAGES, Case, Part, cases
from tests.property.resume_orders import ASYNC_ORDERS, BATCH_ORDERS, ORDERS
from tests.property.resume_runs import Run, passed, seed_everything
from tests.property.resume_streams import SEVERAL, STREAMS

EXAMPLES = int(os.environ.get("ASYNCLOADER_CONFIGURATIONS") or scaled(100))
SETTINGS: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
AWAITED = ("awaited", "subset of awaited")
EACH_ONCE = ("in order", "shuffled", "seekable", "rounds", "rounds awaited", "counting")

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

# A rank's epochs, each a list of batches (float64, a row per sample; without automatic batching a batch is a row).
Epochs = list[list[torch.Tensor]]


# ------------------------------------------------------------------------------------------- the uninterrupted run


def uninterrupted(case: Case, part: Part, rank: int, epochs: int) -> Epochs:
    """Return this rank's epochs if no interruption occurs, in a world of the part's size."""
    seed_everything(5)
    workers = part.workers if case.streams and case.dataset not in SEVERAL else 0
    plain = replace(part, workers=workers, prefetch=None, loop="sync", persistent=False)
    in_order = replace(case, in_order=True)
    if case.mode == "torch" and not case.streams and case.dataset not in AWAITED and case.order not in ASYNC_ORDERS:
        arguments = in_order.arguments(plain, rank, 11)
        del arguments["snapshot_every_n_steps"]
        torch_loader = torch.utils.data.DataLoader(**arguments)
        return [list(torch_loader) for _ in range(epochs)]
    run = Run(in_order, plain, rank, 11)
    try:
        if case.first_epoch:
            run.loader.set_epoch(case.first_epoch)
        made: Epochs = []
        for _ in range(epochs):
            run.begin()
            made.append(run.rest())
        return made
    finally:
        run.close()


class Expected:
    """Uninterrupted runs, made when they are asked for."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._made: dict[tuple[int, int], Epochs] = {}

    def of(self, part: Part, rank: int) -> Epochs:
        key = part.world_size, rank
        if key not in self._made:
            self._made[key] = uninterrupted(self.case, part, rank, self.case.before + len(self.case.parts) + 2)
        return self._made[key]

    def check(self) -> None:
        """Check that the runs of all numbers of ranks agree with one another, and that their epochs are complete."""
        case = self.case
        worlds = sorted({part.world_size for part in case.parts})
        if case.streams or case.mode == "torch":
            return
        whole = [_joined([self.of(replace(case.parts[0], world_size=w), r) for r in range(w)]) for w in worlds]
        for joined in whole[1:]:
            for ours, theirs in zip(joined, whole[0], strict=True):
                full = case.length // (case.global_batch or 1) if case.global_batch else 0
                assert len(ours) >= full
                for step in range(min(full, len(theirs))):
                    assert same(ours[step], theirs[step]), f"step {step}"
        if case.order in EACH_ONCE and worlds == [1] and case.on_uneven == "drop" and case.dataset != "subset":
            self._check_completeness(whole[0])

    def _check_completeness(self, epochs: Epochs) -> None:
        """Check that every epoch has each index of the dataset once, except for a short last batch that is dropped."""
        case = self.case
        for epoch in epochs:
            rows = [row for batch in epoch for row in batch[..., 0].reshape(-1).tolist()]
            assert len(set(rows)) == len(rows)
            assert set(rows) <= set(range(case.length))
            left_out = case.length % (case.global_batch or 1) if case.drop_last else 0
            assert len(rows) == case.length - left_out


def _joined(ranks: list[Epochs]) -> list[list[torch.Tensor]]:
    """Return each epoch's steps: the ranks' batches of a step, joined in rank order."""
    epochs: list[list[torch.Tensor]] = []
    for number in range(len(ranks[0])):
        assert len({len(rank[number]) for rank in ranks}) == 1, "every rank gets as many batches"
        steps = zip(*[rank[number] for rank in ranks], strict=True)
        epochs.append([torch.cat([b if b.dim() == 2 else b[None] for b in step]) for step in steps])
    return epochs


def same(a: torch.Tensor, b: torch.Tensor, columns: int | None = None) -> bool:
    """Whether both are equal to the bit, or in the first `columns`: in torch mode only the indices are compared."""
    a, b = a[..., :columns].contiguous(), b[..., :columns].contiguous()
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.int64), b.view(torch.int64))


# ------------------------------------------------------------------------------------------- the interrupted run


class Place:
    """The place of one rank, and the batches that it must still get."""

    def __init__(self, case: Case, epochs: Epochs, epoch: int, position: int, left: list[torch.Tensor] | None) -> None:
        self.case = case
        self.epochs = epochs
        self.epoch = epoch
        self.position = position
        self.left = epochs[epoch][position:] if left is None else left
        self.told = False

    def got(self, batch: torch.Tensor | None) -> None:
        """The consumer got this batch, or None for the epoch's end."""
        if batch is None:
            assert not self.left, f"epoch {self.epoch} ended with {len(self.left)} batches to come"
            self.told = True
            return
        columns = 1 if self.case.mode == "torch" else None
        window = self.left[:1] if self.case.in_order else self.left
        for place, expected in enumerate(window):
            if same(batch, expected, columns):
                del self.left[place]
                self.position += 1
                return
        raise AssertionError(f"epoch {self.epoch}, step {self.position}: got {batch}, expected one of {window}")

    def turn_page(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.position = 0
        self.left = self.epochs[self.epoch][:]
        self.told = False

    def copy(self) -> Place:
        other = Place(self.case, self.epochs, self.epoch, self.position, self.left[:])
        other.told = self.told
        return other


def follows(case: Case) -> bool:
    """Whether the epochs after the interrupted epoch are determined: torch draws them from the global generator."""
    return case.mode == "seeded" or case.streams or case.order != "shuffled"


def check(case: Case) -> None:
    """Run the case; fail at the first batch that differs from the uninterrupted run's."""
    expected = Expected(case)
    expected.check()
    states: list[Any] = []
    places: list[Place] = []
    runs: list[Run] = []
    try:
        for number, part in enumerate(case.parts):
            if not number:
                places = [Place(case, expected.of(part, rank), 0, 0, None) for rank in range(part.world_size)]
            elif len(places) != part.world_size:
                one = places[0]
                places = [
                    Place(case, expected.of(part, rank), one.epoch, one.position, None)
                    for rank in range(part.world_size)
                ]
                for place in places:
                    place.told = one.told
                states = [states[0]] * part.world_size
            if not part.same:
                for run in runs:
                    run.close()
                seed_everything(5 if not number else 1000 + number)
                runs = [Run(case, part, rank, 11 if not number else 77) for rank in range(part.world_size)]
            places, states = _part(case, number, runs, places, states)
    finally:
        for run in runs:
            run.close()


def _part(
    case: Case, number: int, runs: list[Run], places: list[Place], states: list[Any]
) -> tuple[list[Place], list[Any]]:
    """Run a part. Returns each rank's place after it, and the states."""
    part = case.parts[number]
    after: list[Place] = []
    saved: list[Any] = []
    for rank, (run, start) in enumerate(zip(runs, places, strict=True)):
        place = start.copy()
        if number:
            run.loader.load_state_dict(states[rank])
            assert run.loader.state_dict() == states[rank], "the state right after loading"
            if place.told:
                place.turn_page()
        else:
            if case.first_epoch:
                run.loader.set_epoch(case.first_epoch)
            for _ in range(case.before):
                _to_the_end(run, place)
                place.turn_page()
        if number == len(case.parts) - 1:
            _to_the_end(run, place)
            if follows(case):
                place.turn_page()
                _to_the_end(run, place)
            after.append(place)
            continue
        run.begin()
        for _ in range(part.steps):
            if not place.left:
                break
            place.got(run.step())
        if part.told and not place.left:
            place.got(run.step())
        saved.append(passed(run.loader.state_dict(), part.passage))
        after.append(place.copy())
        if not place.told:
            for _ in range(min(part.lost, len(place.left))):
                place.got(run.step())
    if case.mode == "seeded" and not case.streams and case.in_order and saved:
        assert all(state == saved[0] for state in saved), "the ranks' states differ"
    return after, saved


def _to_the_end(run: Run, place: Place) -> None:
    run.begin()
    while not place.told:
        place.got(run.step())


# ------------------------------------------------------------------------------------------- the property


def _exact(case: Case) -> None:
    event(f"{case.mode}, {case.dataset if case.streams else 'map'}")  # for --hypothesis-show-statistics
    check(case)


@pytest.mark.timeout(max(600, 3 * EXAMPLES))
@settings(max_examples=EXAMPLES, **SETTINGS)
@given(cases())
@example(Case(parts=(Part(2, workers=2, world_size=4), Part(1, workers=1, world_size=1), Part(world_size=2))))
@example(Case(length=5, order="rounds", global_batch=2, parts=(Part(3), Part(world_size=2))))
@example(Case(length=5, order="rounds awaited", global_batch=2, before=1, parts=(Part(0, workers=2), Part())))
@example(
    Case(
        length=6,
        order="rounds of lists awaited",
        global_batch=None,
        snapshot_every=0,
        parts=(Part(2, told=True), Part(0), Part(1), Part()),
    )
)
@example(Case(length=27, order="counting", global_batch=12, parts=(Part(3, told=True), Part(world_size=4))))
@example(Case(mode="torch", dataset="stateful dataset", global_batch=2, parts=(Part(0, lost=2), Part(same=True))))
@example(
    Case(
        dataset="stateful dataset",
        order="in order",
        length=3,
        global_batch=None,
        parts=(
            Part(0, lost=1, workers=1, loop="asyncio", persistent=True),
            Part(workers=1, loop="asyncio", persistent=True, same=True),
        ),
    )
)
def test_an_interrupted_run_gives_what_it_would_have_given(case: Case) -> None:
    """Killed once or twice, resumed with other numbers of workers and ranks, it gives the same batches, to the byte."""
    _exact(case)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # half an hour where 20 processes want the two CPUs
@settings(max_examples=1000, **SETTINGS)
@given(cases())
def test_many_interrupted_runs_give_what_they_would_have_given(case: Case) -> None:
    """This holds for a thousand cases."""
    _exact(case)


# ------------------------------------------------------------------------------------- tests of the property itself


SPOILED: dict[str, dict[str, Any]] = {
    "a batch lost": {"step": 3},
    "a batch twice": {"step": 1},
    "an epoch on": {"epoch": 1},
}


@pytest.mark.parametrize("name", SPOILED)
def test_the_comparison_bites(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is one step off, or of another epoch, fails the comparison."""
    case = Case(dataset="augmented", length=16, parts=(Part(2), Part()))
    check(case)
    real = passed
    monkeypatch.setitem(globals(), "passed", lambda state, passage: real(state, passage) | SPOILED[name])
    with pytest.raises(AssertionError):
        check(case)


DRAWN: list[Case] = []


@settings(max_examples=2500, deadline=None, derandomize=True, database=None)
@given(cases())
def _draw(case: Case) -> None:
    DRAWN.append(case)


@pytest.mark.thorough
def test_every_dimension_is_drawn() -> None:
    """The property draws each dataset, order, kind of loader, number of workers and ranks, and changes of them."""
    DRAWN.clear()
    _draw()
    assert {c.mode for c in DRAWN} == {"seeded", "torch"}
    assert {c.dataset for c in DRAWN} == {*DATASETS, *STREAMS}
    assert {c.order for c in DRAWN} == set(ORDERS)
    assert {c.on_uneven for c in DRAWN} == {"drop", "repeat", "pad"}
    assert {c.snapshot_every for c in DRAWN} == {0, 1, 3}
    assert {c.drop_last for c in DRAWN} == {c.in_order for c in DRAWN} == {c.mixes for c in DRAWN} == {False, True}
    assert {len(c.parts) for c in DRAWN} == {2, 3}
    parts = [part for case in DRAWN for part in case.parts]
    assert {p.workers for p in parts} == {0, 1, 2, 3}
    assert {p.world_size for p in parts} == {1, 2, 3, 4}
    assert {p.loop for p in parts} == set(LOOPS)
    assert {p.passage for p in parts} == set(PASSAGES)
    assert {p.told for p in parts} == {p.persistent for p in parts} == {p.same for p in parts} == {False, True}
    assert any(
        a.world_size != b.world_size and a.workers != b.workers
        for c in DRAWN
        for a, b in zip(c.parts, c.parts[1:], strict=False)
    )
    assert {c.order for c in DRAWN if c.parts[0].world_size > 1} >= set(BATCH_ORDERS)
