"""Functions that would have to be awaited are recognized by their definitions, however they are held."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial, wraps
from typing import Any
from unittest.mock import MagicMock

import pytest

from asyncloader.workers.fetch.plain_calls import check_plain, is_awaited


class Own:
    async def awaited(self, sample: Any) -> Any:
        return sample

    async def __call__(self, sample: Any) -> Any:
        return sample


async def awaited(sample: Any) -> Any:
    return sample


@wraps(awaited)
def wrapping(sample: Any) -> Any:
    return sample


def annotated(sample: Any) -> Awaitable[Any]:
    return awaited(sample)


@pytest.mark.parametrize("function", [awaited, Own().awaited, Own(), partial(awaited, 1), wrapping, annotated])
def test_coroutine_functions(function: Any) -> None:
    """A function, a method, a callable object, a partial, a wrapper and an annotation are recognized."""
    assert is_awaited(function)
    with pytest.raises(TypeError, match=r"^f is a coroutine function, .* make it a plain function, without async$"):
        check_plain("f", function)


@pytest.mark.parametrize("function", [abs, Own, lambda x: awaited(abs(x)), MagicMock(), partial(abs, 1), None])
def test_others(function: Any) -> None:
    """Calling a class does not call its instances' `__call__`; a plain function's result is not known in advance."""
    assert not is_awaited(function)
    check_plain("f", function)
