"""Numbers of samples of fixed streams: shared out over the ranks, kept in a cache, taken from an index."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, RemoteIterableDataset, write_shards_sync
from asyncloader.formats import ShardError
from asyncloader.loaders.writing import write_shards
from asyncloader.remote.sample_counts import FOLDER
from asyncloader.remote.shard_index import ShardNames, parse_index
from asyncloader.transports import LocalTransport
from tests.helpers.fixed_ranks import Recording
from tests.helpers.rank_group import RankGroup
from tests.helpers.remote_folders import dataset_of, flat, make_shards, number_of
from tests.helpers.running import run_async

pytestmark = [pytest.mark.independent, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

FIVE = (100,) * 5
GLOBAL = 6


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five tar shards of a hundred samples, and a file that is none."""
    folder = tmp_path_factory.mktemp("five")
    make_shards(folder, FIVE)
    (folder / "readme.txt").write_text("no shard")
    return folder


@pytest.fixture(scope="module")
def whole(five: Path) -> list[list[int]]:
    """The global batches of a single process."""
    with loader_of(five) as loader:
        return numbers(loader)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with RankGroup(2, tmp_path_factory.mktemp("two")) as group:
        yield group


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that the ranks keep no thread, no worker and no connection of a loader."""
    yield
    group = request.node.funcargs.get("two")
    if group is not None and group.alive:
        assert group("left") == group.held


def loader_of(where: Path, store: Any = None, **dataset: Any) -> DataLoader[Any]:
    url = f"{where}/" if store is None else "/"
    if store is not None:
        dataset["transport"] = store
    return DataLoader(dataset_of(url, **{"streams": 4} | dataset), batch_size=GLOBAL, seed=3, decode=number_of)


def numbers(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def joined(ranks: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The global batches of the ranks' batches."""
    assert not [rank["error"] for rank in ranks if "error" in rank]
    return [flat(parts) for parts in zip(*(rank["batches"] for rank in ranks), strict=True)]


# ------------------------------------------------------------------------------------------------- the ranks


