"""Packed rows, interrupted and resumed with other workers and other ranks, are those of one undisturbed run.

Draws lengths, strategies, domains, windows, workers, ranks, places to stop, and workers that are killed. More cases
with the marker `chaos`:

    ASYNCLOADER_CONFIGURATIONS=1000 make test ARGS="--timeout=0 -m chaos tests/property/test_packed_rows.py"
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from asyncloader import Dataset, PackingSampler, PackSequences, SequenceRows, sample_rng
from asyncloader.packing.bin_packing import STRATEGIES
from tests.drawn import scaled
from tests.helpers.faulty import Faults
from tests.helpers.seeded_runs import Stepwise

EXAMPLES = int(os.environ.get("ASYNCLOADER_CONFIGURATIONS") or scaled(20))
SETTINGS: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:DataLoader worker . died and was replaced:RuntimeWarning"),
]

GLOBAL = (1, 2, 4, 6)


class Texts(Dataset[Any]):
    """Sequence i: its tokens, and random numbers of seeded mode. Some kill the worker that reads them, once."""

    def __init__(self, lengths: tuple[int, ...], faults: Faults | None) -> None:
        self.lengths = lengths
        self.faults = faults

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        if self.faults is not None:
            self.faults.strike(index)
        length = self.lengths[index]
        return {
            "tokens": np.arange(length) + 1000 * index,
            "noise": sample_rng().numpy.random(length),
            "name": str(index),
        }


@dataclass(frozen=True)
class Stage:
    """A part of a run, until it stops after some steps; `ranks` divide the global batch."""

    workers: int
    ranks: int
    kind: str
    place: str
    steps: int


@dataclass(frozen=True)
class Case:
    """Sequences, how they are packed, and a run over them in stages.

    Attributes:
        batch: rows of a global batch.
        deaths: sequences whose worker is killed, once, in a stage with processes.
    """

    lengths: tuple[int, ...]
    domains: int
    options: dict[str, Any]
    batch: int
    pad: bool
    stages: tuple[Stage, ...]
    deaths: tuple[int, ...]

    def sampler(self) -> PackingSampler:
        domains = np.arange(len(self.lengths)) % self.domains
        return PackingSampler(self.lengths, seed=5, domains=domains, on_too_long="split", **self.options)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=80).map(tuple))
    batch = draw(st.sampled_from(GLOBAL))
    stage = st.builds(
        Stage,
        workers=st.sampled_from([0, 0, 1, 2, 5]),
        ranks=st.sampled_from([ranks for ranks in (1, 2, 3, 4, 6) if batch % ranks == 0]),
        kind=st.sampled_from(["sync", "asyncio", "uvloop"]),
        place=st.sampled_from(["fork", "threads", "threads"]),
        steps=st.integers(0, 8),
    )
    options = {
        "max_tokens": draw(st.integers(10, 60)),
        "strategy": draw(st.sampled_from(STRATEGIES)),
        "shuffle": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
        "window": draw(st.none() | st.integers(1, 40)),
    }
    return Case(
        lengths,
        draw(st.sampled_from([1, 1, 2, 5])),
        options,
        batch,
        draw(st.booleans()),
        draw(st.lists(stage, min_size=1, max_size=3).map(tuple)),
        draw(st.lists(st.integers(0, len(lengths) - 1), max_size=1).map(tuple)),
    )


def options_of(case: Case, stage: Stage, rank: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "batch_size": case.batch // stage.ranks,
        "sampler": case.sampler(),
        "collate_fn": PackSequences(pad_to=case.options["max_tokens"] if case.pad else None),
        "seed": 3,
        "num_workers": stage.workers,
        "on_uneven": "pad",
    }
    if stage.ranks > 1:
        options |= {"rank": rank, "world_size": stage.ranks}
    if stage.workers:
        place = {"workers": "threads"} if stage.place == "threads" else {"multiprocessing_context": "fork"}
        options |= {"max_worker_restarts": 9} | place if stage.place == "fork" else place
    return options


def sequences(batch: Any) -> list[Any]:
    """Each sequence of a batch, and each row's padding, with what was packed of it."""
    cuts = batch["cu_seqlens"].tolist()
    fields = {name: batch[name].flatten().tolist() for name in ("tokens", "noise", "position_ids")}
    assert all(len(values) == cuts[-1] for values in fields.values())
    assert batch["max_seqlen"] == max(np.diff(cuts))
    return [{name: values[start:stop] for name, values in fields.items()} for start, stop in pairwise(cuts)]


def check(case: Case) -> None:
    """Run the case; fail at the first global batch that differs from the undisturbed run's."""
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(Path(folder), dict.fromkeys(case.deaths, "SIGKILL"))
        alone = Stage(0, 1, "sync", "", 0)
        with Stepwise("sync", SequenceRows(Texts(case.lengths, None)), **options_of(case, alone, 0)) as run:
            whole = [sequences(batch) for batch in run.epoch()]
        done, state = 0, None
        for last, stage in zip([*[False] * len(case.stages), True], [*case.stages, case.stages[0]], strict=True):
            killed = stage.workers and stage.place == "fork"
            steps = len(whole) - done if last else min(stage.steps, len(whole) - done)
            ranks, states = [], []
            for rank in range(stage.ranks):
                dataset = SequenceRows(Texts(case.lengths, faults if killed else None))
                with Stepwise(stage.kind, dataset, **options_of(case, stage, rank)) as run:
                    if state is not None:
                        run.loader.load_state_dict(state)
                    run.begin()
                    ranks.append([sequences(batch) for batch in (run.rest() if last else run.take(steps))])
                    states.append(run.loader.state_dict())
            assert [len(batches) for batches in ranks] == [steps] * stage.ranks
            for step in range(steps):
                assert [*chain.from_iterable(batches[step] for batches in ranks)] == whole[done + step]
            done += steps
            assert all(each == states[0] for each in states)
            state = json.loads(json.dumps(states[0]))


@pytest.mark.thorough
@pytest.mark.timeout(max(600, 3 * EXAMPLES))
@settings(max_examples=EXAMPLES, **SETTINGS)
@given(cases())
def test_a_run_in_stages_gives_the_undisturbed_rows(case: Case) -> None:
    """Whatever the workers and ranks of each stage, and whoever is killed."""
    event(f"{case.options['strategy']}, {len(case.stages)} stages")
    check(case)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@settings(max_examples=EXAMPLES, **SETTINGS)
@given(cases())
def test_many_runs_in_stages_give_the_undisturbed_rows(case: Case) -> None:
    """This holds for many more cases."""
    check(case)
