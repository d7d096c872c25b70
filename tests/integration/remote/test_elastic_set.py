"""States of fixed streams that do not fit are resumed as a set of samples, where the dataset says so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncloader import RemoteIterableDataset
from asyncloader.errors import StateError
from tests.helpers.remote_folders import dataset_of, flat, make_shards, plain, with_method
from tests.helpers.seeded_runs import Stepwise

pytestmark = [pytest.mark.independent, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

SIZES = (31, 40, 1, 17, 50)
ALL = [*range(sum(SIZES))]


@pytest.fixture(scope="module", params=["tar", "jsonl.gz", "parquet", "mds", "tfrecord"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_shards(tmp_path_factory.mktemp("shards"), SIZES, ending=request.param)


def run(
    url: str, state: Any, steps: int | None, *, kind: str = "sync", ranks: int = 1, **given: Any
) -> tuple[list[list[int]], Any]:
    """A part of a run, on all its ranks: the global batches, and the state of the last rank."""
    about = {name: given.pop(name) for name in ("streams", "shuffle_buffer", "elastic") if name in given}
    found, states = [], []
    for rank in range(ranks):
        options: dict[str, Any] = {"batch_size": 6, "seed": 3, "on_uneven": "pad"} | given
        options = options if given.get("workers") else with_method(options)
        options |= {"rank": rank, "world_size": ranks} if ranks > 1 else {}
        with Stepwise(kind, dataset_of(url, **{"streams": 2, "elastic": "set"} | about), **options) as part:
            if state is not None:
                part.loader.load_state_dict(state)
                assert part.loader.state_dict() == state
            part.begin()
            found.append([plain(batch) for batch in (part.rest() if steps is None else part.take(steps))])
            states.append(json.loads(json.dumps(part.loader.state_dict())))
            if steps is None:  # the next epoch is a whole one
                after = {*flat([plain(batch) for batch in part.epoch()])}
                assert after == {*ALL} if ranks == 1 else after < {*ALL}
    assert all(each == states[0] for each in states)
    return [flat(parts) for parts in zip(*found, strict=True)], states[0]


@pytest.mark.parametrize(
    "stages",
    [
        [{"streams": 3}, {"streams": 5, "num_workers": 2}],
        [{"batch_size": 4}, {"batch_size": 5, "num_workers": 1, "workers": "threads"}],
        [{"ranks": 3, "batch_size": 3}, {"ranks": 2, "batch_size": 7, "kind": "asyncio"}],
        [{"shuffle_buffer": 9, "kind": "uvloop", "num_workers": 1}, {"shuffle_buffer": 0, "streams": 1}],
        [{"num_workers": 2}, {"ranks": 2, "batch_size": 5, "shuffle_buffer": 30, "streams": 9}],
    ],
    ids=str,
)
def test_the_rest_of_an_epoch(url: str, stages: Sequence[dict[str, Any]]) -> None:
    """It is the samples that were not delivered, however often the run is resumed; the order is always the same."""
    head, state = run(url, None, 4, shuffle_buffer=12)
    found = flat(head)
    sizes = [len(json.dumps(state))]
    for number, stage in enumerate([*stages, *stages[:1]]):
        options: dict[str, Any] = {"shuffle_buffer": 12} | stage
        batches, after = run(url, state, 3, **options)
        alone: dict[str, Any] = {**options, "num_workers": 0, "workers": None, "kind": "sync"}
        again, _ = run(url, state, 3, **alone)
        assert again == batches
        found += flat(batches)
        sizes.append(len(json.dumps(after)))
        same, _ = run(url, after, 1, **options, elastic="order")  # in the order that it has now
        rest, _ = run(url, after, None, **options)
        assert rest[0] == same[0]
        assert sorted([*found, *dict.fromkeys(flat(rest))]) == ALL or len({*flat(rest[-1:])}) < len(rest[-1]), number
        assert {*found, *flat(rest)} == {*ALL}
        state = after
    assert len({*found}) == len(found)
    assert max(sizes) - sizes[0] < 120 * len(sizes)


def test_by_default_it_is_refused(url: str) -> None:
    """The error names the way out."""
    _, state = run(url, None, 4, elastic="order")
    for name, value in (("streams", 3), ("shuffle_buffer", 5), ("batch_size", 5)):
        changed: dict[str, Any] = {name: value, "elastic": "order"}
        with pytest.raises(StateError, match=r"elastic=.set. of the dataset resumes the samples"):
            run(url, state, 1, **changed)


def test_other_shards_are_refused(url: str, tmp_path: Path) -> None:
    """A set of samples belongs to its shards; and a state's orders are checked."""
    _, state = run(url, None, 4)
    other = make_shards(tmp_path, (31, 40), ending="tar")
    with pytest.raises(StateError, match="other shards"):
        run(other, state, 1, streams=3)
    changed = state["sampler"] | {"sampler": state["sampler"]["sampler"] | {"before": [[6, 0, 0, False, 1]]}}
    with pytest.raises(StateError, match="the state is broken: its earlier orders"):
        run(url, state | {"sampler": changed}, 1)


def test_a_finished_epoch(url: str) -> None:
    """The next epoch is a whole one, in any order."""
    with Stepwise("sync", dataset_of(url, streams=2, elastic="set"), batch_size=6, seed=3) as first:
        first.epoch()
        state = first.loader.state_dict()
    found, _ = run(url, state, None, batch_size=5, streams=3)
    assert {*flat(found)} == {*ALL}


def test_arguments() -> None:
    """What cannot be is refused."""
    with pytest.raises(ValueError, match="elastic should be 'order' or 'set'"):
        RemoteIterableDataset("a.tar", streams=2, elastic="any")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give streams=, too"):
        RemoteIterableDataset("a.tar", elastic="set")
