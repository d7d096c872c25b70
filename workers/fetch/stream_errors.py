"""Decides what a stream's exceptions mean for the rest of it, where `on_error` leaves bad samples out.

Data path: worker: [stream_errors: fetch] -> collate. Only with an `on_error` other than "raise".
"""

from __future__ import annotations

from asyncloader.errors import LoaderError, left_a_generator
from asyncloader.workers.fetch.error_notes import add_note

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
