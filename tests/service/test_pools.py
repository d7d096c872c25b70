"""A loader's batches are the same wherever its workers are: own processes, at a Unix socket, over TCP, over TLS."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asyncloader import AsyncDataLoader, DataLoader, LoaderTimeout, Recovery, Service, TaskQuarantined
from tests.helpers.comparing import assert_same
from tests.helpers.running import KINDS, run_async
from tests.service import definitions
from tests.service.certificates import make_authority
from tests.service.serving import serving

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # local ones

PLACES = ["local", "unix", "tcp", "tls"]


class Places(NamedTuple):
    """Values for `workers=`."""

    unix: str
    tcp: str
    tls: Service

    def of(self, place: str) -> Any:
        """Return the value for a place; None for the loader's own processes."""
        return None if place == "local" else getattr(self, place)

    def of_deadly(self, place: str) -> Any:
        """Return the value for a place whose node lets loaders give arguments."""
        return self.of("tcp" if place == "tls" else place)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("nodes")
    files = make_authority(folder)
    tls = ["--tls-cert", files["node_cert"], "--tls-key", files["node_key"], "--tls-ca", files["ca"]]
    shown: dict[str, Any] = {"tls_ca": files["ca"], "tls_cert": files["loader_cert"], "tls_key": files["loader_key"]}
    with (
        serving(folder, [*NAMES, "deadly", "hanging"], "--open", "deadly", "--open", "hanging") as plain,
        serving(folder, NAMES, *tls, listen=["127.0.0.1:0"]) as secured,
    ):
        yield Places(plain.unix, plain.tcp, Service(secured.tcp, **shown))


NAMES = [
    "numbers",
    "drawn",
    "with_functions",
    "awaited",
    "awaited_with_functions",
    "stream",
    "async_stream",
    "broken",
    "odd",
    "large",
]
OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 3, "num_workers": 3}


def read(kind: str, loader_options: dict[str, Any], defined: Any, epochs: int = 1) -> list[list[Any]]:
    """Read the batches of some epochs."""
    if kind == "sync":
        with DataLoader[Any](defined, **loader_options) as loader:
            return [list(loader) for _ in range(epochs)]

    async def run() -> list[list[Any]]:
        async with AsyncDataLoader[Any](defined, **loader_options) as loader:
            return [[batch async for batch in loader] for _ in range(epochs)]

    return run_async(run(), kind)


