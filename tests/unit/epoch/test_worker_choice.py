"""The worker with the fewest unanswered tasks: found in a heap as if all were looked at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncloader.epoch.reassignment import WorkerChoice

SHARE = 3


@given(st.integers(1, 9), st.data())
def test_it_is_the_one_that_a_look_at_all_finds(workers: int, data: st.DataObject) -> None:
    """The choice is right whatever is assigned, answered, delivered or ended in between."""
    active, load, unanswered = [True] * workers, [0] * workers, [0] * workers
    choice = WorkerChoice(unanswered)
    for _ in range(data.draw(st.integers(1, 60))):
        open_ones = [each for each in range(workers) if active[each] and load[each] < SHARE]
        chosen = choice.least(active, load, SHARE)
        assert chosen == min(open_ones, key=unanswered.__getitem__, default=None)
        worker = data.draw(st.integers(0, workers - 1))
        what = data.draw(st.sampled_from(["assign", "assign", "answer", "deliver", "end"]))
        if what == "assign" and chosen is not None:
            load[chosen] += 1
            unanswered[chosen] += 1
            choice.enter(chosen)
        elif what == "answer" and unanswered[worker]:
            unanswered[worker] -= 1
            choice.enter(worker)
        elif what == "deliver" and load[worker] > unanswered[worker]:
            load[worker] -= 1
            choice.enter(worker)
        elif what == "end" and data.draw(st.integers(0, 5)) == 0:
            active[worker] = False
