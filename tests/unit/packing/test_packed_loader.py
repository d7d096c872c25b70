"""`PackedLoader`: the same rows from every kind of loader, and the rest of them from a state at any row."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from asyncloader import (
    AsyncDataLoader,
    DataLoader,
    Dataset,
    IterableDataset,
    JoinSequences,
    PackedLoader,
    PackSequences,
    RemoteIterableDataset,
    StateError,
    StatefulDataLoader,
)
from tests.helpers.running import LOOPS
from tests.unit.samplers.length_samplers import joined

LENGTHS = np.random.default_rng(0).integers(0, 50, 300).tolist()
MOST = 128

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def sequence(index: int) -> dict[str, Any]:
    return {"tokens": np.arange(100 * index, 100 * index + LENGTHS[index]), "id": index}


class Map(Dataset[Any]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Any:
        return sequence(index)


class Stream(IterableDataset[Any]):
    """Stateful, and read by one worker."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(LENGTHS):
            self.at += 1
            yield sequence(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def from_number(sample: Any) -> Any:
    return sequence(int(sample["id"]))


def shards(folder: Path) -> list[str]:
    for number in range(3):
        lines = [json.dumps({"id": index}) for index in range(100 * number, 100 * number + 100)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return sorted(str(path) for path in folder.iterdir())


def make(case: str, folder: Path, kind: str = "sync", **options: Any) -> Any:
    """A loader of the 300 sequences, in windows of 40."""
    collate = JoinSequences(MOST)
    options = {"batch_size": 40, "collate_fn": collate, **options}
    made: Any = DataLoader if kind == "sync" else AsyncDataLoader
    if case == "seeded":
        return made(Map(), seed=1, shuffle=True, **options)
    if case == "torch":
        return made(Map(), shuffle=True, **options)
    if case == "stateful":
        return (StatefulDataLoader if kind == "sync" else made)(Map(), **options)
    if case == "stream":
        return made(Stream(), **options)
    dataset = RemoteIterableDataset(shards(folder), shuffle_buffer=20, streams=2 if case == "fixed" else None)
    return made(dataset, seed=1, decode=from_number, **options)


class Run:
    """Rows of a loader, step by step, with ``for`` or with ``async for``."""

    def __init__(self, loader: Any, kind: str) -> None:
        self.packed = PackedLoader(loader)
        self._runner = None if kind == "sync" else asyncio.Runner(loop_factory=LOOPS[kind])
        self._rows: Any = None

    def rows(self, number: int | None = None) -> list[list[int]]:
        """The next rows of a new epoch, or of the one that has begun: so many, or all."""
        if self._runner is not None:
            return self._runner.run(self._awaited(number))
        self._rows = iter(self.packed) if self._rows is None else self._rows
        return [row["tokens"].tolist() for row in (self._rows if number is None else _first(self._rows, number))]

    async def _awaited(self, number: int | None) -> list[list[int]]:
        self._rows = aiter(self.packed) if self._rows is None else self._rows
        rows: list[list[int]] = []
        while number is None or len(rows) < number:
            row = await anext(self._rows, None)
            if row is None:
                break
            rows.append(row["tokens"].tolist())
        return rows

    def epoch(self) -> list[list[int]]:
        """The rows of a new epoch."""
        self._rows = None
        return self.rows()

    def close(self) -> None:
        self._rows = None
        if self._runner is None:
            self.packed.loader.close()
            return
        self._runner.run(self.packed.loader.aclose())
        self._runner.close()


def _first(rows: Iterator[Any], number: int) -> Iterator[Any]:
    for _ in range(number):
        yield next(rows)


WORKERS: dict[str, dict[str, Any]] = {
    "none": {"num_workers": 0},
    "processes": {"num_workers": 2, "multiprocessing_context": "fork"},
    "threads": {"num_workers": 2, "workers": "threads"},
}


@pytest.mark.parametrize("case", ["seeded", "torch", "stateful", "stream", "fixed", "shards"])
@pytest.mark.parametrize("kind", ["sync", "asyncio", "uvloop"])
@pytest.mark.parametrize("workers", WORKERS)
def test_a_run_in_parts_gives_the_rows_of_a_whole(case: str, kind: str, workers: str, tmp_path: Path) -> None:
    """Two epochs, of which the first is interrupted and resumed twice, with the state through JSON."""
    options = dict(WORKERS[workers])
    if case == "stream" and options["num_workers"]:
        options["num_workers"] = 1  # each worker would read a copy
    generator = {"generator": __import__("torch").Generator()} if case == "torch" else {}

    def begin() -> Run:
        if generator:
            generator["generator"].manual_seed(3)
        return Run(make(case, tmp_path, kind, **options, **generator), kind)

    run = begin()
    try:
        whole = [run.epoch(), run.epoch()]
    finally:
        run.close()
    wanted = joined([sequence(index)["tokens"].tolist() for index in range(len(LENGTHS))])
    assert sorted(joined(whole[0])) == wanted
    assert sorted(joined(whole[1])) == wanted
    assert all(len(row) <= MOST for row in whole[0])
    state: dict[str, Any] = {}
    rows: list[list[int]] = []
    for number in (len(whole[0]) // 3, len(whole[0]) // 3 + 1, None):
        if case in ("seeded", "fixed"):
            options = WORKERS["threads" if number else "none"]  # the rows do not depend on the workers
        run = begin()
        try:
            if state:
                run.packed.load_state_dict(state)
                assert run.packed.state_dict() == state
            rows += run.rows(number)
            if number is None:
                assert run.epoch() == whole[1]
            state = json.loads(json.dumps(run.packed.state_dict()))
        finally:
            run.close()
    assert rows == whole[0]


def test_rows_of_a_rank(tmp_path: Path) -> None:
    """Each rank packs its own sequences; other ranks, numbers of ranks, and windows refuse its state."""
    packed = [PackedLoader(make("seeded", tmp_path, rank=rank, world_size=2, batch_size=20)) for rank in range(2)]
    rows = [[row["tokens"].tolist() for row in each] for each in packed]
    tokens = joined(joined(rows))  # type: ignore[arg-type]
    assert sorted(tokens) == joined([sequence(index)["tokens"].tolist() for index in range(300)])
    next(iter(packed[0]))
    state = packed[0].state_dict()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"rank": 1, "world_size": 2, "batch_size": 20}, "saved with rank=0, but this loader has rank=1"),
        ({"batch_size": 40}, "saved with batch_size=20, but this loader has batch_size=40"),
        ({"batch_size": 20}, "saved with world_size=2, but this loader has world_size=1"),
    ]
    for options, message in refused:
        with pytest.raises(StateError, match=message):
            PackedLoader(make("seeded", tmp_path, **options)).load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 9},
        {"delivered": -1},
        {"carried": [[0, 0]]},
        {"carried": [[0, 3, 2]]},
        {"loader": None},
        {"packing": {"max_tokens": MOST}},
    ],
)
def test_damaged_states(change: dict[str, Any], tmp_path: Path) -> None:
    """A state that is no state is refused, and an empty one begins anew."""
    packed = PackedLoader(make("seeded", tmp_path))
    rows = iter(packed)
    first = next(rows)["tokens"].tolist()
    state = packed.state_dict()
    for damaged in (state | change, {**state, "more": 1}, {"version": 1}):
        with pytest.raises(StateError):
            packed.load_state_dict(damaged)
    packed.load_state_dict({})
    assert next(iter(packed))["tokens"].tolist() == first


