"""Faults while shards are read: dead and growing workers, bad samples and shards, and invalid requests."""

from __future__ import annotations

import operator
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncloader import DataLoader, LoaderTimeout, Recovery, ShardError, Tuning, WorkerDied
from asyncloader.transports import ObjectNotFound
from asyncloader.workers.ipc import wire
from tests.helpers.faulty import Faults, grown
from tests.helpers.lying import say_no_more
from tests.helpers.remote_folders import (
    Killing,
    dataset_of,
    epochs_of,
    flat,
    make_shards,
    number_of,
    plain,
    with_method,
)
from tests.helpers.running import BOTH, PATIENCE_S
from tests.helpers.seeded_runs import Stepwise

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:DataLoader worker . died and was replaced:RuntimeWarning"),
]

SIZES = (17, 21, 15)
COUNT = sum(SIZES)


# ------------------------------------------------------------------------------------------- workers


@pytest.mark.thorough
@pytest.mark.parametrize("ending", ["tar", "jsonl"])
@pytest.mark.parametrize("kind", BOTH)
def test_deaths_change_nothing(kind: str, ending: str, tmp_path: Path) -> None:
    """Three workers are killed in an epoch; in seeded mode the batches are those of an undisturbed epoch."""
    url = make_shards(tmp_path, SIZES, ending=ending)
    (tmp_path / "struck").mkdir()
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 3, "seed": 5}
    expected = epochs_of(kind, dataset_of(url, shuffle_buffer=6), **options)
    decode = Killing(Faults(tmp_path / "struck", {3: "SIGKILL", 30: "exit", 52: "SIGKILL"}))
    assert epochs_of(kind, dataset_of(url, shuffle_buffer=6, decode=decode), **options) == expected
    assert len(list((tmp_path / "struck").iterdir())) == 3


@pytest.mark.thorough
def test_deaths_in_torch_mode_and_out_of_order(tmp_path: Path) -> None:
    """Every sample is still delivered once."""
    url = make_shards(tmp_path, SIZES)
    for number, options in enumerate(({"max_worker_restarts": 3}, {"in_order": False, "seed": 1})):
        struck = tmp_path / f"struck{number}"
        struck.mkdir()
        dataset = dataset_of(url, decode=Killing(Faults(struck, {3: "SIGKILL", 30: "SIGKILL"})))
        (batches,) = epochs_of("sync", dataset, batch_size=4, num_workers=2, **options)
        assert sorted(flat(batches)) == list(range(COUNT))
        assert len(list(struck.iterdir())) == 2


def test_workers_that_grow_are_replaced(tmp_path: Path) -> None:
    """`worker_memory_limit`: a worker exits after a batch, and its successor continues in the middle of a shard."""
    url = make_shards(tmp_path, SIZES)
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "seed": 5}
    expected = epochs_of("sync", dataset_of(url, shuffle_buffer=6), **options)
    with Stepwise("sync", dataset_of(url, shuffle_buffer=6, decode=Hoard()), **with_method(options),
                  recovery=Recovery(worker_memory_limit=24 << 20)) as run:  # fmt: skip
        assert [batch.tolist() for batch in run.epoch()] == expected[0]
        assert run.loader.stats()["data/worker_retirements"] > 1


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
def test_workers_that_hang_are_replaced(kind: str, tmp_path: Path) -> None:
    """After `worker_timeout`: one worker alone, both at their first samples, or one that needs no more assignments."""
    url = make_shards(tmp_path, SIZES)
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "seed": 5}
    expected = epochs_of(kind, dataset_of(url, shuffle_buffer=6), **options)
    first = {batch[0] for batch in expected[0][:2]}
    for number, places in enumerate(({expected[0][5][1]}, first, {expected[0][-1][-1]})):
        struck = tmp_path / f"struck{number}"
        struck.mkdir()
        dataset = dataset_of(url, shuffle_buffer=6, decode=Killing(Faults(struck, dict.fromkeys(places, "hang"))))
        assert epochs_of(kind, dataset, recovery=Recovery(worker_timeout=1.0), **options) == expected
        assert len(list(struck.iterdir())) == len(places)


