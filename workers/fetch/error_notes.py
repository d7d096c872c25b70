"""Adds notes to the exceptions of a dataset and of collation that say which sample they belong to.

Data path: worker: fetch -> [error_notes] -> answer -> consumer.

A note (PEP 678) does not change an exception's type, text or arguments, and is shown after it in a traceback. Nothing
here raises: an exception that takes no notes goes without.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_SHOWN = 8
_STARTS = ("while fetching ", "while reading ", "while collating ", "while calling ", "while opening ")
_ADVICE = {  # by what torch's default collation says
    "<class 'coroutine'>": "a dataset whose samples are awaited needs an `async def __getitem__`",
    "found <class": "samples of this type need a collate_fn",
    "stack expects each tensor to be equal size": "samples of different sizes need a collate_fn that pads or crops",
    "each element in list of batch should be of equal size": "samples of different lengths need a collate_fn",
}
_MOST_KEY = 200  # characters of a sample's key that are shown

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 200
_repr.maxlong = 40


def add_note(error: BaseException, text: str) -> None:
    """Add a note, unless the exception has it already or takes none."""
    with suppress(Exception):  # the exception itself must reach the user in any case
        if text not in getattr(error, "__notes__", ()):
            error.add_note(text)


def take_notes(error: BaseException) -> list[str]:
    """Remove the notes made here from the exception, and return them."""
    try:
        notes: list[str] = list(getattr(error, "__notes__", None) or ())
        # By their texts: the user's code may have added notes of its own, before or after.
        ours = [note for note in notes if note.startswith(_STARTS)]
        if ours:
            error.__notes__ = [note for note in notes if note not in ours]
    except Exception:
        return []
    return ours


def describe_sample(index: Any, item: int | None = None, position: int | None = None) -> str:
    """Return the note on a map dataset's sample. `item` is its index in the batch, from 0."""
    text = f"while fetching sample index {index_text(index)}"
    if item is not None:
        text += f" (item {item} of the batch)"
    return text if position is None else f"{text}, position {position}"


def shard_and_key(sample: Any) -> str | None:
    """Where a sample of a shard stands, in words; None of other streams' samples."""
    if type(sample) is not dict or not isinstance(key := sample.get("__key__"), str):
        return None
    return f"{key[:_MOST_KEY]!r} of {sample.get('__url__')!r}"


def note_shard(error: BaseException, sample: Any) -> None:
    """Note on an error of a sample which one of a shard it is, if it is one's."""
    where = shard_and_key(sample)
    if where is not None:
        add_note(error, f"while reading sample {where}")


def note_stream_sample(error: BaseException, number: int, stream: str | None, where: str | None = None) -> None:
    """Note on an error which sample of a stream raised it; `number` counts from 0 in the stream, which is in words.
    `where`: see `shard_and_key`.

    Not by its number where there is one stream (None), without workers; nor on asyncloader's own errors, which name
    their shard.
    """
    if where is not None:
        add_note(error, f"while reading sample {where}")
    elif stream is not None and not type(error).__module__.startswith("asyncloader."):
        add_note(error, f"while reading sample number {number} of {stream}")


def describe_batch(index: Any) -> str:
    """Return the note on a batch that a map dataset makes by `__getitems__`."""
    return f"while fetching the batch of indices {index_text(index)}"


def note_collation(error: BaseException, index: Any, *, batched: bool) -> None:
    """Note on an error of collation the map dataset's batch, or its sample without automatic batching."""
    what = "the batch of indices" if batched else "sample index"
    add_note(error, f"while collating {what} {index_text(index)}{_advice(error)}")


def note_stream_collation(error: BaseException, first: int, end: int, stream: str | None) -> None:
    """Note on an error of collation which samples of a stream were collated: those from `first` to ``end - 1``."""
    whose = "the stream" if stream is None else stream
    add_note(error, f"while collating samples number {first} to {end - 1} of {whose}{_advice(error)}")


def _advice(error: BaseException) -> str:
    said = error.args[0] if error.args else None
    if type(error) not in (RuntimeError, TypeError) or not isinstance(said, str):
        return ""
    return next((f" ({advice})" for text, advice in _ADVICE.items() if text in said), "")


def index_text(index: Any) -> str:
    """Return an index, or a batch of them, as text of bounded length."""
    try:
        if not isinstance(index, Sequence) or isinstance(index, (str, bytes, range)) or len(index) <= 2 * _SHOWN:
            return _one(index)
        shown = ", ".join(map(_repr.repr, index[:_SHOWN]))
        return f"[{shown}, ..., {_repr.repr(index[-1])}] ({len(index)} of them)"
    except Exception as error:
        return f"<an index whose text cannot be made: {type(error).__name__}>"


def _one(index: Any) -> str:
    if type(index) is list:
        # Item by item: reprlib would leave out all but the first six.
        return f"[{', '.join(map(_repr.repr, index))}]"
    return _repr.repr(index)
