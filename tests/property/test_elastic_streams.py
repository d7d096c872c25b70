"""Fixed streams, interrupted and resumed with other workers and other ranks, give the batches of one undisturbed run.

Draws formats, sizes of shards (also empty, missing, truncated ones), buffers, workers, ranks, places to stop, and
workers that are killed. More cases with the marker `chaos`:

    ASYNCLOADER_CONFIGURATIONS=1000 make test ARGS="--timeout=0 -m chaos tests/property/test_elastic_streams.py"
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.drawn import scaled
from tests.helpers.faulty import Faults
from tests.helpers.remote_folders import Killing, dataset_of, flat, make_shards, number_of, plain, with_method
from tests.helpers.seeded_runs import Stepwise

EXAMPLES = int(os.environ.get("ASYNCLOADER_CONFIGURATIONS") or scaled(60))
SETTINGS: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:DataLoader worker . died and was replaced:RuntimeWarning"),
]

ENDINGS = ("tar", "tar.gz", "jsonl", "jsonl.zst", "parquet", "mds", "tfrecord")
GLOBAL = (1, 2, 4, 6, 12)


@dataclass(frozen=True)
class Stage:
    """A part of a run.

    Attributes:
        workers: of each rank.
        ranks: number of ranks; they divide the global batch.
        kind: the loader.
        place: "fork", or "threads".
        steps: after which it stops.
    """

    workers: int
    ranks: int
    kind: str
    place: str
    steps: int


@dataclass(frozen=True)
class Case:
    """Shards, and a run over them in stages.

    Attributes:
        damage: of the shard `damaged`: "", "missing" or "cut".
        deaths: numbers of samples whose worker is killed, once, in a stage with processes.
    """

    ending: str
    sizes: tuple[int, ...]
    damage: str
    damaged: int
    batch: int
    streams: int
    shuffle: int
    stages: tuple[Stage, ...]
    deaths: tuple[int, ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ending = draw(st.sampled_from(ENDINGS))
    sizes = draw(st.lists(st.integers(0 if ending == "jsonl" else 1, 30), min_size=1, max_size=6).map(tuple))
    batch = draw(st.sampled_from(GLOBAL))
    stage = st.builds(
        Stage,
        workers=st.sampled_from([0, 0, 1, 2, 3, 5]),
        ranks=st.sampled_from([ranks for ranks in (1, 2, 3, 4, 6) if batch % ranks == 0]),
        kind=st.sampled_from(["sync", "asyncio", "uvloop"]),
        place=st.sampled_from(["fork", "threads", "threads"]),
        steps=st.integers(0, 8),
    )
    total = sum(sizes)
    return Case(
        ending,
        sizes,
        draw(st.sampled_from(["", "", "missing", "cut"])),
        draw(st.integers(0, len(sizes) - 1)),
        batch,
        draw(st.integers(1, 5)),
        draw(st.sampled_from([0, 0, 1, 4, 16])),
        draw(st.lists(stage, min_size=1, max_size=3).map(tuple)),
        draw(st.lists(st.integers(0, total - 1), max_size=1).map(tuple)) if total else (),
    )


def options_of(case: Case, stage: Stage, rank: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "batch_size": case.batch // stage.ranks,
        "seed": 3,
        "num_workers": stage.workers,
        "on_uneven": "pad",
        "on_error": "raise" if not case.damage else lambda error, index: -1,
        "max_worker_restarts": 9,
    }
    if stage.ranks > 1:
        options |= {"rank": rank, "world_size": stage.ranks}
    if not stage.workers:
        del options["max_worker_restarts"]
        return options
    return options | {"workers": "threads"} if stage.place == "threads" else with_method(options)


def damage(case: Case, folder: Path) -> None:
    """Remove or cut a shard, if the case says so."""
    shards = sorted(path for path in folder.iterdir() if path.name != "index.json")
    path = shards[case.damaged]
    if case.damage == "missing":
        path.unlink()
    elif case.damage == "cut":
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 2 // 3])


def check(case: Case) -> None:
    """Run the case; fail at the first global batch that differs from the undisturbed run's."""
    with tempfile.TemporaryDirectory() as folder:
        shards, struck = Path(folder) / "shards", Path(folder) / "struck"
        shards.mkdir()
        struck.mkdir()
        url: Any = make_shards(shards, case.sizes, ending=case.ending)
        if case.ending != "mds":
            url = sorted(str(path) for path in shards.iterdir())
        damage(case, shards)
        killing = Killing(Faults(struck, dict.fromkeys(case.deaths, "SIGKILL")))

        def dataset(decode: Any) -> Any:
            return dataset_of(url, shuffle_buffer=case.shuffle, streams=case.streams, decode=decode)

        alone = Stage(0, 1, "sync", "", 0)
        with Stepwise("sync", dataset(number_of), **options_of(case, alone, 0)) as run:
            whole = [plain(batch) for batch in run.epoch()]
        # The last batch is filled up with its own samples.
        samples = [number for number in [*flat(whole[:-1]), *dict.fromkeys(flat(whole[-1:]))] if number >= 0]
        assert len(set(samples)) == len(samples)
        assert case.damage or sorted(samples) == list(range(sum(case.sizes)))
        done, state = 0, None
        for last, stage in zip([*[False] * len(case.stages), True], [*case.stages, case.stages[0]], strict=True):
            killed = stage.workers and stage.place == "fork"
            steps = len(whole) - done if last else min(stage.steps, len(whole) - done)
            ranks, states = [], []
            for rank in range(stage.ranks):
                options = options_of(case, stage, rank)
                with Stepwise(stage.kind, dataset(killing if killed else number_of), **options) as run:
                    if state is not None:
                        run.loader.load_state_dict(state)
                    run.begin()
                    ranks.append([plain(batch) for batch in (run.rest() if last else run.take(steps))])
                    states.append(run.loader.state_dict())
            assert [len(batches) for batches in ranks] == [steps] * stage.ranks
            for step in range(steps):
                assert [number for batches in ranks for number in batches[step]] == whole[done + step]
            done += steps
            assert all(each == states[0] for each in states)
            state = json.loads(json.dumps(states[0]))


@pytest.mark.thorough
@pytest.mark.timeout(max(600, 3 * EXAMPLES))
@settings(max_examples=max(6, EXAMPLES // 4), **SETTINGS)
@given(cases())
def test_a_run_in_stages_gives_the_undisturbed_batches(case: Case) -> None:
    """Whatever the workers and ranks of each stage, and whoever is killed."""
    event(f"{case.ending}, {len(case.stages)} stages")
    check(case)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@settings(max_examples=EXAMPLES, **SETTINGS)
@given(cases())
def test_many_runs_in_stages_give_the_undisturbed_batches(case: Case) -> None:
    """This holds for many more cases."""
    check(case)
