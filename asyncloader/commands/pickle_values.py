"""Reads a pickle that may be a stranger's: no class is imported, no function is called, no object is made. Pure.

Data path: file -> [pickle_values] -> checkpoint_file.

Numbers, texts, tuples, lists and dictionaries are read by Python's own `pickle`. Where it would import, call or make
another object, an `OtherObject` holds the values that the object would be made of. The time and the memory are bounded
by the file's size, and by `MOST_STEPS`: no value is copied, hashed or allocated at the word of the file.
"""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable
from typing import Any, BinaryIO, ClassVar

MOST_STEPS = 30_000_000
"""Instructions of a pickle: a minute's work. A tensor takes about 30."""

_LARGE = 1 << 20  # bytes of a text or of bytes that are passed over: no loader's state has any
_LONGEST_KEY = 1000  # characters of a text; longer ones are not compared
_MOST_NAMED = 4  # elements of a tuple that a key's text shows
_MOST_BITS = 1024  # of a number in a key's text: Python refuses to write thousands of digits


class PickleError(ValueError):
    """The bytes are no pickle, or the pickle is damaged or too long."""


class OtherObject:
    """Stands for an object that is not a plain value, for its class or function, or for a key that is not a text.

    Attributes:
        name: as in ``collections.OrderedDict``; of a key: the key as a text.
        parts: the values it would be made of: its arguments, attributes, elements and items.
    """

    __slots__ = ("name", "parts")

    def __init__(self, name: str = "", *parts: Any) -> None:
        self.name = name
        self.parts = [*parts]

    def __str__(self) -> str:
        return self.name


class _Elements(list[Any]):
    """Those that the file appends to an `OtherObject`."""


class _KeysAndValues(dict[Any, Any]):
    """Those that the file sets in an `OtherObject`."""


def read_pickle(file: BinaryIO) -> Any:
    """Return the value of the pickle that begins here, and leave the file at its end. Texts and bytes of more than a
    MiB are empty in it.

    Raises:
        OSError: the file cannot be read.
        PickleError: it is no pickle, is damaged, or has more than `MOST_STEPS` instructions.
    """
    try:
        return _InertUnpickler(file).load()
    except (PickleError, OSError):
        raise
    except Exception as error:  # each method of `pickle._Unpickler` raises its own
        raise PickleError(f"it is damaged: {type(error).__name__}: {error}") from None


