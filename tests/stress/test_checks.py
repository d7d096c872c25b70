from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.stress.checks import Epoch, Item, compare, draws_differ, expected
from tests.stress.consumer import Event
from tests.stress.scenarios import SCENARIOS, draw
from tests.stress.schedule import KILLING, START, STRIDE, Case, Fault, interleaved

MAP = Case(seed=0, scenario="calm", workload="map", loader="sync", length=8, batch_size=2)
ORDER = [list(range(8))]
END = Event("end")


def batch(*indices: int) -> Event:
    return Event("batch", indices, tuple((float(i),) * 3 for i in indices))


def error(*names: str) -> Event:
    return Event("error", names=names)


RIGHT = [batch(0, 1), batch(2, 3), batch(4, 5), batch(6, 7), END]


def edited(*changes: Callable[[list[Event]], object]) -> list[Event]:
    events = list(RIGHT)
    for change in changes:
        change(events)
    return events


WRONG: dict[str, list[Event]] = {
    "missing": edited(lambda e: e.pop(1)),
    "doubled": edited(lambda e: e.insert(2, e[1])),
    "swapped": edited(lambda e: e.insert(0, e.pop(1))),
    "split": edited(lambda e: e.__setitem__(slice(0, 1), [batch(0), batch(1)])),
    "never asked for": edited(lambda e: e.insert(4, batch(8, 9))),
    "wrong bytes": edited(lambda e: e.__setitem__(0, e[0]._replace(wrong="sample 0 has wrong bytes"))),
    "an error": edited(lambda e: e.__setitem__(1, error("ValueError"))),
    "no end": edited(lambda e: e.pop()),
    "more after the end": edited(lambda e: e.append(batch(0, 1))),
    "nothing": [],
}


def test_what_is_right_passes() -> None:
    """An epoch that came as it must has no differences."""
    (epoch,) = expected(MAP, ORDER)
    assert compare(epoch, RIGHT, "epoch 0") == []


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_wrong_is_told(name: str, ordered: bool) -> None:
    """A batch that is missing, doubled, misplaced, torn or changed is reported; out of order, any order is right."""
    (epoch,) = expected(replace(MAP, in_order=ordered), ORDER)
    problems = compare(epoch, WRONG[name], "epoch 0")
    assert bool(problems) == (ordered or name != "swapped")
    assert all(problem.startswith("epoch 0: ") for problem in problems)


def test_a_death_without_restarts_ends_the_epoch() -> None:
    """`WorkerDied` must come, with all before it right and not later than the batch of the fault."""
    case = replace(MAP, seeded=False, faults=(Fault("kill", at=4, number=9),))
    (epoch,) = expected(case, ORDER)
    died = error("WorkerDied", "LoaderError")
    assert compare(epoch, [*RIGHT[:2], died, END], "") == []
    assert compare(epoch, [died, END], "") == []
    assert compare(epoch, [died, *RIGHT], "") == []  # it had not begun, and the next call begins it
    assert compare(epoch, [died, *RIGHT[:2]], "")
    assert compare(epoch, [*RIGHT[:3], died, END], "")  # the batch over which it died cannot have come
    assert compare(epoch, [RIGHT[1], died, END], "")
    assert compare(epoch, RIGHT, "")
    assert compare(epoch, [*RIGHT[:2], died, RIGHT[2], END], "")


def test_a_death_that_heals_shows_nowhere() -> None:
    """With restarts left the epoch is that of an undisturbed run."""
    (epoch,) = expected(replace(MAP, faults=(Fault("kill", at=4, number=9),)), ORDER)
    assert epoch.items == [Item((0, 1)), Item((2, 3)), Item((4, 5)), Item((6, 7))]
    assert not epoch.stop


def test_a_poisoned_task_stands_in_its_place() -> None:
    """A task that kills every worker gives an error in its place, or nothing if it is skipped."""
    case = replace(MAP, faults=(Fault("kill", at=4, strikes=0, number=11),), max_worker_restarts=5)
    (epoch,) = expected(case, ORDER)
    assert epoch.items[2] == Item(None, ("TaskQuarantined",))
    (epoch,) = expected(replace(case, on_error="skip"), ORDER)
    assert [item.indices for item in epoch.items] == [(0, 1), (2, 3), (6, 7)]


