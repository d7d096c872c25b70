"""Fixed streams: the same global batches on any workers and ranks, in every format, also after a resume or a death."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from asyncloader import AsyncDataLoader, DataLoader, Mixture, RemoteIterableDataset
from asyncloader.errors import NoEffectWarning, ShardError, StateError
from asyncloader.transports import MemoryTransport, ObjectNotFound, ReadFailed
from tests.helpers.http_store import serving as serving_http
from tests.helpers.running import run_async
from tests.helpers.shards_of_formats import SIZES, write
from tests.service.definitions import fields_of
from tests.unit.remote.shards import MAKERS

pytestmark = [pytest.mark.independent, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

GLOBAL = 6
TOTAL = sum(SIZES)


def id_of(sample: Any) -> Any:
    return sample["id"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tar shards."""
    made = tmp_path_factory.mktemp("tar")
    write(made, "tar")
    return made


def loader_of(
    folder: Path | list[str],
    *,
    kind: Any = DataLoader,
    world_size: int = 1,
    streams: int = 2,
    buffer: int = 5,
    **options: Any,
) -> Any:
    urls = folder if isinstance(folder, list) else f"{folder}/"
    dataset = RemoteIterableDataset(
        urls, shuffle_buffer=buffer, streams=streams, cache_dir=options.pop("cache_dir", None)
    )
    given = {"seed": 3, "decode": fields_of, "world_size": world_size, "rank": 0 if world_size > 1 else None}
    if world_size == 1:
        given["world_size"] = None
    return kind(dataset, **{"batch_size": GLOBAL // world_size} | given | options)


def numbers(batches: Sequence[Any]) -> list[list[int]]:
    return [batch_numbers.tolist() for batch_numbers, _ in batches]


def epochs_of(folder: Path, count: int = 2, **options: Any) -> list[list[list[int]]]:
    with loader_of(folder, **options) as loader:
        return [numbers(list(loader)) for _ in range(count)]


async def epochs_awaited(folder: Path, count: int = 2, **options: Any) -> list[list[list[int]]]:
    async with loader_of(folder, kind=AsyncDataLoader, **options) as loader:
        return [numbers([batch async for batch in loader]) for _ in range(count)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[int]]]:
    """The global batches of two epochs, read without workers."""
    found = epochs_of(folder)
    for epoch in found:
        assert sorted(number for batch in epoch for number in batch) == [*range(TOTAL)]
        assert [len(batch) for batch in epoch] == [GLOBAL] * (TOTAL // GLOBAL) + [TOTAL % GLOBAL]
    assert found[0] != found[1]
    return found


@pytest.mark.parametrize(
    ("workers", "way"),
    [
        (0, "uvloop"),
        (1, "forkserver"),
        (3, "fork"),
        (2, "threads, asyncio"),
        (2, "persistent"),
        (11, "threads"),
    ],
)
def test_any_workers(folder: Path, workers: int, way: str, expected: list[list[list[int]]]) -> None:
    """However many workers there are, and however they are started, the batches are equal."""
    options: dict[str, Any] = {"num_workers": workers}
    if "threads" in way:
        options["workers"] = "threads"
    elif way == "persistent":
        options["persistent_workers"] = True
    elif workers:
        options["multiprocessing_context"] = way
    if "asyncio" in way or way == "uvloop":
        assert run_async(epochs_awaited(folder, **options), "uvloop" if way == "uvloop" else "asyncio") == expected
    else:
        assert epochs_of(folder, **options) == expected


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_any_ranks(folder: Path, ranks: int, expected: list[list[list[int]]]) -> None:
    """The batches of the ranks, joined, are the global batches; the last one, padded, has all samples that are left."""
    at: list[dict[str, Any]] = [{"num_workers": 0}, {"num_workers": 1, "workers": "threads"}]
    found = [epochs_of(folder, world_size=ranks, rank=rank, on_uneven="pad", **at[rank % 2]) for rank in range(ranks)]
    for epoch, whole in enumerate(expected):
        joined = [[n for rank in found for n in rank[epoch][step]] for step in range(len(whole))]
        assert joined[:-1] == whole[:-1]
        assert (len(joined[-1]), {*joined[-1]}) == (GLOBAL, {*whole[-1]})


@pytest.mark.parametrize("step", [0, 1, 4, TOTAL // GLOBAL])
def test_resumed_elsewhere(folder: Path, step: int, expected: list[list[list[int]]]) -> None:
    """A state of any rank fits other numbers of workers and ranks, which go on at the next global batch."""
    states = []
    for rank in range(2):
        with loader_of(
            folder, world_size=2, rank=rank, num_workers=rank, workers="threads" if rank else None
        ) as loader:
            batches = iter(loader)
            for _ in range(step):
                next(batches)
            states.append(json.dumps(loader.state_dict() | {"world_size": None}))
    assert states[0] == states[1] or not step  # before the first batch a rank may not have counted yet
    for state in states:
        with loader_of(folder, num_workers=3, workers="threads") as loader:
            loader.load_state_dict(json.loads(state))
            assert numbers(list(loader)) == expected[0][step:]
            assert numbers(list(loader)) == expected[1]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("iterated", [False, True])
def test_a_last_batch_that_is_too_short_for_the_ranks(mixed: bool, iterated: bool, tmp_path: Path) -> None:
    """Behind it nothing is left, on any number of ranks; then the next epoch comes, as with a map dataset."""
    (tmp_path / "a.jsonl").write_text("\n".join(f'{{"id": {number}}}' for number in range(9)))

    def loader(batch_size: int, **options: Any) -> DataLoader[Any]:
        streams = RemoteIterableDataset(f"{tmp_path}/", streams=1)
        dataset: Any = Mixture([streams], [1]) if mixed else streams
        return DataLoader(dataset, batch_size, seed=1, decode=id_of, **options)

    with loader(8) as alone:
        batches = iter(alone)
        assert [len(next(batches)) for _ in range(2)] == [8, 1]
        state = alone.state_dict()
    with loader(2, rank=0, world_size=4, on_uneven="drop") as ranked:
        whole = [[batch.tolist() for batch in ranked] for _ in range(2)]
        resumed = ranked if iterated else ranked.clone()
        resumed.load_state_dict(state)
        assert [[batch.tolist() for batch in resumed] for _ in range(2)] == [[], whole[1]]


def test_a_worker_that_is_killed(shards: Path) -> None:
    """Its replacement goes on with its streams."""
    whole = epochs_of(shards, 1)[0]
    with loader_of(shards, num_workers=2) as loader:
        batches = iter(loader)
        found = [next(batches) for _ in range(2)]
        os.kill(batches._workers[0].pid, signal.SIGKILL)
        assert numbers([*found, *batches]) == whole


def test_from_a_cache(folder: Path, tmp_path: Path, expected: list[list[list[int]]]) -> None:
    """Counting fills the cache: no epoch requests data from the store."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    async def run() -> None:
        async with serving_http() as store:
            for name, data in files.items():
                store.put(name, data, etag='"v1"')
            urls = [f"{store.url}/{name}" for name in (["index.json"] if "index.json" in files else sorted(files))]
            async with loader_of(urls, kind=AsyncDataLoader, cache_dir=str(tmp_path)) as loader:
                assert numbers([batch async for batch in loader]) == expected[0]
                store.asked.clear()
                assert numbers([batch async for batch in loader]) == expected[1]
                assert {asked.method for asked in store.asked} <= {"HEAD"}

    run_async(run())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_is_cut_off(folder: Path, workers: int, tmp_path: Path) -> None:
    """All other shards are read, and the loss is recorded."""
    for path in folder.iterdir():
        data = path.read_bytes()
        damaged = path.name.startswith(("s1.", "shard.00001"))
        (tmp_path / path.name).write_bytes(data[: len(data) - len(data) // 4] if damaged else data)
    with loader_of(tmp_path, num_workers=workers) as loader, pytest.raises(ShardError, match=r"s1\.|shard\.00001"):
        list(loader)
    with loader_of(tmp_path, num_workers=workers, on_error="skip") as loader:
        found = [number for batch in numbers(list(loader)) for number in batch]
        assert loader.skipped_samples
    others = {*range(SIZES[0]), *range(sum(SIZES[:2]), TOTAL)}
    assert others <= {*found} < {*range(TOTAL)}
    assert len(found) == len({*found})


@pytest.fixture
def copied(shards: Path, tmp_path: Path) -> Path:
    """Shards that a test may change."""
    for path in shards.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_a_shard_that_is_missing_or_empty(copied: Path) -> None:
    """A missing shard counts as one bad sample, an empty one as none."""
    (copied / "s2.tar").unlink()
    (copied / "s1.tar").write_bytes(bytes(10240))
    urls = [f"{copied}/s{number}.tar" for number in range(4)]
    with loader_of(urls) as loader, pytest.raises(ObjectNotFound, match=r"s2\.tar"):
        list(loader)
    with loader_of(urls, on_error="skip", num_workers=1) as loader:
        found = sorted(number for batch in numbers(list(loader)) for number in batch)
    assert found == [*range(SIZES[0]), *range(sum(SIZES[:3]), TOTAL)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_shrinks_after_it_was_counted(copied: Path, workers: int) -> None:
    """Each missing sample is an error that says so; no other sample takes its place."""
    short = (copied / "s1.tar").read_bytes()  # 9 samples in the place of 11
    with loader_of(copied, num_workers=workers, on_error="skip", buffer=0, shuffle=False) as loader:
        whole = numbers(list(loader))
        (copied / "s3.tar").write_bytes(short)
        again = numbers(list(loader))
        assert "fewer samples than were counted" in loader.skipped_samples[-1].error
    assert len(whole) == len(again)
    for before, after in zip(whole, again, strict=True):
        assert [n for n in before if n < TOTAL - SIZES[3]] == [n for n in after if n in before and n < TOTAL - SIZES[3]]
    assert len([n for batch in whole for n in batch]) - len([n for batch in again for n in batch]) == 2


def test_two_iterators_of_one_loader(shards: Path) -> None:
    """An epoch that ends within another one leaves that one's order alone."""
    whole, after = epochs_of(shards, 2)
    with loader_of(shards) as loader:
        outer: list[Any] = []
        for batch in loader:
            outer.append(batch)
            if len(outer) == 2:
                assert numbers(list(loader)) == whole
        assert numbers(outer) == whole
        assert numbers(list(loader)) in (after, whole)


def test_length(folder: Path) -> None:
    """The length counts the samples, if that was not done."""
    with loader_of(folder) as loader:
        assert len(loader) == -(-TOTAL // GLOBAL)
    with loader_of(folder, drop_last=True) as loader:
        assert len(loader) == len(list(loader)) == TOTAL // GLOBAL


def changed(state: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return state | {"sampler": state["sampler"] | {"sampler": state["sampler"]["sampler"] | fields}}


def first_after(loader: Any, state: Any) -> Any:
    loader.load_state_dict(state)
    return next(iter(loader))


def test_states_that_do_not_fit(shards: Path, copied: Path) -> None:
    """The error says what differs."""
    with loader_of(shards) as loader:
        next(iter(loader))
        state = loader.state_dict()

    def refused(match: str, given: Any = state, **options: Any) -> None:
        with loader_of(options.pop("folder", shards), **options) as other, pytest.raises(StateError, match=match):
            first_after(other, given)

    refused("saved with streams=2, but this dataset has streams=3", streams=3)
    refused("saved with shuffle_buffer=5, but this dataset has shuffle_buffer=9", buffer=9)
    refused("saved of other shards", folder=copied)
    refused("batch_size", batch_size=7)
    refused("seed", seed=4)
    refused("streams='a'", changed(state, streams="a"))
    refused("saved of other shards", changed(state, shards=["x"]))
    refused("streams", state | {"sampler": state["sampler"] | {"sampler": [1]}})


def test_arguments(shards: Path) -> None:
    """What cannot be is refused, and what does nothing is warned of."""
    for streams in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="streams should be a number of at least 1"):
            RemoteIterableDataset(f"{shards}/", streams=streams)  # type: ignore[arg-type]
    dataset = RemoteIterableDataset(f"{shards}/", streams=2)
    with pytest.warns(NoEffectWarning, match="streams= does nothing without seed="):
        DataLoader(dataset)
    with pytest.raises(ValueError, match="expected unspecified sampler"):
        DataLoader(dataset, seed=3, sampler=[1])
    with pytest.raises(ValueError, match="refill"):
        DataLoader(dataset, seed=3, on_error="refill")


class Failing(MemoryTransport):
    """Fails to read while it is told to."""

    fails = False

    async def read_ranges(self, path: str, ranges: Any) -> Sequence[bytes]:
        if self.fails:
            raise ReadFailed("the store is away", path=path)
        return await super().read_ranges(path, ranges)

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        if self.fails:
            raise ReadFailed("the store is away", path=path)
        async for chunk in super().stream(path, start=start, chunk_size=chunk_size):
            yield chunk


def test_a_store_that_is_away(shards: Path) -> None:
    """A batch that could not be read is an error, and is read again at the next call, or from the state."""
    store = Failing({path.name: path.read_bytes() for path in shards.iterdir()})
    urls = sorted(path.name for path in shards.iterdir())

    def make() -> Any:
        dataset = RemoteIterableDataset(urls, transport=store, shuffle_buffer=5, streams=2)
        return DataLoader(dataset, batch_size=GLOBAL, seed=3, decode=fields_of)

    with make() as loader:
        whole = numbers(list(loader))
    with make() as loader:
        batches = iter(loader)
        found = numbers([next(batches)])
        store.fails = True
        with pytest.raises(ReadFailed, match="the store is away"):
            found.extend(batch for each in batches for batch in numbers([each]))
        state = loader.state_dict()
        store.fails = False
        after = numbers(list(batches))
    assert found + after == whole
    with make() as loader:
        loader.load_state_dict(state)
        assert found + numbers(list(loader)) == whole


@pytest.mark.parametrize("mixed", [False, True])
def test_rows_of_tables(mixed: bool, tmp_path: Path) -> None:
    """Rows that nothing decodes are collated by column, and a function of the user's gets them as a list of samples."""
    for number in range(2):
        (tmp_path / f"{number}.parquet").write_bytes(MAKERS["a.parquet"](range(9 * number, 9 * number + 9)))
    if mixed:
        (tmp_path / "2.jsonl").write_bytes(b"".join(b'{"n": %d, "text": "t%d"}\n' % (n, n) for n in range(18, 24)))

    def batches(**options: Any) -> list[Any]:
        with loader_of(tmp_path, decode=None, num_workers=0, **options) as loader:
            return list(loader)

    for columns, samples in zip(batches(), batches(collate_fn=samples_as_they_are), strict=True):
        assert type(samples) is list
        assert {type(sample) for sample in samples} == {dict}
        wanted = default_collate(samples)
        assert list(columns) == list(wanted)
        for name, column in columns.items():
            assert torch.equal(column, wanted[name]) if name == "n" else column == wanted[name]


def samples_as_they_are(samples: Any) -> Any:
    return samples