@pytest.mark.thorough
def test_a_consumer_that_takes_its_time_kills_nobody(tmp_path: Path) -> None:
    """A worker that waits for an assignment, and so for another worker's batch and the consumer, does not time out."""
    # The first worker reads the short shards, and learns the end when the other worker has made its third batch: for
    # that the other worker's first batch has to be taken.
    url = make_shards(tmp_path, (4, 40, 4))
    with Stepwise("sync", dataset_of(url), batch_size=4, num_workers=2, max_worker_restarts=1,
                  recovery=Recovery(worker_timeout=2.0),
                  multiprocessing_context="fork") as run:  # fmt: skip
        run.begin()
        batches = run.take(1)
        time.sleep(3)  # the consumer's time, longer than `worker_timeout`: nothing is waited for
        batches += run.rest()
        assert sorted(number for batch in batches for number in plain(batch)) == list(range(48))
        assert run.loader.stats()["data/worker_restarts"] == 0


class Hoard:
    """`number_of`, which leaks 2 MiB per sample."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, sample: dict[str, Any]) -> int:
        self.kept.append(grown(2 << 20))
        return number_of(sample)


# ------------------------------------------------------------------------------------------- shards


def broken_shards(folder: Path) -> str:
    """JSON lines with two bad lines, a tar that is cut off, and a whole tar."""
    lines = [b'{"n": %d}\n' % n for n in range(10)]
    lines[3], lines[7] = b"{nope\n", b"\xff\xfe\n"
    (folder / "a.jsonl").write_bytes(b"".join(lines))
    (folder / "parts").mkdir()
    make_shards(folder / "parts", (10, 10, 10))
    tars = sorted((folder / "parts").iterdir())
    whole = tars[1].read_bytes()
    (folder / "b.tar").write_bytes(whole[: len(whole) // 2])
    (folder / "c.tar").write_bytes(tars[2].read_bytes())
    for left in tars:
        left.unlink()
    (folder / "parts").rmdir()
    return f"{folder}/"


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_left_out(kind: str, workers: int, tmp_path: Path) -> None:
    """``on_error="skip"``: full batches of the other samples; `loader.skipped_samples` has the bad ones' offsets."""
    url = broken_shards(tmp_path)
    with Stepwise(kind, dataset_of(url), **with_method({"batch_size": 4, "num_workers": workers, "seed": 1,
                                                        "on_error": "skip"})) as run:  # fmt: skip
        batches = [batch.tolist() for batch in run.epoch()]
        texts = sorted(bad.error for bad in run.loader.skipped_samples)
    got = sorted(flat(batches))
    assert [n for n in got if n < 10] == [n for n in range(10) if n not in (3, 7)]
    assert [n for n in got if n >= 20] == list(range(20, 30))
    cut = [n for n in got if 10 <= n < 20]
    assert cut == list(range(10, 10 + len(cut)))
    assert 0 < len(cut) < 10
    assert all(len(batch) == 4 for batch in batches[:-1])
    assert len(texts) == 3
    assert sum("a.jsonl" in text for text in texts) == 2
    assert sum("b.tar at byte" in text for text in texts) == 1


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_raised(kind: str, workers: int, tmp_path: Path) -> None:
    """``on_error="raise"``: an error with URL and offset is raised instead of the batch; other samples follow."""
    got: list[int] = []
    errors: list[ShardError] = []
    options = with_method({"batch_size": 4, "num_workers": workers, "seed": 1})
    with Stepwise(kind, dataset_of(broken_shards(tmp_path)), **options) as run:
        run.begin()
        while True:
            try:
                got += run.step().tolist()
            except StopIteration:
                break
            except ShardError as error:
                errors.append(error.with_traceback(None))
    assert len(got) == len(set(got))
    assert {n for n in got if not 10 <= n < 20} == {n for n in range(30) if n not in (3, 7) and not 10 <= n < 20}
    assert sorted(Path(error.url or "").name for error in errors) == ["a.jsonl", "a.jsonl", "b.tar"]
    assert all(error.offset is not None for error in errors)