@pytest.mark.parametrize(("kind", "workers"), [("sync", 0), ("sync", 2), ("asyncio", 0), ("uvloop", 1)])
def test_two_ranks_read_all_samples(
    two: RankGroup, five: Path, whole: list[list[int]], kind: str, workers: int
) -> None:
    """Five shards of 100 are 500 samples, in the batches of a single process; one rank lists and counts."""
    ranks = two("fixed", str(five), kind=kind, num_workers=workers, on_uneven="pad")
    found = joined(ranks)
    assert found[:-1] == whole[:-1]
    assert {*found[-1]} == {*whole[-1]}
    assert sorted({*flat(found)}) == [*range(500)]
    assert [rank["listed"] for rank in ranks] == [1, 0]
    assert ranks[0]["state"] == ranks[1]["state"]
    if workers:  # which read the samples in processes of their own
        opened = [rank["opened"] for rank in ranks]
        assert [sorted(each) for each in opened] == [[f"s-{number:03d}.tar" for number in range(5)], []]


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.thorough)])
def test_ranks_that_are_killed_go_on_elsewhere(world: int, five: Path, whole: list[list[int]], tmp_path: Path) -> None:
    """Two ranks die by SIGKILL within an epoch; another number of ranks goes on at that sample."""
    size = 12  # of a global batch, which both numbers of ranks divide
    with loader_of(five, shuffle_buffer=20) as loader:
        other = loader.clone(batch_size=size)
        expected = numbers(other)
        other.close()
    options: dict[str, Any] = {"buffer": 20, "on_uneven": "pad"}
    with RankGroup(2, tmp_path) as group:
        ranks = group("fixed", str(five), steps=9, num_workers=1, batch_size=size // 2, **options)
        state = json.loads(json.dumps(ranks[1]["state"]))
        assert joined(ranks) == expected[:9]
        group.kill()  # SIGKILL
    if world == 1:
        with loader_of(five, Recording(str(five)), shuffle_buffer=20) as loader:
            other = loader.clone(batch_size=size)
            other.load_state_dict(state)
            found = numbers(other)
            other.close()
    else:
        with RankGroup(world, tmp_path) as group:
            found = joined(group("fixed", str(five), state=state, num_workers=1, batch_size=size // world, **options))
    assert found[:-1] == expected[9:-1]
    assert {*found[-1]} == {*expected[-1]}
    assert whole != expected


MIXED: dict[str, Any] = {"rows": 20, "weights": [1, 1]}


@pytest.mark.parametrize(
    ("other", "here", "there"),
    [
        ({"buffer": 9}, "shuffle_buffer=5", "shuffle_buffer=9"),
        ({"seed": 4}, "seed=3", "seed=4"),
        ({"batch_size": 2}, "global batch=6", "global batch=4"),
        ({"on_uneven": "repeat"}, "on_uneven='drop'", "on_uneven='repeat'"),
        ({"drop_last": True}, "drop_last=False", "drop_last=True"),
        ({"streams": None}, "", "another rank"),
        *(
            ({"mixed": MIXED | changed}, here, there)
            for changed, here, there in (
                ({"weights": [1, 2]}, "weights=[[0, [1, 1]]]", "weights=[[0, [1, 2]]]"),
                ({"num_samples": 40}, "num_samples=None", "num_samples=40"),
                ({"on_exhausted": "stop"}, "on_exhausted='repeat'", "on_exhausted='stop'"),
                ({"shuffle": False}, "shuffle=True", "shuffle=False"),
                ({"rows": 21}, "samples of the sources=[20]", "samples of the sources=[21]"),
            )
        ),
    ],
    ids=str,
)
def test_ranks_that_would_read_other_samples(
    two: RankGroup, five: Path, other: dict[str, Any], here: str, there: str
) -> None:
    """They would read samples twice, or make other numbers of steps. The error of each rank says what differs; the next
    loader is not affected.
    """
    mixed = {"mixed": MIXED} if "mixed" in other else {}
    ranks = two("fixed", str(five), buffer=5, other=other, **mixed)
    for rank, found in enumerate(ranks):
        assert "RanksDisagree" in found["error"], (rank, found)
        assert there in found["error"]
        assert here in found["error"]
    assert len(flat(joined(two("fixed", str(five))))) == 500 - 500 % 2


def test_ranks_with_other_shards(two: RankGroup, five: Path, tmp_path: Path) -> None:
    """The error of each rank has the URLs that differ."""
    make_shards(tmp_path, (100,) * 4)
    for found in two("fixed", str(five), other={"folder": str(tmp_path)}, cache_dir=str(tmp_path)):
        assert "RanksDisagree" in found["error"]
        assert str(five) in found["error"]
        assert str(tmp_path) in found["error"]


def test_ranks_that_resume_elsewhere(two: RankGroup, five: Path, tmp_path: Path) -> None:
    """Each rank may resume at a step of its own, as the ranks of a `PackedLoader` do, but not behind another order."""
    options: dict[str, Any] = {"batch_size": GLOBAL, "seed": 3, "decode": number_of}
    states: list[dict[str, Any]] = []
    for streams, steps in ((4, 1), (4, 2), (2, 1), (2, 2)):
        with DataLoader(dataset_of(f"{five}/", streams=streams), **options) as loader:
            batches = iter(loader)
            for _ in range(steps):
                next(batches)
            states.append(loader.state_dict())
    where: dict[str, Any] = {"folder": str(five), "cache_dir": str(tmp_path)}
    first, second = two("fixed", **where, state=states[0], other={"state": states[1]})
    assert len(first["batches"]) == len(second["batches"]) + 1
    for found in two("fixed", **where, state=states[2], other={"state": states[3]}, elastic="set"):
        assert "RanksDisagree" in found["error"], found
        assert "before=[[6, 2," in found["error"]


def test_a_batch_of_one_rank(two: RankGroup, five: Path, whole: list[list[int]]) -> None:
    """A rank can make a single batch without the others."""
    assert two("fixed_batch", str(five), 1, 7) == [None, whole[7][3:]]


def test_a_rank_that_cannot_plan(two: RankGroup, five: Path, tmp_path: Path) -> None:
    """It has its own error, and the other rank says which rank it is and why."""
    first, second = two("fixed", str(tmp_path), other={"folder": str(five)})
    assert first["error"].startswith("ValueError: there is no shard below")
    assert second["error"].startswith("RanksDisagree: rank 0 could not plan the epoch: ValueError: there is no shard")


def test_a_rank_that_is_cancelled_while_it_plans(two: RankGroup, five: Path) -> None:
    """The other rank does not wait for it."""
    first, second = two("fixed_cancelled", str(five), 0)
    assert first == "cancelled"
    # "agree on a plan"; or "be connected", if it was still making the loader's group.
    assert "RanksDisagree: the ranks could not" in second


# -------------------------------------------------------------------------------------------- the cache directory


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Three shards, as old as a file must be to have a version."""
    folder = tmp_path / "old"
    folder.mkdir()
    make_shards(folder, (7, 11, 5))
    age(folder)
    return folder


def age(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (1_700_000_000, 1_700_000_000 + path.stat().st_size))


def counted(monkeypatch: pytest.MonkeyPatch, where: Path, **dataset: Any) -> list[str]:
    """The shards that a loader reads to count their samples."""
    found: list[str] = []
    pinned = LocalTransport.pinned

    def note(self: Any, path: str) -> Any:
        found.append(Path(path).name)
        return pinned(self, path)

    with loader_of(where, **dataset) as loader, monkeypatch.context() as patched:
        patched.setattr(LocalTransport, "pinned", note)
        len(loader)
    return sorted(found)


def test_numbers_are_kept(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read again where the file is damaged, and for a shard that was replaced."""
    cache = {"cache_dir": tmp_path / "cache"}
    names = [f"s-{number:03d}.tar" for number in range(3)]
    assert counted(monkeypatch, old, **cache) == names
    assert counted(monkeypatch, old, **cache) == []
    files = [path for path in (tmp_path / "cache" / FOLDER).rglob("objects/*/*") if path.is_file()]
    assert len(files) == 3
    data = files[0].read_bytes()
    with loader_of(old, **cache) as loader:
        expected = numbers(loader)
    with loader_of(old) as loader:
        assert numbers(loader) == expected
    for damaged in (b"", data[:-1], bytes([data[0] ^ 0xFF]) + data[1:], b"\xff" * 4096):
        files[0].write_bytes(damaged)
        assert len(counted(monkeypatch, old, **cache)) == 1
        assert counted(monkeypatch, old, **cache) == []
    (old / names[1]).write_bytes((old / names[2]).read_bytes())
    age(old)
    assert counted(monkeypatch, old, **cache) == names[1:2]


def test_a_cache_that_cannot_be_written(old: Path, tmp_path: Path) -> None:
    """The epoch is read without it."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / FOLDER).write_text("a file")
    with loader_of(old, cache_dir=tmp_path / "cache") as loader:
        assert len(flat(numbers(loader))) == 23


# -------------------------------------------------------------------------------------------------- the index


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Shards of `write_shards`, with their index."""
    folder = tmp_path / "written"
    samples = ({"__key__": f"{number:04d}", "txt": str(number).encode()} for number in range(60))
    run_async(write_shards(samples, f"{folder}/part-2-{{shard:03d}}.tar", max_samples=25))
    return folder


def test_an_index_beside_the_shards(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read to count, but shards that are not those of the index."""
    assert counted(monkeypatch, written) == []
    with loader_of(written) as loader:
        assert len(loader) == 60 // GLOBAL
        expected = numbers_of_text(loader)
    assert sorted(flat(expected)) == [*range(60)]
    shard = written / "part-2-001.tar"
    shard.write_bytes(shard.read_bytes() + bytes(512))
    assert counted(monkeypatch, written) == [shard.name]
    with loader_of(written) as loader:
        assert numbers_of_text(loader) == expected


@pytest.mark.parametrize("streams", [None, 2])
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "tfrecord"])
def test_a_local_shard_that_was_cut_between_samples(tmp_path: Path, suffix: str, streams: int | None) -> None:
    """The index of `write_shards` says how many bytes it has: samples that are missing are an error."""
    samples = [{"record": b"%d" % n} if suffix == "tfrecord" else {"n": n} for n in range(20)]
    shards = write_shards_sync(samples, f"{tmp_path}/part-{{shard}}.{suffix}", max_samples=10)
    half = write_shards_sync(samples[:5], f"{tmp_path}/half/{{shard}}.{suffix}")
    Path(half[0].url).replace(shards[0].url)
    for urls in (f"{tmp_path}/", shards[0].url, f"{tmp_path}/part-{{0..1}}.{suffix}"):
        data = RemoteIterableDataset(urls, streams=streams)
        with (
            DataLoader[Any](data, batch_size=None, seed=1) as loader,
            pytest.raises(ShardError, match="says that it has"),
        ):
            list(loader)
    (tmp_path / f"_part-index.{suffix}.json").unlink()
    with DataLoader[Any](RemoteIterableDataset(f"{tmp_path}/", streams=streams), batch_size=None, seed=1) as loader:
        assert len(list(loader)) == 15


def numbers_of_text(loader: DataLoader[Any]) -> list[list[int]]:
    with loader.clone(decode=lambda sample: int(sample["txt"])) as other:
        return numbers(other)


def test_an_index_that_lies(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be is not believed, and what is not true is noticed when the shard is read."""
    path = written / "_part-2-index.tar.json"
    index = json.loads(path.read_text())
    names = ShardNames.of("part-2-{shard:03d}.tar", None)
    all_names = [names.name(number) for number in range(3)]

    def changed(**record: Any) -> bytes:
        first = index["shards"]["0"] | record
        return json.dumps({**index, "shards": {**index["shards"], "0": first}}).encode()

    for lie in (b"", b"{}", b"[" * 100_000, b"\xff" * 100, changed(samples=-1), changed(name="../x"), changed(x=1)):
        path.write_bytes(lie)
        assert counted(monkeypatch, written) == all_names
    path.write_bytes(changed(samples=1 << 62))
    assert parse_index(path.read_bytes(), names).shards[0].samples == 1 << 62
    assert counted(monkeypatch, written) == all_names[:1]
    path.write_bytes(changed(samples=27))
    assert counted(monkeypatch, written) == []
    with loader_of(written).clone(on_error="skip") as loader:
        found = flat(numbers_of_text(loader))
        assert sorted(found) == [*range(60)]
    path.unlink()
    assert counted(monkeypatch, written) == all_names