def test_another_epoch_than_that_of_the_state(tmp_path: Path) -> None:
    """Begins with its first window, whose rows are all delivered; so does one that resumes from there."""

    def resumed(state: dict[str, Any]) -> PackedLoader:
        packed = PackedLoader(make("fixed", tmp_path))
        packed.load_state_dict(state)
        return packed

    packed = PackedLoader(make("fixed", tmp_path))
    packed.loader.set_epoch(2)
    whole = [row["tokens"].tolist() for row in packed]
    packed = PackedLoader(make("fixed", tmp_path))
    rows = iter(packed)
    for _ in range(20):
        next(rows)
    packed = resumed(packed.state_dict())
    packed.loader.set_epoch(2)
    for each in (resumed(packed.state_dict()), packed):
        assert [row["tokens"].tolist() for row in each] == whole


def test_other_fixed_streams_have_other_windows(tmp_path: Path) -> None:
    """Also where the loader alone would read the rest of the samples in another order."""
    packed = PackedLoader(make("fixed", tmp_path))
    next(iter(packed))
    dataset = RemoteIterableDataset(f"{tmp_path}/", shuffle_buffer=20, streams=3, elastic="set")
    options: dict[str, Any] = {"batch_size": 40, "seed": 1, "decode": from_number}
    with DataLoader[Any](dataset, **options, collate_fn=JoinSequences(MOST)) as loader:
        loader.load_state_dict(packed.state_dict()["loader"])
        with pytest.raises(StateError, match="saved with streams=2, but this loader has streams=3"):
            PackedLoader(loader).load_state_dict(packed.state_dict())


class Bad(Map):
    def __getitem__(self, index: int) -> Any:
        if index == 50:
            raise OSError("bad")
        return sequence(index)


