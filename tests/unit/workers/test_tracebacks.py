"""A traceback has no frames of the loader, unless the fault may be the loader's own."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

from asyncloader.errors import ShardError
from asyncloader.workers.fetch import error_pickle
from asyncloader.workers.fetch.error_pickle import hide_our_frames

OURS = error_pickle.__file__  # code that is compiled under this name passes for the loader's


def of_the_loader(source: str) -> Callable[..., Any]:
    """A function `call` that passes for the loader's."""
    names: dict[str, Any] = {"ShardError": ShardError}
    exec(compile(source, OURS, "exec"), names)
    function: Callable[..., Any] = names["call"]
    return function


def files_after(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The files of the frames below this frame, after the function failed and our frames were hidden."""
    with pytest.raises(Exception) as caught:
        function(*arguments)
    caught.value.__traceback__ = caught.tb.tb_next
    hide_our_frames(caught.value)
    return [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]


def users() -> None:
    raise KeyError("the user's")


def test_frames_between_the_users_are_hidden() -> None:
    """Frames of ours and of torch's fetcher are hidden above the user's function."""
    call = of_the_loader("def call(function):\n    function()")
    assert files_after(call, users) == [__file__]
    assert files_after(lambda: call(lambda: call(users))) == [__file__, __file__, __file__]
    data: Any = [1]
    assert files_after(lambda: next(iter(DataLoader[Any](data, collate_fn=lambda _: users())))) == [__file__] * 3


def test_our_own_errors_show_where_they_were_raised() -> None:
    """Only the innermost of our frames is shown."""
    call = of_the_loader("def call(error):\n    raise error\n")
    outer = of_the_loader("def call(inner, error):\n    inner(error)\n")
    assert files_after(outer, call, ShardError("the shard is damaged")) == [OURS]


def test_what_may_be_a_fault_of_the_loader_is_shown_whole() -> None:
    """An error of another type that our code raised keeps all frames."""
    call = of_the_loader("def call(inner):\n    inner()\n")
    assert files_after(call, of_the_loader("def call():\n    {}['missing']\n")) == [OURS, OURS]


def test_causes_are_shortened_too() -> None:
    """Errors of a chain are shortened, even if the chain is a cycle."""
    call = of_the_loader("def call(function):\n    function()")
    with pytest.raises(KeyError) as caught:
        call(users)
    first, second = caught.value, ShardError("about the first")
    second.__cause__, first.__context__ = first, second
    hide_our_frames(second)
    assert [frame.filename for frame in traceback.extract_tb(first.__traceback__)] == [__file__, __file__]