@pytest.mark.parametrize("workers", [0, 2])
def test_missing_shards(workers: int, tmp_path: Path) -> None:
    """A missing shard is an error with its name, or is skipped; all others are read."""
    make_shards(tmp_path, (5, 5))
    urls = [tmp_path / "s-000.tar", tmp_path / "gone.tar", tmp_path / "s-001.tar"]
    options = {"batch_size": 2, "num_workers": workers, "seed": 1}
    (batches,) = epochs_of("sync", dataset_of(urls), **options, on_error="skip")
    assert sorted(flat(batches)) == list(range(10))
    with Stepwise("sync", dataset_of(urls), **with_method(options)) as run, pytest.raises(ObjectNotFound, match="gone"):
        run.epoch()


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ending", ["jsonl", "parquet", "mds"])
def test_shards_whose_sizes_are_unknown(ending: str, workers: int, tmp_path: Path) -> None:
    """Where shards are to be cut, a missing or damaged shard does not fail the plan, but its reader."""
    url = make_shards(tmp_path, (5, 5, 5), ending=ending)
    second = sorted(path for path in tmp_path.iterdir() if path.suffix != ".json")[1]
    urls = url if ending == "mds" else sorted(tmp_path.iterdir())
    options = {"batch_size": 2, "num_workers": workers, "seed": 1}
    for fault, error in ((lambda: second.write_bytes(b"\xff" * 200), ShardError), (second.unlink, ObjectNotFound)):
        fault()
        (batches,) = epochs_of("sync", dataset_of(urls), **options, on_error="skip")
        assert sorted(flat(batches)) == [*range(5), *range(10, 15)]
        with Stepwise("sync", dataset_of(urls), **with_method(options)) as run, pytest.raises(error):
            run.epoch()


@pytest.mark.parametrize("workers", [0, 2])
def test_decode_errors(workers: int, tmp_path: Path) -> None:
    """An error of `decode` is its sample's: skipped, it leaves the batches full; raised, it reaches the user."""
    url = make_shards(tmp_path, (9, 8))
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "seed": 1, "tuning": Tuning(decode_threads=2)}
    (batches,) = epochs_of("sync", dataset_of(url, decode=_no_five), **options, on_error="skip")
    assert sorted(flat(batches)) == [n for n in range(17) if n != 5]
    assert [len(batch) for batch in batches] == [4] * 4
    with (
        Stepwise("sync", dataset_of(url, decode=_no_five), **with_method(options)) as run,
        pytest.raises(ArithmeticError, match="five"),
    ):
        run.epoch()


@pytest.mark.parametrize("on_error", ["skip", "function"])
@pytest.mark.parametrize("bad", ["line", "decode"])
def test_bad_samples_at_the_end_of_an_epoch(bad: str, on_error: str, tmp_path: Path) -> None:
    """Bad samples of a batch that a worker cannot fill are passed on with the rest, and reported once."""
    count = 4 * 13
    wrong = set(range(3, count, 7))
    for shard in range(4):
        lines = [
            b"bad line %d\n" % n if bad == "line" and n in wrong else b'{"n": %d}\n' % n
            for n in range(13 * shard, 13 * shard + 13)
        ]
        (tmp_path / f"{shard}.jsonl").write_bytes(b"".join(lines))
    dataset = dataset_of(f"{tmp_path}/", decode=_no_threes_of_seven if bad == "decode" else number_of)
    policy = "skip" if on_error == "skip" else _minus_one
    options = with_method({"batch_size": 16, "num_workers": 4, "seed": 1, "on_error": policy})
    with Stepwise("sync", dataset, **options) as run:
        batches = [batch.tolist() for batch in run.epoch()]
        assert len(run.loader.skipped_samples) == len(wrong)
    assert [len(batch) for batch in batches] == [16, 16, 13] if on_error == "skip" else [16, 16, 16, 4]
    substitutes = [] if on_error == "skip" else [-1] * len(wrong)
    assert sorted(flat(batches)) == substitutes + sorted(set(range(count)) - wrong)


