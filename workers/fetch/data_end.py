"""Tells the end of the data from errors that Python would take for it.

Data path: worker: fetch -> [data_end] -> answer. Also without workers.

StopIteration and StopAsyncIteration are the end only where the sampler's or the stream's own iterator raises them. From
there on the end travels as `EndOfData`, which no other code raises; so whatever else raises one of the two (a sample,
`collate_fn`, a blocking stream that raises StopAsyncIteration) has failed, and cannot end an epoch. Where such an error
cannot be raised as it is, because a coroutine, a future or ``async for`` gives it a meaning, `not_the_end` replaces it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from asyncloader.errors import is_tried_again
from asyncloader.plain_context import plain_context


class EndOfData(Exception):
    """The sampler, or the stream, has no more."""


class Paused(Exception):
    """A store failed at an earlier batch of the stream, which is to be tried again before this one."""


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


@plain_context
def answered_before() -> Generator[None]:
    """Context around the re-reading of an answered batch: what failed it was its answer, and the consumer has that. A
    store's failure was none: the batch came when it was tried again.
    """
    try:
        yield
    except EndOfData:
        raise
    except Exception as error:
        if is_tried_again(error):
            raise
