"""Feedback from the trainer to the sampler: it is delivered, within the stated bound, and is part of the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncloader import DataLoader, Tuning
from asyncloader.base.bridge import Bridge
from tests.helpers.running import BOTH
from tests.helpers.seeded_datasets import Rows
from tests.helpers.seeded_runs import Stepwise
from tests.helpers.state_parts import AwaitedCurriculum, Curriculum, Replayed

N = 400
MODES: list[dict[str, Any]] = [{}, {"seed": 3}]
SAMPLERS = [Curriculum, AwaitedCurriculum]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("make", SAMPLERS)
@pytest.mark.parametrize("mode", MODES, ids=["torch", "seeded"])
@pytest.mark.parametrize(("workers", "factor", "ahead"), [(0, None, 16), (1, 1, 0), (2, 2, 0), (2, 2, 5)])
def test_feedback_reaches_the_sampler(
    kind: str, make: Any, mode: dict[str, Any], workers: int, factor: int | None, ahead: int
) -> None:
    """Each batch is the number of reports that its sampler had received when it chose: the reports on all batches
    before, except those in flight, at most ``num_workers * prefetch_factor + 1`` batches, and `reorder_window` more in
    seeded mode.
    """
    bound = workers * (factor or 0) + 1 + (ahead if mode and workers else 0)
    options: dict[str, Any] = {"num_workers": workers, "prefetch_factor": factor, **mode}
    if mode:
        options["tuning"] = Tuning(reorder_window=ahead)
    staleness: list[int] = []
    with Stepwise(kind, Rows(N), batch_size=1, sampler=make(100), **options) as run:
        run.begin()
        for delivered in range(100):
            heard = int(run.step())
            staleness.append(delivered - heard)
            run.call(run.loader.feedback, delivered)
    assert max(staleness) <= bound
    assert min(staleness) >= 0


class EndsBehind(Bridge):
    """A loop whose last iterator ends behind the back of the first caller that asks whether it runs."""

    ends: Callable[[], object] | None = None

    @property
    def running(self) -> bool:
        found, (ends, self.ends) = super().running, (self.ends, None)
        if ends is not None:
            ends()
        return found


def test_the_last_iterator_ends_meanwhile() -> None:
    """A report that comes while the last iterator ends in another thread reaches the sampler."""
    sampler = AwaitedCurriculum(8)
    with DataLoader[Any](Rows(N), batch_size=2, sampler=sampler) as loader:
        bridge = loader._asyncloader_state.bridge = EndsBehind()
        batches: Any = iter(loader)
        next(batches)
        assert bridge.running
        bridge.ends = batches._shutdown_workers
        loader.feedback(7)
        assert sampler.heard == [7]


@pytest.mark.parametrize("kind", BOTH)
def test_a_sampler_that_does_not_listen(kind: str) -> None:
    """A TypeError names the sampler and the method that it lacks."""
    with (
        Stepwise(kind, Rows(N), batch_size=2, sampler=Replayed(4)) as run,
        pytest.raises(TypeError, match="Replayed has none"),
    ):
        run.call(run.loader.feedback, 1)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("make", SAMPLERS)
@pytest.mark.parametrize("mode", MODES, ids=["torch", "seeded"])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_heard_is_part_of_the_state(kind: str, make: Any, mode: dict[str, Any], workers: int) -> None:
    """A Stateful sampler resumes with the reports that it had at the last batch delivered, not read ahead."""
    options: dict[str, Any] = {"num_workers": workers, **mode}
    with Stepwise(kind, Rows(N), batch_size=2, sampler=make(40), **options) as run:
        run.begin()
        heard = -1
        for delivered in range(7):
            heard = run.step().tolist()[-1]
            run.call(run.loader.feedback, delivered)
        state = run.loader.state_dict()
    assert state["sampler"]["at"] == 7
    saved = state["sampler"]["sampler"]
    assert saved["given"] == 14
    assert len(saved["heard"]) == heard
    sampler = make(40)
    with Stepwise(kind, Rows(N), batch_size=2, sampler=sampler, **options) as run:
        run.loader.load_state_dict(state)
        run.begin()
        assert run.step().tolist() == [heard, heard]
        assert len(run.rest()) == 20 - 8


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MODES, ids=["torch", "seeded"])
def test_an_async_sampler_without_a_state_is_read_again(kind: str, workers: int, mode: dict[str, Any]) -> None:
    """Its indices are read and dropped; no data is fetched for them."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, **mode}
    with Stepwise(kind, Rows(40), sampler=Replayed(40), **options) as run:
        run.begin()
        run.take(6)
        state = run.loader.state_dict()
    sampler = Replayed(40)
    with Stepwise(kind, Rows(40), sampler=sampler, **options) as run:
        run.loader.load_state_dict(state)
        assert [row for batch in run.epoch() for row in batch.tolist()] == list(range(24, 40))
        assert sampler.given == 40
        assert len(run.epoch()) == 10
