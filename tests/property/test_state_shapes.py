"""A `StatefulDataLoader` gives torchdata's batches, and after resuming the remaining batches of an undisturbed loader.

Compared bit for bit, for all kinds of datasets and iterators with a state, for samples that draw from a generator that
the dataset saves, and for states that are taken before, in and after epochs.

    ASYNCLOADER_CONFIGURATIONS=5000 make test ARGS="--timeout=0 tests/property/test_state_shapes.py"
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from asyncloader import StatefulDataLoader
from tests.drawn import scaled
from tests.property.state_shapes import SHAPES, STREAMS

EXAMPLES = int(os.environ.get("ASYNCLOADER_CONFIGURATIONS") or scaled(40))

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:neither the dataset nor its iterator has state_dict"),
]

Batches = list[list[list[float]]]


@dataclass(frozen=True)
class Case:
    """When a state of a loader is taken: `step` batches into `epoch`; None: before that epoch's `iter()`."""

    shape: str
    draws: bool = False
    workers: int = 0
    persistent: bool = False
    shuffle: bool = False
    length: int = 7
    size: int | None = 2
    every: int = 1
    epoch: int = 0
    step: int | None = 3
    trains: bool = False  # the consumer draws random numbers, too

    def loader(self, kind: Any) -> Any:
        dataset = SHAPES[self.shape](self.length, self.draws)
        options: dict[str, Any] = {"snapshot_every_n_steps": self.every, "num_workers": self.workers}
        if self.workers:
            options |= {"persistent_workers": self.persistent, "multiprocessing_context": "fork"}
        if self.shuffle:
            options["shuffle"] = True
        return kind(dataset, self.size, **options)

    @property
    def next_epoch_too(self) -> bool:
        """Whether the epoch after the resumed epoch is determined: new workers' base seed is the main process's."""
        return not self.draws or not self.workers or self.persistent


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(st.sampled_from(sorted(SHAPES)))
    workers = draw(st.sampled_from([0, 0, 0, 1, 1, 2]))
    step = draw(st.none() | st.integers(0, 8))
    # A draw from a generator that is in no state cannot be repeated, unless only the base seed decides it. Iterators
    # save it as long as they live: not between epochs.
    draws = shape != "iterators" and draw(st.booleans())
    draws = draws and (not shape.startswith("stateless") or (workers > 0 and not step))
    persistent = workers > 0 and not shape.startswith("stateless") and draw(st.booleans())
    return Case(
        shape=shape,
        draws=draws,
        workers=workers,
        persistent=persistent,
        shuffle=shape not in STREAMS and draw(st.booleans()),
        length=draw(st.integers(1, 12)),
        size=draw(st.sampled_from([None, 1, 2, 3])),
        every=draw(st.sampled_from([1, 1, 2, 3])),
        epoch=draw(st.sampled_from([0, 0, 1])),
        step=step,
        trains=draw(st.booleans()),
    )


def flat(batch: torch.Tensor) -> list[list[float]]:
    return batch.reshape(-1, batch.shape[-1]).tolist()


def rest(case: Case, iterator: Any) -> Batches:
    batches = []
    for batch in iterator:
        batches.append(flat(batch))
        if case.trains:
            torch.rand(1)
    return batches


def run(case: Case, kind: Any) -> tuple[Batches, Any, list[Batches]]:
    """Return the batches before the state is taken, the state, and the batches after it."""
    torch.manual_seed(4)
    loader = case.loader(kind)
    before: Batches = []
    for _ in range(case.epoch):
        before += rest(case, loader)
    after: list[Batches] = []
    iterator = None if case.step is None else iter(loader)
    try:
        for _ in range(case.step or 0):
            before.append(flat(next(iterator)))  # type: ignore[arg-type]
            if case.trains:
                torch.rand(1)
    except StopIteration:
        iterator = None
    state = loader.state_dict()
    if iterator is not None:
        after.append(rest(case, iterator))
    del iterator
    while len(after) < 1 + case.next_epoch_too:
        after.append(rest(case, loader))
    del loader
    return before, state, after


def resumed(case: Case, kind: Any, state: Any) -> list[Batches]:
    torch.manual_seed(99)
    loader = case.loader(kind)
    loader.load_state_dict(state)
    return [rest(case, loader) for _ in range(1 + case.next_epoch_too)]


def check(case: Case) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    ours = run(case, StatefulDataLoader)
    theirs = run(case, stateful)
    assert (ours[0], ours[2]) == (theirs[0], theirs[2])
    assert resumed(case, StatefulDataLoader, ours[1]) == ours[2]


@pytest.mark.thorough
@given(case=cases())
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(Case("itself"))
@example(Case("itself", workers=1, length=30, size=1, step=20))
@example(Case("itself", workers=1, persistent=True, epoch=1, step=None))
@example(Case("itself", draws=True, step=None))
@example(Case("map", draws=True, step=None, shuffle=True))
@example(Case("map", draws=True, workers=2, step=0, shuffle=True))
@example(Case("map", draws=True, epoch=1, step=None, trains=True))
@example(Case("stateless map", draws=True, workers=2, step=None))
def test_resumes_as_torchdata_does(case: Case) -> None:
    """Undisturbed, our loader gives torchdata's batches; resumed, it gives the rest of the undisturbed epoch, and
    the next epoch where that is determined.
    """
    check(case)
