"""Makes context managers of generators, as contextlib does, that leave alone the exceptions that pass through them.

Data path: none; around calls of the user's code.

contextlib's assign `__traceback__`, which an exception may refuse: a frozen dataclass, a class with a `__setattr__` of
its own. The refusal would then take the place of the user's error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _PlainContext(AbstractContextManager[T, bool | None]):
    def __init__(self, generator: Generator[T, None, None]) -> None:
        self._generator = generator

    def __enter__(self) -> T:
        return next(self._generator)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool | None:
        try:
            if error is None:
                next(self._generator)
            else:
                self._generator.throw(error)
        except StopIteration as end:
            return error is not None and end is not error  # it swallowed the error, if there was one
        except BaseException as raised:
            # A StopIteration that passes through a generator comes out as the cause of a RuntimeError.
            if raised is not error and not (isinstance(error, StopIteration) and raised.__cause__ is error):
                raise
            BaseException.with_traceback(
                raised if error is None else error, at
            )  # without the generator's frames; not by `error.__setattr__`
            return False
        self._generator.close()
        raise RuntimeError("the generator of a context has a second `yield`")


def plain_context(
    function: Callable[P, Generator[T, None, None]],
) -> Callable[P, AbstractContextManager[T, bool | None]]:
    """Decorate a generator function with one `yield`, as `contextlib.contextmanager` does."""

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T, bool | None]:
        return _PlainContext(function(*args, **kwargs))

    return make