class _InertUnpickler(pickle._Unpickler):
    """Python's `pickle.Unpickler` as far as it is safe.

    Of its two forms this is the one in Python, `pickle._Unpickler`, whose instructions can be replaced: that in C
    hashes keys and allocates memory as the file asks, and ends the process at tuples that nest deep.
    """

    pop_mark: Callable[[], list[Any]]  # the values above the last mark

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="latin-1", buffers=itertools.repeat(b""))
        self._file = file
        here = file.tell()
        self._end = file.seek(0, os.SEEK_END)
        file.seek(here)
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []
        self.append = self.stack.append

    def load(self) -> Any:
        """Carry out the instructions, and return the value."""
        for _ in range(MOST_STEPS):
            code = self._file.read(1)
            if code == pickle.STOP:
                return self.stack.pop()
            if not code:
                raise PickleError("it is damaged: it has no end")
            self.dispatch[code[0]](self)
        raise PickleError(f"it has more than {MOST_STEPS:,} instructions")

    def read(self, size: int) -> bytes:
        """Return the next bytes; none where they are more than `_LARGE`, which are passed over."""
        if size <= _LARGE:
            data = self._file.read(size)
        elif size <= self._end - self._file.tell():
            self._file.seek(size, os.SEEK_CUR)
            return b""
        else:
            data = b""
        if len(data) < size:
            raise PickleError("it is damaged: it has no end")
        return data

    def readline(self) -> bytes:
        """Return the rest of the line."""
        line = self._file.readline(_LARGE)
        if len(line) == _LARGE:
            raise PickleError(f"it is damaged: a line has more than {_LARGE:,} bytes")
        return line

    def find_class(self, module: str, name: str) -> Any:
        """Stand for a class or a function, without importing it."""
        return OtherObject(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002
        """Stand for a tensor's memory."""
        return None

    def get_extension(self, _: int) -> None:
        """Stand for a class that this program may have registered."""
        self.append(OtherObject())

    def _instantiate(self, kind: Any, arguments: Any) -> None:
        """Stand for an object that the two oldest of the instructions for it would make."""
        self.append(OtherObject(getattr(kind, "name", ""), arguments))

    def _call(self, number: int) -> None:
        """Stand for the result of a call; the function and its arguments are the last values of this number."""
        function, *arguments = self.stack[-number:]
        self.stack[-number:] = [OtherObject(getattr(function, "name", ""), *arguments)]

    def _build(self) -> None:
        state = self.stack.pop()
        # A pair has the attributes in `__dict__`, and those in `__slots__`.
        self.stack[-1].parts += state if type(state) is tuple and len(state) == 2 else (state,)

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        (target if type(target) is list else _last_part(target, _Elements)).extend(values)

    def _update(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        target = target if type(target) is dict else _last_part(target, _KeysAndValues)
        target.update(zip(map(_key, pairs[::2]), pairs[1::2], strict=True))

    def _dictionary(self) -> None:
        pairs = self.pop_mark()
        self.append({})
        self._update(pairs)

    dispatch: ClassVar[dict[int, Callable[[Any], Any]]] = {
        **pickle._Unpickler.dispatch,
        pickle.FRAME[0]: lambda self: self.read(8),  # read ahead, a frame would take memory as it says
        pickle.BYTEARRAY8[0]: pickle._Unpickler.dispatch[pickle.BINBYTES8[0]],  # its own allocates before it reads
        pickle.EMPTY_SET[0]: lambda self: self.append(OtherObject("builtins.set")),
        pickle.FROZENSET[0]: lambda self: self._instantiate(None, self.pop_mark()),
        pickle.REDUCE[0]: lambda self: self._call(2),
        pickle.NEWOBJ[0]: lambda self: self._call(2),
        pickle.NEWOBJ_EX[0]: lambda self: self._call(3),
        pickle.BUILD[0]: _build,
        pickle.APPEND[0]: lambda self: self._extend([self.stack.pop()]),
        pickle.APPENDS[0]: lambda self: self._extend(self.pop_mark()),
        pickle.ADDITEMS[0]: lambda self: self._extend(self.pop_mark()),
        pickle.SETITEM[0]: lambda self: self._update([self.stack.pop(), self.stack.pop()][::-1]),
        pickle.SETITEMS[0]: lambda self: self._update(self.pop_mark()),
        pickle.DICT[0]: _dictionary,
    }


def _last_part(target: OtherObject, kind: Callable[[], Any]) -> Any:
    if not target.parts or type(target.parts[-1]) is not kind:
        target.parts.append(kind())
    return target.parts[-1]


def _key(key: Any) -> Any:
    """Return a key whose hash takes a short time: that of a text is secret, and the same text's is not counted anew.

    A stranger can choose numbers and tuples that share a hash, and tuples whose hash never ends or ends the process.
    """
    return key if type(key) is str and len(key) <= _LONGEST_KEY else OtherObject(_text(key))


def _text(key: Any) -> str:
    if type(key) is tuple and len(key) <= _MOST_NAMED:
        return f"({', '.join(_text(each) if type(each) is not tuple else '...' for each in key)})"
    short = isinstance(key, str | bytes) and len(key) <= _LONGEST_KEY
    if short or key is None or type(key) is float or (isinstance(key, int) and key.bit_length() <= _MOST_BITS):
        return repr(key)
    return f"<{getattr(key, 'name', type(key).__name__)}>"