def outcomes(loader: Any) -> list[Any]:
    """Read the batches of an epoch; an error stands in the place of a batch that raised."""
    batches, found = iter(loader), []
    while True:
        try:
            found.append(next(batches))
        except StopIteration:
            return found
        except Exception as error:
            found.append(error.with_traceback(None))


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize(
    "name", ["numbers", "with_functions", "awaited", "awaited_with_functions", "stream", "async_stream", "large"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_local_workers(kind: str, name: str, place: str, places: Places) -> None:
    """They are the same to the bit, over two epochs with the same workers, for each kind of dataset."""
    defined = getattr(definitions, name)()
    options = {**OPTIONS, "persistent_workers": True, "batch_size": 1 if name == "large" else 4}
    expected = read("sync", options, defined, epochs=2)
    assert len(expected[0]) > 8
    assert_same(read(kind, {**options, "workers": places.of(place)}, defined, epochs=2), expected)


@pytest.mark.parametrize("place", PLACES[1:])
def test_a_blocking_dataset_in_threads(place: str, places: Places) -> None:
    """Its batches are those of local workers, and after that those of a loader that reads it without threads."""
    options = {**OPTIONS, "concurrency": 4}
    expected = read("sync", options, definitions.drawn())
    assert_same(read("sync", {**options, "workers": places.of(place)}, definitions.drawn()), expected)
    options["concurrency"] = 1
    assert_same(read("sync", {**options, "workers": places.of(place)}, definitions.drawn()), expected)


@pytest.mark.parametrize("place", PLACES[1:])
def test_errors_come_in_their_places(place: str, places: Places) -> None:
    """Python's own error types stay; a type of the user's is named and not made. Both have the worker's traceback."""
    defined = definitions.broken()
    expected = outcomes(DataLoader[Any](defined, **OPTIONS))
    with DataLoader[Any](defined, **OPTIONS, workers=places.of(place)) as loader:
        got = outcomes(loader)
    assert len(got) == len(expected)
    kinds = set()
    for mine, local in zip(got, expected, strict=True):
        if not isinstance(local, Exception):
            assert_same(mine, local)
            continue
        kinds.add(type(mine))
        odd = type(local).__name__ == "OddError"
        assert type(mine) is (RuntimeError if odd else KeyError)
        caught = "Caught tests.service.definitions.OddError" if odd else "Caught KeyError"
        assert caught in str(mine)
        assert "in __getitem__" in str(mine)
        assert [note.partition(", in worker")[0] for note in mine.__notes__] == [
            note.partition(", in worker")[0] for note in local.__notes__
        ]
    assert kinds == {RuntimeError, KeyError}


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("policy", ["skip", "refill"])
def test_samples_that_raise(policy: Any, place: str, places: Places) -> None:
    """They are left out or replaced, and recorded, as by local workers."""
    found = []
    for workers in (None, places.of(place)):
        with DataLoader[Any](definitions.broken(), **OPTIONS, on_error=policy, workers=workers) as loader:
            batches = list(loader)
            found.append((batches, [(r.index, r.position, r.error, r.action) for r in loader.skipped_samples]))
    assert found[0][1]
    assert_same(found[1][0], found[0][0])
    assert [record[:2] for record in found[1][1]] == [record[:2] for record in found[0][1]]
    assert found[1][1] == found[0][1]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["numbers", "stream", "awaited"])
def test_states_move_between_places(name: str, place: str, places: Places) -> None:
    """An epoch that local workers began is resumed at a service, and an epoch of a service by local workers."""
    defined = getattr(definitions, name)()
    whole = read("sync", OPTIONS, defined)[0]
    for before, after in ((None, places.of(place)), (places.of(place), None)):
        with DataLoader[Any](defined, **OPTIONS, workers=before) as loader:
            batches = iter(loader)
            head = [next(batches) for _ in range(5)]
            state = loader.state_dict()
        with DataLoader[Any](defined, **OPTIONS, workers=after) as loader:
            loader.load_state_dict(state)
            assert_same([*head, *loader], whole)


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("name", ["stream", "async_stream"])
def test_streams_that_are_left_close_to_their_end(name: str, place: str, places: Places, caplog: Any) -> None:
    """The workers' last answers of an epoch arrive during the next epoch without effect: each epoch has the batches
    of local workers, over the same connections.
    """
    defined = getattr(definitions, name)()
    options = {**OPTIONS, "persistent_workers": True, "prefetch_factor": 3}

    def rounds(**changes: Any) -> list[Any]:
        with DataLoader[Any](defined, **options, **changes) as loader:
            return [list(itertools.islice(loader, stop)) for stop in (*range(6, 13), None)]

    assert_same(rounds(workers=places.of(place)), rounds())
    assert not caplog.records


@pytest.mark.parametrize("place", PLACES[1:])
def test_what_cannot_be_sent(place: str, places: Places) -> None:
    """The batch raises an error that names the field, or the type to be registered; the next batches are delivered."""
    options: dict[str, Any] = {**OPTIONS, "batch_size": 1, "num_workers": 1, "shuffle": False}
    with DataLoader[Any](definitions.odd(), **options, workers=places.of(place)) as loader:
        with pytest.raises(TypeError, match=r"\['deep'\]\[0\] is a builtins.object, which a service does not send"):
            list(loader)
        found = outcomes(loader)
    assert len(found) == 4
    assert type(found[1]) is TypeError
    assert str(found[1]).startswith("the batch has a tests.service.definitions.Box")
    assert "register_batch_type(Box)" in str(found[1])


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_that_dies_is_replaced(place: str, places: Places, tmp_path: Path) -> None:
    """No batch is lost or delivered twice; the death is counted."""
    expected = read("sync", OPTIONS, definitions.numbers())[0]
    with DataLoader[Any](definitions.deadly(marks=str(tmp_path)), **OPTIONS, workers=places.of_deadly(place)) as loader:
        assert_same(list(loader), expected)
        assert loader.stats()["data/worker_restarts"] >= 1


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_that_hangs_is_killed(place: str, places: Places, tmp_path: Path) -> None:
    """It is killed after `worker_timeout`; its replacement carries out its tasks."""
    expected = read("sync", OPTIONS, definitions.numbers())[0]
    recovery, workers = Recovery(worker_timeout=1), places.of_deadly(place)
    hanging = definitions.hanging(marks=str(tmp_path))
    with DataLoader[Any](hanging, **OPTIONS, recovery=recovery, workers=workers) as loader:
        assert_same(list(loader), expected)
        assert loader.stats()["data/worker_restarts"] >= 1


@pytest.mark.parametrize("place", PLACES)
def test_a_sample_that_kills_every_worker(place: str, places: Places) -> None:
    """Its batch is an error after the third death; all others are delivered."""
    expected = read("sync", OPTIONS, definitions.numbers())[0]
    recovery = Recovery(worker_timeout=60)
    with DataLoader[Any](definitions.deadly(), **OPTIONS, recovery=recovery, workers=places.of_deadly(place)) as loader:
        got = outcomes(loader)
    failed = [number for number, each in enumerate(got) if isinstance(each, Exception)]
    assert len(failed) == 1
    assert isinstance(got[failed[0]], TaskQuarantined)
    del got[failed[0]], expected[failed[0]]
    assert_same(got, expected)


@pytest.mark.parametrize("place", PLACES)
def test_a_time_out_says_where_workers_are(place: str, places: Places, tmp_path: Path) -> None:
    """The report has the stacks of this machine's processes, and where the others can be looked at."""
    hanging, workers = definitions.hanging(marks=str(tmp_path)), places.of_deadly(place)
    with (
        DataLoader[Any](hanging, **OPTIONS, timeout=1, workers=workers) as loader,
        pytest.raises(LoaderTimeout) as raised,
    ):
        list(loader)
    report = "\n".join(raised.value.__notes__)
    assert ("in __getitem__" if place == "local" else "no stack: py-spy dump --pid ") in report
    where = "" if place == "local" else " at "
    line = rf"^worker \d \(pid \d+{where}.*\) is [\w ]+(?:, still at its start-up code)?; "
    assert len(re.findall(line, report, re.MULTILINE)) == 3
