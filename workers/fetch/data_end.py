"""Tells the end of the data from errors that Python would take for it, and what an error means for a stream's rest.

Data path: worker: fetch -> [data_end] -> answer. Also without workers.

StopIteration and StopAsyncIteration are the end only where the sampler's or the stream's own iterator raises them. From
there on the end travels as `EndOfData`, which no other code raises; so whatever else raises one of the two (a sample,
`collate_fn`, a blocking stream that raises StopAsyncIteration) has failed, and cannot end an epoch. Where such an error
cannot be raised as it is, because a coroutine, a future or ``async for`` gives it a meaning, `not_the_end` replaces it.
"""

from __future__ import annotations

import contextlib

from asyncloader.errors import LoaderError, left_a_generator
from asyncloader.workers.fetch.error_notes import add_note


class EndOfData(Exception):
    """The sampler, or the stream, has no more."""


def not_the_end(error: BaseException, whose: str) -> RuntimeError:
    """Return the error to raise instead of a StopIteration or StopAsyncIteration that is not the end; it is its cause.

    Args:
        error: the StopIteration or StopAsyncIteration; or any other that cannot be raised here.
        whose: whose code raised it, for the text: "the dataset's code".
    """
    text = f"{whose} raised {type(error).__name__}"
    with contextlib.suppress(Exception):  # the user's `__str__` may raise: then without the text
        text += f": {error}" if str(error) else ""
    instead = RuntimeError(text)
    instead.__cause__ = error
    for note in getattr(error, "__notes__", ()):
        instead.add_note(note)
    return instead


# ----------------------------------------------------------------- streams of which `on_error` leaves bad samples out

MAX_CONSECUTIVE = 1000
"""Number of consecutive failures after which a stream is given up."""


class StreamErrors:
    """Tracks the errors of a stream: gives up one that only raises, and detects an end caused by an error.

    A generator is finished once it has raised. So if an exception came out of a generator and the stream ends right
    after it, the rest of the stream is missing: the exception is raised then. Iterators of other kinds can go on after
    an exception, and may also end after one.
    """

    def __init__(self) -> None:
        self._consecutive = 0
        self._next = -1  # number of the sample after the last failure
        self._generator_error: Exception | None = None

    def failed(self, error: Exception, number: int) -> bool:
        """Record that sample `number` raised. Returns True if the stream is to be given up: raise the error then."""
        self._consecutive = self._consecutive + 1 if number == self._next else 1
        self._next = number + 1
        self._generator_error = error if left_a_generator(error) else None
        if self._consecutive < MAX_CONSECUTIVE:
            return False
        add_note(
            error,
            f"The stream has raised {self._consecutive} times in a row, and on_error gives it up. If its iterator "
            "cannot go on after an exception, it should raise StopIteration.",
        )
        self._consecutive = 0
        return True

    def ended(self, number: int) -> Exception | None:
        """The stream ended where sample `number` was expected. Returns the error to raise if an error ended it."""
        dead, self._generator_error = self._generator_error, None
        if dead is None or number != self._next:
            return None
        add_note(
            dead,
            "The stream was over after this exception: a generator cannot go on after one, so on_error finds nothing "
            "more to read. Catch it inside the generator, or write an iterator class whose __next__ can go on.",
        )
        return dead


def over_after(whose: str, name: str) -> LoaderError:
    """Return the error to raise instead of the end of an iterator that an exception of this name has ended."""
    error = LoaderError(
        f"{whose} was over after {name}: a generator cannot go on after it. No batch was lost: call "
        "load_state_dict() with the state that the loader has now, and iterate anew; or write an iterator class whose "
        "__next__ can go on"
    )
    error.about_sample = False
    return error
