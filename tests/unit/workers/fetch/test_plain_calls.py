"""Functions that would have to be awaited are recognized by their definitions, however they are held."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest

from asyncloader.workers.fetch.plain_calls import check_plain, is_coroutine_function


class Own:
    async def awaited(self, sample: Any) -> Any:
        return sample

    async def __call__(self, sample: Any) -> Any:
        return sample


async def awaited(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize("function", [awaited, Own().awaited, Own(), partial(awaited, 1)])
def test_coroutine_functions(function: Any) -> None:
    """A function, a method, a callable object and a partial are recognized."""
    assert is_coroutine_function(function)
    with pytest.raises(TypeError, match=r"^f is a coroutine function, .* make it a plain function, without async$"):
        check_plain("f", function)


@pytest.mark.parametrize("function", [abs, Own, lambda x: awaited(abs(x)), MagicMock(), partial(abs, 1), None])
def test_others(function: Any) -> None:
    """Calling a class does not call its instances' `__call__`; a plain function's result is not known in advance."""
    assert not is_coroutine_function(function)
    check_plain("f", function)
