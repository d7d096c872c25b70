"""torch's contract, row by row: errors of the user's code, their texts, and the batches after them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from asyncloader import DataLoader
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Numbers, identity
from tests.helpers.running import KINDS, outcomes, run_loader, without_place
from tests.helpers.side_by_side import MAKERS, outcome, shut_down, steps
from tests.torch_versions import torch_is

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def plain(found: Any) -> Any:
    """An outcome for comparison: of an error its type, and its text without the frames of other files."""
    if not _is_error(found):
        return found
    text = without_place(found[1].replace("\\n", "\n"))  # a subclass of KeyError shows its text as repr does
    here = Path(__file__).name
    return found[0], [line for line in text.splitlines() if not line.startswith(" ") or here in line]


def _is_error(found: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], type)


# ------------------------------------------------------------------------------------------- types and texts


class OwnKeyError(KeyError):
    pass


class TwoArguments(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class WithMessage(Exception):
    """An error with a `message`, which its constructor takes by that name."""

    message = "a default"

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(number, message)
        self.message = message


class Picky(Exception):
    def __init__(self, text: str) -> None:
        if "Traceback" in text:
            raise ValueError("no tracebacks, please")
        super().__init__(text)


class OddText(Exception):
    def __str__(self) -> str:
        return "ä text\nof its own"


def chained() -> None:
    try:
        raise OwnKeyError("the cause")
    except OwnKeyError as error:
        raise LookupError("the effect") from error


def _raise(error: BaseException) -> None:
    raise error


ERRORS: dict[str, Any] = {
    "KeyError": lambda: dict[str, int]()["missing\nkey"],
    "KeyError of an object": lambda: _raise(KeyError((1, "a"))),
    "a KeyError of one's own": lambda: _raise(OwnKeyError("mine")),
    "no text": lambda: _raise(ValueError()),
    "assertion": lambda: _raise(AssertionError()),
    "OSError": lambda: Path("/nowhere/at/all").read_bytes(),
    "UnicodeDecodeError": lambda: str(b"\xff", "utf-8"),
    "two arguments": lambda: _raise(TwoArguments(1, 2)),
    "keyword only": lambda: _raise(KeywordOnly(code=3)),
    "with message": lambda: _raise(WithMessage("hello", 7)),
    "refuses tracebacks": lambda: _raise(Picky("fine")),
    "odd text": lambda: _raise(OddText()),
    "chained": chained,
    "not implemented": lambda: _raise(NotImplementedError("later")),
    "numpy": lambda: np.zeros(3).reshape(2),
    "torch": lambda: torch.zeros(3).reshape(2),
    "no accelerator here": lambda: torch.zeros(1, device="cuda"),
    "out of memory": lambda: _raise(torch.OutOfMemoryError("pretend")),
    "recursion": lambda: _raise(RecursionError("deep")),
    "timeout": lambda: _raise(TimeoutError("slow")),
    "stop": lambda: _raise(StopIteration()),
    "stop with value": lambda: _raise(StopIteration(5)),
    "generator exit text": lambda: _raise(RuntimeError("generator raised StopIteration")),
}
if not torch_is("2.13"):  # 2.6 raises the error of the exception's own class, and loses the original
    del ERRORS["refuses tracebacks"]


class Raising(Dataset[Any]):
    """Samples with even indices are fine, each odd index raises another error."""

    def __len__(self) -> int:
        return 2 * len(ERRORS)

    def __getitem__(self, index: int) -> Any:
        if index % 2:
            [*ERRORS.values()][index // 2]()
        return index


@pytest.mark.parametrize("where", ["getitem", "collate"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_kind_of_error(where: str, workers: int) -> None:
    """Type, text and place are torch's for each error of `__getitem__` or `collate_fn`, and iteration continues."""
    options: dict[str, Any] = {"num_workers": workers, "batch_size": None}
    dataset: Any = Raising()
    if where == "collate":
        options["collate_fn"] = Raising().__getitem__
        dataset = range(len(Raising()))
    limit = 2 * len(ERRORS) + 2
    theirs = steps(torch.utils.data.DataLoader, dataset, limit, **options)
    assert sum(map(_is_error, theirs)) == len(ERRORS) + 2  # each error, and the end twice
    expected = [plain(step) for step in theirs]
    got = [plain(step) for step in steps(DataLoader, dataset, limit, **options)]
    for name, ours, same in zip(ERRORS, got[1::2], expected[1::2], strict=False):
        assert ours == same, name
    assert got == expected


