"""Interrupted runs over shards give the same batches as uninterrupted ones: both loaders, real workers, real files.

`test_shard_assignment.py` tests the pure parts in far more cases; this tests the parts together. A few cases per run,
more with the marker `chaos`:

    ASYNCLOADER_CONFIGURATIONS=1000 make test ARGS="--timeout=0 -m chaos tests/property/test_remote_resume.py"
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.drawn import scaled
from tests.helpers.faulty import Faults
from tests.helpers.remote_folders import Killing, dataset_of, flat, make_shards, number_of, plain, with_method
from tests.helpers.seeded_runs import Stepwise

EXAMPLES = int(os.environ.get("ASYNCLOADER_CONFIGURATIONS") or scaled(100))
SETTINGS: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:DataLoader worker . died and was replaced:RuntimeWarning"),
]

ENDINGS = ("tar", "tar.gz", "jsonl", "jsonl.zst", "parquet", "mds", "tfrecord")


@dataclass(frozen=True)
class Case:
    """A loader over small shards, and where it is interrupted.

    Attributes:
        stops: for each part but the last, the number of further batches after which its state is saved.
        kinds: the loaders of the parts, used in turn.
        deaths: numbers of samples whose worker is killed, once. (Two deaths over one batch would end the run.)
    """

    ending: str
    sizes: tuple[int, ...]
    workers: int
    batch_size: int | None
    shuffle: int
    drop_last: bool
    seeded: bool
    stops: tuple[int, ...]
    kinds: tuple[str, ...]
    deaths: tuple[int, ...]

    @property
    def options(self) -> dict[str, Any]:
        restarts = {} if self.seeded or not self.workers else {"max_worker_restarts": 9}
        return with_method(
            {
                "batch_size": self.batch_size,
                "num_workers": self.workers,
                "drop_last": self.drop_last and self.batch_size is not None,
                "seed": 3 if self.seeded else None,
                **restarts,
            }
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    workers = draw(st.integers(0, 3))
    sizes = draw(st.lists(st.integers(1, 14), min_size=1, max_size=5).map(tuple))
    number = st.integers(0, sum(sizes) - 1)
    return Case(
        ending=draw(st.sampled_from(ENDINGS)),
        sizes=sizes,
        workers=workers,
        batch_size=draw(st.one_of(st.none(), st.integers(1, 5))),
        shuffle=draw(st.sampled_from([0, 0, 1, 4, 16])),
        drop_last=draw(st.booleans()),
        seeded=draw(st.booleans()),
        stops=draw(st.lists(st.integers(0, 6), min_size=1, max_size=2).map(tuple)),
        kinds=draw(st.permutations(["sync", "asyncio", "uvloop"]).map(tuple)),
        deaths=draw(st.lists(number, max_size=1).map(tuple)) if workers else (),
    )


@contextmanager
def folder_of(case: Case) -> Generator[tuple[str, Path]]:
    """Make the shards' URL, and a folder for marks of the deaths that happened."""
    with tempfile.TemporaryDirectory() as folder:
        shards, struck = Path(folder) / "shards", Path(folder) / "struck"
        shards.mkdir()
        struck.mkdir()
        yield make_shards(shards, case.sizes, ending=case.ending), struck


def check(case: Case) -> None:
    """Run the case; fail at the first batch that differs from the uninterrupted run's."""
    with folder_of(case) as (url, struck):
        decode = Killing(Faults(struck, dict.fromkeys(case.deaths, "SIGKILL"))) if case.deaths else number_of
        epochs = []
        for made in (number_of, decode):
            torch.manual_seed(1)
            with Stepwise("sync", dataset_of(url, shuffle_buffer=case.shuffle, decode=made), **case.options) as run:
                epochs.append([plain(batch) for batch in run.epoch()])
        whole = epochs[0]
        assert epochs[1] == whole, "another run"
        size = case.batch_size or 1
        count = sum(case.sizes)
        wanted = count // size * size if case.options["drop_last"] else count
        assert len(set(flat(whole))) == len(flat(whole)) == wanted
        assert set(flat(whole)) <= set(range(count))
        assert all(len(batch) == size for batch in whole[:-1])
        for left in struck.iterdir():
            left.unlink()
        got: list[list[int]] = []
        state: Any = None
        torch.manual_seed(1)
        for number, stop in enumerate((*case.stops, None)):
            dataset = dataset_of(url, shuffle_buffer=case.shuffle, decode=decode)
            with Stepwise(case.kinds[number], dataset, **case.options) as run:
                if state is not None:
                    run.loader.load_state_dict(state)
                    torch.manual_seed(77 + number)
                run.begin()
                if stop is None:
                    got += map(plain, run.rest())
                    break
                got += map(plain, run.take(min(stop, len(whole) - len(got))))
                state = json.loads(json.dumps(run.loader.state_dict()))
        assert got == whole, "interrupted"


@pytest.mark.thorough
@pytest.mark.timeout(max(600, 3 * EXAMPLES))
@settings(max_examples=max(6, EXAMPLES // 4), **SETTINGS)
@given(cases())
def test_an_interrupted_run_gives_what_it_would_have_given(case: Case) -> None:
    """Killed, saved and resumed, by whichever loader, it gives the same batches in the same order."""
    event(f"{case.ending}, {case.workers} workers")
    check(case)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@settings(max_examples=4 * EXAMPLES, **SETTINGS)
@given(cases())
def test_many_interrupted_runs_give_what_they_would_have_given(case: Case) -> None:
    """This holds for many more cases."""
    check(case)