def _minus_one(index: Any, error: Exception) -> int:
    return -1


def _no_threes_of_seven(sample: dict[str, Any]) -> int:
    number = number_of(sample)
    if number % 7 == 3:
        raise ArithmeticError(number)
    return number


@pytest.mark.parametrize("steps", [2, 8, 22])
def test_bad_rows_of_parquet_are_reported_by_number(steps: int, tmp_path: Path) -> None:
    """Bad rows are reported before the rows after them; a resumed run reports the same rows, each once."""
    values = [b"%d" % n for n in range(60)]
    values[10] = values[40] = b"\xff"
    table = pa.table({"n": list(range(60)), "text": pa.array(values, pa.binary()).view(pa.string())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=60)
    dataset = dataset_of(tmp_path / "a.parquet", decode=operator.itemgetter("n"))

    def outcomes(run: Stepwise, most: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < most:
            try:
                found.append(run.step().tolist())
            except StopIteration:
                break
            except ShardError as error:
                found.append(str(error)[:6])
        return found

    def pairs(first: int, after: int) -> list[Any]:
        return [[number, number + 1] for number in range(first, after, 2)]

    whole = [*pairs(0, 10), "row 10", *pairs(11, 39), "row 40", [39, 41], *pairs(42, 60)]
    with Stepwise("sync", dataset, batch_size=2) as run:
        run.begin()
        assert outcomes(run, 100) == whole
    with Stepwise("sync", dataset, batch_size=2) as run:
        run.begin()
        head = outcomes(run, steps)
        state = run.loader.state_dict()
    with Stepwise("sync", dataset, batch_size=2) as run:
        run.loader.load_state_dict(state)
        run.begin()
        assert head + outcomes(run, 100) == whole


def _no_five(sample: dict[str, Any]) -> int:
    number = number_of(sample)
    if number == 5:
        raise ArithmeticError("five")
    return number


# ------------------------------------------------------------------------------------------- invalid requests

ASKS: dict[str, tuple[int, int, Any]] = {
    "an assignment far ahead": (77, 0, None),
    "an impossible batch": (1, 1 << 40, None),
    "no list of ranges": (1, 0, 5),
}


class Asking:
    """`number_of`; the worker that decodes number 9 sends an invalid request, and nothing afterwards."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, sample: dict[str, Any]) -> int:
        number = number_of(sample)
        if number == 9:
            channel, epoch = _channel()
            assignment, batch, left = ASKS[self.how]
            channel.sock.sendall(wire.pack_ask(epoch, assignment, batch, pickle.dumps(left)))
            say_no_more(channel)
        return number


def _channel() -> tuple[Any, int]:
    for frame in sys._current_frames().values():
        found: Any = frame
        while found is not None:
            runner = found.f_locals.get("runner") or found.f_locals.get("self")
            if hasattr(runner, "channel") and hasattr(runner, "_epoch"):
                return runner.channel, runner._epoch
            found = found.f_back
    raise AssertionError("this is no worker")


@pytest.mark.parametrize("how", ASKS)
def test_a_worker_that_asks_for_what_cannot_be(how: str, tmp_path: Path) -> None:
    """The consumer gets a clear error, and no worker is left."""
    url = make_shards(tmp_path, SIZES)
    options = with_method({"batch_size": 4, "num_workers": 2, "seed": 1, "timeout": PATIENCE_S})
    with DataLoader[Any](dataset_of(url), decode=Asking(how), **options) as loader:
        with pytest.raises(ValueError, match=r"worker \d|a worker gives back") as caught:
            list(loader)
        assert not isinstance(caught.value, LoaderTimeout | WorkerDied)