def test_key_error_reads_well() -> None:
    """A worker's KeyError shows its text with line breaks, not as the repr of a string."""
    for make in (torch.utils.data.DataLoader, DataLoader):
        (_, text) = steps(make, Raising(), 1, num_workers=1, sampler=[1])[0]
        assert text.startswith("Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call")
        assert text.endswith("KeyError: 'missing\\nkey'\n")


def test_class_local_to_a_function() -> None:
    """Without workers it is raised unchanged; from a worker, where torch hangs, as RuntimeError with its text."""

    class Local(Exception):
        pass

    class Here(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise Local("cannot be pickled")
            return index

    for make in (torch.utils.data.DataLoader, DataLoader):
        assert steps(make, Here(3), 3)[1] == (Local, "cannot be pickled")
    first, second, third = steps(DataLoader, Here(3), 3, num_workers=1, multiprocessing_context="fork")
    assert (int(first), int(third)) == (0, 2)
    assert second[0] is RuntimeError
    assert second[1].startswith("Caught Local in DataLoader worker process 0.\nOriginal Traceback")
    assert "Local: cannot be pickled" in second[1].splitlines()[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_order_errors(kind: str) -> None:
    """With in_order=False, too, each batch has one outcome."""
    numbers = [i for i, name in enumerate(ERRORS) if not name.startswith("stop")]
    order = [index for i in numbers for index in (2 * i, 2 * i + 1)]
    options: dict[str, Any] = {"sampler": order, "batch_size": None, "num_workers": 2}
    expected = outcomes("torch", Raising(), **options)
    got = outcomes(kind, Raising(), in_order=False, **options)
    assert sorted(o for o in got if not _is_error(o)) == sorted(o for o in expected if not _is_error(o))
    kinds = [sorted(error[0].__name__ for error in found if _is_error(error)) for found in (got, expected)]
    assert kinds[0] == kinds[1]
    assert len(got) == len(order)


# ------------------------------------------------------------------------------------------- samplers


class Hiccup:
    """An iterator that raises at some positions, and can be read further."""

    def __init__(self, count: int, bad: set[int]) -> None:
        self.count = count
        self.bad = bad

    def __iter__(self) -> Hiccup:
        return self._begun()

    def _begun(self) -> Hiccup:
        begun = Hiccup(self.count, self.bad)
        begun.__dict__["position"] = -1
        return begun

    def __next__(self) -> list[int]:
        self.__dict__["position"] += 1
        position: int = self.__dict__["position"]
        if position >= self.count:
            raise StopIteration
        if position in self.bad:
            raise PermissionError(f"position {position}")
        return [position]


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_sampler_that_raises_and_goes_on(workers: int) -> None:
    """The call that advances the sampler raises the error, unchanged; later calls have torch's results."""
    every: list[set[int]] = [{0}, {3}, {4}, {5}, {9}, {4, 5}, {4, 7}, {3, 8}]
    for bad in every:
        options: dict[str, Any] = {"batch_sampler": Hiccup(10, bad), "num_workers": workers}
        expected = steps(torch.utils.data.DataLoader, torch.arange(10), 12, **options)
        got = steps(DataLoader, torch.arange(10), 12, **options)
        assert_same(got, expected, f"bad {bad}")
        assert any(_is_error(step) and step[0] is PermissionError for step in expected)


def test_index_out_of_range() -> None:
    """An index beyond the dataset is the dataset's error, in the place of its batch."""
    for workers in (0, 1):
        options: dict[str, Any] = {"sampler": [0, 7, 1], "num_workers": workers, "collate_fn": identity}
        expected = steps(torch.utils.data.DataLoader, [10, 11, 12], 4, **options)
        got = steps(DataLoader, [10, 11, 12], 4, **options)
        assert [plain(step) for step in got] == [plain(step) for step in expected]
        assert expected[1][0] is IndexError


# ------------------------------------------------------------------------------------------- at the start


def fail_in_worker_1(worker: int) -> None:
    if worker == 1:
        raise KeyError("start", worker)


class Working(IterableDataset[Any]):
    """Its `__iter__` fails in worker 1, and in the main process."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None or info.id == 1:
            raise LookupError("in __iter__")
        return iter(range(4))


def _places(found: list[Any]) -> list[Any]:
    return [_is_error(step) for step in found]


def test_worker_init_fn_fails() -> None:
    """The worker's first task raises the error; its later tasks raise, too, as in torch; the other worker continues."""
    options: dict[str, Any] = {"num_workers": 2, "worker_init_fn": fail_in_worker_1, "collate_fn": identity}
    expected = steps(torch.utils.data.DataLoader, Numbers(8), 9, **options)
    got = steps(DataLoader, Numbers(8), 9, **options)
    assert plain(got[1]) == plain(expected[1])
    assert got[1][0] is KeyError
    assert _places(got) == _places(expected) == [False, True] * 4 + [True]
    for step in got[3::2]:
        assert step[0] in (KeyError, UnboundLocalError), "the error is of the loader's inside"


def test_iter_fails_in_one_worker() -> None:
    """An `__iter__` of an iterable dataset that fails gives torch's errors in torch's places."""
    options: dict[str, Any] = {"num_workers": 2, "collate_fn": identity}
    expected = steps(torch.utils.data.DataLoader, Working(), 6, **options)
    got = steps(DataLoader, Working(), 6, **options)
    assert _places(got) == _places(expected) == [False, True] * 3
    assert plain(got[1]) == plain(expected[1])
    assert [step for step in got if not _is_error(step)] == [[0], [1], [2]]
    for step in got[3::2]:
        assert step[0] in (LookupError, UnboundLocalError), "the error is of the loader's inside"


def test_iter_fails_without_workers() -> None:
    """Without workers `iter(loader)` raises, as in torch."""
    assert steps(DataLoader, Working(), 1) == steps(torch.utils.data.DataLoader, Working(), 1)
    assert steps(DataLoader, Working(), 1) == [(LookupError, "in __iter__")]


def test_persistent_workers_after_a_failed_start() -> None:
    """A worker whose worker_init_fn failed calls it again for the next epoch. torch's worker reads on uninitialised."""

    def run(make: Any) -> list[Any]:
        options: dict[str, Any] = {"num_workers": 2, "worker_init_fn": fail_in_worker_1, "collate_fn": identity}
        loader = make(torch.arange(4), persistent_workers=True, **options)
        epochs = []
        for _ in range(3):
            batches = iter(loader)
            epochs.append([outcome(next, batches) for _ in range(5)])
        shut_down(loader._iterator)
        return epochs

    expected, got = run(torch.utils.data.DataLoader), run(DataLoader)
    assert _places(expected[0]) == [False, True, False, True, True]
    assert [_places(epoch) for epoch in got] == [_places(expected[0])] * 3
    assert _places(expected[1]) == [False] * 4 + [True]


class FailsOnce(IterableDataset[Any]):
    """The first `__iter__` of each copy fails."""

    def __init__(self) -> None:
        self.calls = 0

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        if self.calls == 1:
            raise LookupError("not yet")
        return iter(range(3))


def test_persistent_workers_after_a_failed_iter() -> None:
    """A worker whose `__iter__` failed calls it again in the next epoch, as in torch."""

    def run(make: Any) -> list[Any]:
        loader = make(FailsOnce(), num_workers=1, persistent_workers=True)
        first = outcome(next, iter(loader))
        found = [plain(first), [int(batch) for batch in loader], [int(batch) for batch in loader]]
        shut_down(loader._iterator)
        return found

    assert run(DataLoader) == run(torch.utils.data.DataLoader)


def test_persistent_workers_after_errors() -> None:
    """Epochs with errors do not change later epochs: each has the same outcomes."""

    def run(make: Any) -> list[Any]:
        loader = make(Raising(), batch_size=None, num_workers=2, sampler=range(12), persistent_workers=True)
        found = []
        for taken in (13, 2, 13, 1, 13):
            batches = iter(loader)
            found.append([plain(outcome(next, batches)) for _ in range(taken)])
        shut_down(loader._iterator)
        return found

    got = run(DataLoader)
    assert got == run(torch.utils.data.DataLoader)
    assert got[0] == got[2] == got[4]


def test_errors_reach_the_async_loader_in_the_same_order() -> None:
    """The asynchronous loader has the outcomes of the other two loaders."""
    numbers = [i for i, name in enumerate(ERRORS) if not name.startswith("stop")]
    order = [index for i in numbers for index in (2 * i, 2 * i + 1)]
    options: dict[str, Any] = {"sampler": order, "batch_size": None, "num_workers": 2}
    expected = [plain(o) for o in outcomes("torch", Raising(), **options)]
    for kind in [*MAKERS][1:]:
        assert [plain(o) for o in outcomes(kind, Raising(), **options)] == expected
    assert len(run_loader("asyncio", range(3), num_workers=1).epochs[0]) == 3