def test_a_task_that_sends_sigkill_is_no_poison() -> None:
    """While there are restarts nothing shows; where there are never enough the epoch stops before it."""
    fault = Fault("kill", at=4, strikes=3, number=9)
    (epoch,) = expected(replace(MAP, faults=(fault,), max_worker_restarts=5), ORDER)
    assert epoch == expected(MAP, ORDER)[0]
    (epoch,) = expected(replace(MAP, faults=(replace(fault, strikes=0),), max_worker_restarts=5), ORDER)
    assert (epoch.stop, epoch.by, epoch.must_stop) == (("WorkerDied",), 2, True)


def test_bad_samples() -> None:
    """A bad sample is an error in its batch's place, or missing in it, or replaced."""
    faults = (Fault("raise", at=2, strikes=0), Fault("raise", at=6, strikes=0), Fault("raise", at=7, strikes=0))
    case = replace(MAP, faults=faults)

    def indices(case: Case) -> list[tuple[int, ...] | None]:
        return [item.indices for item in expected(case, ORDER)[0].items]

    assert indices(case) == [(0, 1), None, (4, 5), None]
    assert indices(replace(case, on_error="skip")) == [(0, 1), (3,), (4, 5)]
    assert indices(replace(case, on_error="callable")) == [(0, 1), (-3, 3), (4, 5), (-7, -8)]


def test_streams_are_interleaved_as_in_torch() -> None:
    """Workers in turn; one whose share is over is left out."""
    case = Case(seed=0, scenario="calm", workload="stream", loader="sync", shares=(3, 0, 5), batch_size=2, workers=3)
    second = 2 * STRIDE
    rows = [[0, 1], [second, second + 1], [2], [second + 2, second + 3], [second + 4]]
    assert interleaved(case) == rows
    bad = replace(case, faults=(Fault("raise", at=1, worker=2, strikes=0),))
    assert [item.indices for item in expected(bad, [])[0].items] == [
        (0, 1),
        None,
        (2,),
        (second + 2, second + 3),
        (second + 4,),
    ]


def test_an_open_end_may_come_anywhere_but_be_wrong_nowhere() -> None:
    """Of a consumer that left early only the batches that it took are checked."""
    (epoch,) = expected(replace(MAP, leave="break", leave_after=2), ORDER)
    assert compare(epoch, RIGHT[:2], "") == []
    assert compare(epoch, [RIGHT[1]], "")


def test_errors_in_place_out_of_order() -> None:
    """Out of order, an error names no batch: the number of missing batches must be the number of errors."""
    epoch = Epoch([Item((0, 1), ("OSError",)), Item((2, 3), ("OSError",)), Item((4, 5), ("OSError",))], ordered=False)
    assert compare(epoch, [error("OSError"), batch(4, 5), batch(0, 1), END], "") == []
    assert compare(epoch, [error("OSError"), batch(4, 5), END], "")


def test_other_random_numbers_are_told() -> None:
    """The draws of every sample are compared with those of the undisturbed run."""
    changed = [RIGHT[0]._replace(draws=((0.0,) * 3, (0.5,) * 3)), *RIGHT[1:]]
    assert draws_differ(RIGHT, RIGHT, "") == []
    assert "[1]" in draws_differ(changed, RIGHT, "")[0]


# ------------------------------------------------------------------------------------------- drawn cases


def test_a_seed_is_a_case() -> None:
    """The same seed gives the same case; seeds differ; every scenario is drawn."""
    cases = [draw(seed) for seed in range(400)]
    assert cases == [draw(seed) for seed in range(400)]
    assert len({str(replace(case, seed=0)) for case in cases}) > 390
    assert {case.scenario for case in cases} == set(SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_drawn_cases_can_be_told_beforehand(scenario: str) -> None:
    """Faults strike samples that exist, none is to be blamed on a task with another, and all is plain data."""
    for seed in range(60):
        case = draw(seed, scenario)
        orders = [list(range(case.length))] * case.epochs
        assert len(expected(case, orders, [[]] * case.epochs)) == case.epochs
        assert case.batches > 0
        assert "seed" in case.to_dict() or not seed
        deaths = case.having(*KILLING)
        tasks = [(fault.epoch, fault.worker, fault.at // case.batch_size) for fault in deaths]
        assert len(set(tasks)) == len(tasks)
        for fault in case.having(*KILLING, "raise", "starve"):
            if fault.at == START:
                continue
            share = case.shares[fault.worker] if case.streams else case.length
            assert 0 <= fault.at < share
            assert fault.epoch < case.epochs
        if case.having("stop", "hang", "hang in C", "stop worker"):
            assert case.worker_timeout or case.timeout