async def test_an_error_refers_to_no_iterator(tmp_path: Path) -> None:
    """One that the iterator keeps would keep that from being freed."""
    options: dict[str, Any] = {"batch_size": 100, "collate_fn": JoinSequences(MOST)}
    with pytest.raises(OSError, match="bad") as error:
        next(iter(PackedLoader(DataLoader[Any](Bad(), **options))))
    with pytest.raises(OSError, match="bad") as async_error:
        await anext(aiter(PackedLoader(AsyncDataLoader[Any](Bad(), **options))))
    for each in (error, async_error):
        assert [Path(entry.path).name for entry in each.traceback] == [Path(__file__).name] * 2


def test_errors_of_the_loader_leave_the_rows_as_they_are(tmp_path: Path) -> None:
    """A window that cannot be made raises where its first row is asked for; the rows after it follow."""
    packed = PackedLoader(DataLoader[Any](Bad(), batch_size=40, collate_fn=JoinSequences(MOST)))
    rows, tokens = iter(packed), list[int]()
    errors = 0
    while True:
        try:
            tokens += next(rows)["tokens"].tolist()
        except StopIteration:
            break
        except OSError:
            errors += 1
    assert errors == 1
    assert sorted(tokens) == joined([sequence(i)["tokens"].tolist() for i in range(300) if not 40 <= i < 80])


def test_interrupted_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two windows, and while a row is made, loses nothing."""
    from asyncloader.packing.windows import WindowPacker

    whole = [row["tokens"].tolist() for row in PackedLoader(make("seeded", tmp_path))]
    calls = 0

    def interrupting(function: Any, after: bool) -> Any:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            result = function(*args) if after or calls % 3 else None
            if calls % 3 == 0:
                raise KeyboardInterrupt
            return result

        return call

    for name in ("add", "row", "_pack"):
        for after in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(WindowPacker, name, interrupting(getattr(WindowPacker, name), after))
                rows, found = iter(PackedLoader(make("seeded", tmp_path))), list[Any]()
                while True:
                    try:
                        found.append(next(rows)["tokens"].tolist())
                    except KeyboardInterrupt:
                        continue
                    except StopIteration:
                        break
            assert found == whole


def test_padding_and_nothing(tmp_path: Path) -> None:
    """Rows are padded as `PackSequences` pads them; a loader without sequences has no rows."""
    rows = list(PackedLoader(make("seeded", tmp_path), pad_to=MOST, pad_values={"tokens": -1}, drop_last=True))
    assert {tuple(row["tokens"].shape) for row in rows} == {(1, MOST)}
    nothing: Any = []
    packed = PackedLoader(DataLoader[Any](nothing, batch_size=4, collate_fn=JoinSequences(MOST)))
    assert list(packed) == []


@pytest.mark.parametrize(
    ("types", "joined_type"),
    [(("int32", "int64"), "int64"), (("int64", "float16"), "float16"), (("uint16", "int32"), None)],
)
def test_types_that_meet(types: tuple[str, str], joined_type: str | None) -> None:
    """Within a row, a window, and at a window's border: torch's rule, of arrays and tensors."""
    arrays: Any = [np.arange(3).astype(name) for name in types]
    arrays[0].flags.writeable = False
    for samples in (arrays, [arrays[0], torch.from_numpy(arrays[1])]):
        for size in (0, 1, 2):  # `PackSequences`; two windows; one

            def first_row(size: int = size, samples: Any = samples) -> Any:
                loader: Any = DataLoader[Any](samples, batch_size=size or None, collate_fn=JoinSequences(6))
                return next(iter(PackedLoader(loader))) if size else PackSequences()([samples])

            if joined_type is None:
                with pytest.raises(ValueError, match=r"types torch\.int32 and torch\.uint16 cannot be joined"):
                    first_row()
            else:
                row = first_row()["tokens"]
                assert row.dtype == getattr(torch, joined_type)
                assert row.tolist() == [0, 1, 2, 0, 1, 2]


def test_fields_that_meet() -> None:
    """A field that has a value for each token in one window, and one for each sequence in the next, is refused."""
    samples: Any = [{"tokens": [1, 2], "score": 1}, {"tokens": [3, 4], "score": [1, 2]}]
    rows = PackedLoader(DataLoader[Any](samples, batch_size=1, collate_fn=JoinSequences(6)))
    with pytest.raises(ValueError, match=r"some have \['score', 'tokens'\], and those before \['score \(one value\)'"):
        list(rows)


def test_loaders_without_windows(tmp_path: Path) -> None:
    """The error says what to give."""
    with pytest.raises(TypeError, match=r"but got torch\.utils\.data\.dataloader\.DataLoader"):
        PackedLoader(TorchDataLoader(Map()))
    with pytest.raises(TypeError, match=r"gave list: give the loader collate_fn=JoinSequences"):
        next(iter(PackedLoader(make("seeded", tmp_path, collate_fn=list))))
