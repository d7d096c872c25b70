"""Exceptions of every odd shape: the user's error is raised itself, or as a RuntimeError with its text."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
from torch.utils.data import Dataset, IterableDataset

from asyncloader.workers.fetch.error_pickle import describe
from tests.drawn import scaled
from tests.helpers.running import BOTH, outcomes

TEXT = "mine"


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses every attribute, `__traceback__` and `__notes__` too."""

    text: str


class Refusing(Exception):
    """Refuses attributes, tracebacks and notes with errors of its own."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"no {name}")

    def with_traceback(self, _: Any) -> Any:
        raise RuntimeError("no traceback")

    def add_note(self, _: str) -> None:
        raise RuntimeError("no note")


class WithMessage(Exception):
    """torch constructs it with `message=`, which its constructor does not take."""

    message = "a default"

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)


class MessageProperty(Exception):
    @property
    def message(self) -> str:
        raise ValueError("no message")


class Slots(Exception):
    __slots__ = ("code",)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = 3


class KeywordOnly(Exception):
    def __init__(self, *, text: str) -> None:
        super().__init__(text)


class NoPickle(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no pickle")


class NotAnError(Exception):
    """Constructing it from a text gives an object that cannot be raised."""

    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls, *args) if len(args) == 2 else "a text"


class OwnGroup(ExceptionGroup[Exception]):
    def __new__(cls, text: str, errors: list[Exception], code: int) -> Self:
        return super().__new__(cls, text, errors)

    def __init__(self, text: str, errors: list[Exception], code: int) -> None:
        super().__init__(text, errors)
        self.code = code


def local() -> Exception:
    class Local(Exception):
        pass

    return Local(TEXT)


def cyclic() -> Exception:
    first, second = ValueError(TEXT), KeyError("the other")
    first.__cause__, second.__cause__ = second, first
    first.__context__, second.__context__ = second, first
    return first


def chained(length: int) -> Exception:
    error = ValueError(TEXT)
    for _ in range(length):
        cause, error = error, ValueError(TEXT)
        error.__cause__ = cause
    return error


def nested(depth: int) -> ExceptionGroup[Exception]:
    inner: list[Exception] = [ValueError("in the group"), local(), Frozen("frozen in the group")]
    return ExceptionGroup(TEXT, [*inner, nested(depth - 1)] if depth else inner)


SHAPES: dict[str, Callable[[], Exception]] = {
    "frozen": lambda: Frozen(TEXT),
    "refusing": lambda: Refusing(TEXT),
    "message": lambda: WithMessage(TEXT, 2),
    "message property": lambda: MessageProperty(TEXT),
    "slots": lambda: Slots(TEXT),
    "keyword only": lambda: KeywordOnly(text=TEXT),
    "no pickle": lambda: NoPickle(TEXT),
    "not an error": lambda: NotAnError(TEXT, 1),
    "local": local,
    "cyclic": cyclic,
    "long chain": lambda: chained(2000),
    "huge": lambda: ValueError(TEXT + "x" * 3_000_000),
    "group": lambda: nested(0),
    "groups in groups": lambda: nested(5),
    "deep groups": lambda: nested(400),
    "own group": lambda: OwnGroup(TEXT, [ValueError("in the group")], 3),
}


def shapes_with(workers: int) -> list[str]:
    """Without workers an exception that refuses attributes may be replaced by its refusal: contextlib assigns to it."""
    return [name for name in SHAPES if workers or name not in ("frozen", "refusing")]


class Map(Dataset[int]):
    """Each odd sample raises another shape of exception."""

    def __init__(self, shapes: list[str]) -> None:
        self.shapes = shapes

    def __len__(self) -> int:
        return 2 * len(self.shapes)

    def __getitem__(self, index: int) -> int:
        if index % 2:
            error = SHAPES[self.shapes[index // 2]]()
            BaseException.__setattr__(error, "__notes__", ["the user's note"])
            raise error
        return index


class AsyncMap(Map):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return super().__getitem__(index)


class Stream(IterableDataset[int]):
    def __init__(self, shapes: list[str]) -> None:
        self.samples = Map(shapes)

    def __iter__(self) -> Iterator[int]:
        return map(self.samples.__getitem__, range(len(self.samples)))


def assert_each_arrives(found: list[Any], shapes: list[str], *, workers: int) -> None:
    """Check that each sample is delivered, or in its place the error or its replacement, with text and notes."""
    assert [each for each in found if not isinstance(each, tuple)] == [*range(0, 2 * len(shapes), 2)]
    for shape, (kind, text) in zip(shapes, found[1::2], strict=True):
        own = type(SHAPES[shape]())
        assert kind.__name__ == own.__name__ if not workers else kind in (own, RuntimeError), (shape, kind)
        assert kind is own or shape not in ("frozen", "refusing", "slots", "cyclic", "huge", "long chain"), shape
        assert TEXT in text, shape
        assert "the user's note" in text, shape
        if shape == "group" and workers:
            assert "ValueError: in the group" in text


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", [Map, AsyncMap, Stream])
def test_every_shape_arrives(make: Any, workers: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Map and stream, with and without workers, in both loaders; later batches are delivered."""
    # Without workers a batch is measured closely now and then; here each is.
    monkeypatch.setattr("asyncloader.epoch.inline._LOOK_S", 0.0)
    shapes = shapes_with(workers)
    found = outcomes(kind, make(shapes), batch_size=None, num_workers=workers)
    assert_each_arrives(found, shapes, workers=workers)


@pytest.mark.parametrize("seed", range(scaled(10)))
def test_drawn_shapes(seed: int) -> None:
    """Some shapes, in a drawn order, in a drawn loader of seeded mode."""
    draw = random.Random(seed)
    workers, kind, make = draw.choice([0, 1]), draw.choice(BOTH), draw.choice([Map, AsyncMap])
    shapes = draw.choices(shapes_with(workers), k=6)
    found = outcomes(kind, make(shapes), batch_size=None, num_workers=workers, seeded=seed)
    assert_each_arrives(found, shapes, workers=workers)


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __notes__: Any = property(lambda self: 1 / 0)


class Broken(type):
    __name__: Any = property(lambda cls: 1 / 0)


def test_an_error_whose_text_cannot_be_made() -> None:
    """Describing it succeeds, whatever raises during it, and includes where the error was raised."""
    for error in (NoText(TEXT), Broken("NoName", (Exception,), {})(TEXT)):
        with pytest.raises(Exception) as caught:
            raise error
        assert __file__ in describe(caught.value)
