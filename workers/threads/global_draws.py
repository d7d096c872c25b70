"""Notices when a worker thread draws from the generators that belong to the whole process.

Data path: beside the fetch, in a worker thread; of some tasks only.

Such draws depend on what the other threads do at the same time, so in seeded mode they are refused, and in torch mode
there is one warning. The training loop draws from the same generators, so it is not enough to see that their states
have changed: a draw of Python's `random` is seen as a call by this thread, and one of torch as a change during an
operation of this thread. numpy's functions can be seen in neither way; there a change is only a reason to warn.

Watched are the tasks number 0, 1, 3, 7, 15 and so on of each worker: watching takes longer than most samples.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from asyncloader.errors import warn_aside
from asyncloader.workers.fetch.seeding import numpy_mark

_INSTEAD = (
    'These belong to the whole process, and with workers="threads" several threads draw from them at the same time. '
    "In the dataset, use asyncloader.sample_rng().torch, .numpy or .random, torch.thread_safe_generator() or "
    "get_worker_info().rng, or use worker processes."
)
_PYTHONS: Any = random._inst
_DRAWING = ("random", "getrandbits", "seed")


class _TorchDraws(TorchFunctionMode):
    """Notes whether this thread calls a function of torch that draws from torch's global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = any(
            isinstance(value, torch.Generator) and value is not torch.default_generator
            for value in (*args, *kwargs.values())
        )
        if own or not _may_draw(getattr(func, "__name__", ""), getattr(func, "__module__", None)):
            return func(*args, **kwargs)
        # A dropout that is switched off draws nothing.
        before = _torch_mark()
        result = func(*args, **kwargs)
        self.drawn = self.drawn or _torch_mark() != before
        return result


@functools.cache
def _may_draw(name: str, module: str | None) -> bool:
    """Whether this function of torch's may draw; those that are made of others may."""
    operation = getattr(torch.ops.aten, name, None)
    if operation is None:
        return module in ("torch.nn.functional", "torch.nn.init")
    return any(torch.Tag.nondeterministic_seeded in getattr(operation, each).tags for each in operation.overloads())


def _torch_mark() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()


class Said:
    """Whether a loader's warning was given; all of its workers have the same."""

    yet = False


class GlobalDraws:
    """Watches the tasks of one worker thread.

    Args:
        seeded: whether a draw is an error.
        said: of the loader.
    """

    def __init__(self, said: Said, *, seeded: bool) -> None:
        self._said = said
        self._seeded = seeded
        self._task, self._due = 0, 0
        self._over = False

    def watched(self, fetch: Callable[..., Any], *args: Any) -> Any:
        """Return what the call returns.

        Raises:
            RuntimeError: in seeded mode the call drew from generators of the whole process.
        """
        task, self._task = self._task, self._task + 1
        if task < self._due or self._over:
            return fetch(*args)
        self._due = 2 * task + 1
        result, names = _names_drawn(fetch, args)
        certain = [name for name in names if name != "numpy"]
        if names:
            text = f"A dataset drew from the process-global generators ({', '.join(names)}). {_INSTEAD}"
            if self._seeded and certain:
                raise RuntimeError(text)
            self._over = True
            if not self._said.yet:
                self._said.yet = True
                warn_aside(text, RuntimeWarning, stacklevel=2)
        return result


def _names_drawn(fetch: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, list[str]]:
    called = False

    def profile(frame: Any, event: str, function: Any) -> None:
        nonlocal called
        del frame
        if event == "c_call" and getattr(function, "__self__", None) is _PYTHONS and function.__name__ in _DRAWING:
            called = True

    before = numpy_mark()
    profiles = sys.getprofile() is None  # otherwise the user's profiler is left alone
    with _TorchDraws() as torchs:
        if profiles:
            sys.setprofile(profile)
        try:
            result = fetch(*args)
        finally:
            if profiles:
                sys.setprofile(None)
    found = {"random": called, "numpy": numpy_mark() != before, "torch": torchs.drawn}
    return result, [name for name, drawn in found.items() if drawn]
