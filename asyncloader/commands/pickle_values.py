"""Reads the plain values of a pickle without unpickling it: no class is imported, and no function is called. Pure.

Data path: file -> [pickle_values] -> checkpoint_file.

A pickle is a program that makes objects. Its instructions are decoded by `pickletools`, and carried out here as far as
they make dictionaries, lists, tuples, texts and numbers. Where they would make another object, its attributes and items
are kept in an `OtherObject`. A program of a stranger must neither take all memory nor crash Python: numbers of
instructions are bounded, and keys of dictionaries are texts and numbers alone, because hashing tuples that nest
200,000 deep overflows the stack of C.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterable
from typing import IO, Any, Protocol, cast

MOST_STEPS = 30_000_000
"""Instructions of a pickle: a minute's work. A tensor takes about 30."""

_MOST_BITS = 1024  # of a number that is a key: Python refuses to write one of thousands of digits


class PickleError(ValueError):
    """The bytes are no pickle, or the pickle is damaged or too long."""


class OtherObject(dict[Any, Any]):
    """Stands for an object that is no plain value; has its attributes and items.

    Args:
        name: of its class or function, as in ``collections.OrderedDict``.
    """

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name


class Readable(Protocol):
    """A file that is open for reading bytes."""

    def read(self, size: int, /) -> bytes:
        """Return at most this number of bytes."""
        ...

    def readline(self) -> bytes:
        """Return a line."""
        ...


def read_pickle(file: Readable) -> Any:
    """Return the value of the pickle that begins here, and leave the file at its end.

    Raises:
        PickleError: it is no pickle, is damaged, or has more than `MOST_STEPS` instructions.
    """
    machine = _Machine()
    try:
        for number, (opcode, value, _) in enumerate(pickletools.genops(cast("IO[bytes]", file))):
            if number >= MOST_STEPS:
                raise PickleError(f"it has more than {MOST_STEPS:,} instructions")
            machine.carry_out(opcode.name, value)
        return machine.stack[-1]
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeError, OverflowError) as error:
        raise PickleError(f"it is damaged: {type(error).__name__}: {error}") from None
    except PickleError:
        raise
    except ValueError as error:  # of pickletools
        raise PickleError(f"it is damaged: {error}") from None


class _Machine:
    """The stack on which the instructions work."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks below each mark
        self._memo: dict[int, Any] = {}

    def carry_out(self, name: str, value: Any) -> None:
        """Carry out an instruction.

        Args:
            name: of it, as `pickletools` has it.
            value: its argument.
        """
        if name in _VALUES:
            self.stack.append(value)
        elif name in _MEMOIZED:
            self._memo[len(self._memo) if value is None else value] = self.stack[-1]
        elif name in _RECALLED:
            self.stack.append(self._memo[value])
        elif name in _MADE:
            self.stack.append(_MADE[name]())
        elif name not in _WITHOUT_EFFECT:
            getattr(self, f"_{name.lower()}")(value)

    def _marked(self) -> list[Any]:
        """Return the values above the last mark, and remove both."""
        found, self.stack = self.stack, self._below.pop()
        return found

    def _mark(self, _: Any) -> None:
        self._below.append(self.stack)
        self.stack = []

    def _pop(self, _: Any) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._marked()

    def _pop_mark(self, _: Any) -> None:
        self._marked()

    def _dup(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    # ------------------------------------------------------------------------------------------- containers

    def _tuple(self, _: Any) -> None:
        found = self._marked()
        self.stack.append(tuple(found))

    def _tuple1(self, _: Any) -> None:
        self.stack[-1:] = [(self.stack[-1],)]

    def _tuple2(self, _: Any) -> None:
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]

    def _tuple3(self, _: Any) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def _list(self, _: Any) -> None:
        found = self._marked()
        self.stack.append(found)

    def _append(self, _: Any) -> None:
        self._extend([self.stack.pop()])

    def _appends(self, _: Any) -> None:
        self._extend(self._marked())

    def _extend(self, values: list[Any]) -> None:
        if isinstance(self.stack[-1], list):  # the elements of others are left out
            self.stack[-1].extend(values)

    def _dict(self, _: Any) -> None:
        found = self._marked()
        self.stack.append({})
        self._update(found)

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _setitems(self, _: Any) -> None:
        self._update(self._marked())

    def _update(self, pairs: list[Any]) -> None:
        if isinstance(self.stack[-1], dict):
            _take(self.stack[-1], zip(pairs[::2], pairs[1::2], strict=True))

    def _additems(self, _: Any) -> None:
        self._marked()  # the elements of sets are left out

    def _frozenset(self, _: Any) -> None:
        self._marked()
        self.stack.append(OtherObject("builtins.frozenset"))

    # ---------------------------------------------------------------------------------------- other objects

    def _global(self, value: str) -> None:
        self.stack.append(OtherObject(value.replace(" ", ".")))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(OtherObject(f"{module}.{name}" if isinstance(name, str) and isinstance(module, str) else ""))

    def _inst(self, value: str) -> None:
        self._marked()
        self._global(value)

    def _obj(self, _: Any) -> None:
        self._marked()
        self.stack.append(OtherObject())

    def _newobj(self, _: Any) -> None:
        self._reduce(_)

    def _newobj_ex(self, _: Any) -> None:
        self.stack.pop()
        self._reduce(_)

    def _reduce(self, _: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(_result(function, arguments))

    def _build(self, _: Any) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], OtherObject):
            for part in state if isinstance(state, tuple) else (state,):  # of `__dict__`, and of `__slots__`
                if isinstance(part, dict):
                    _take(self.stack[-1], part.items())

    def _binpersid(self, _: Any) -> None:
        self.stack[-1] = OtherObject()


def _take(target: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> None:
    """Take the items whose keys are texts or numbers."""
    target.update((key, value) for key, value in pairs if _is_plain(key))


def _is_plain(key: Any) -> bool:
    return isinstance(key, str | float | bytes) or (isinstance(key, int) and key.bit_length() <= _MOST_BITS)


def _result(function: Any, arguments: Any) -> Any:
    """Return the value of a call that makes a plain value; of others, an object."""
    name = function.name if isinstance(function, OtherObject) else ""
    first = arguments[0] if isinstance(arguments, tuple) and arguments else None
    if name == "_codecs.encode" and isinstance(first, str):  # by which bytes are written in protocol 2
        return first.encode("latin-1")
    if name in ("builtins.bytes", "__builtin__.bytes") and first is None:
        return b""
    made = OtherObject(name)
    if name == "collections.OrderedDict" and isinstance(first, list):
        _take(made, ((each[0], each[1]) for each in first if isinstance(each, list | tuple) and len(each) == 2))
    return made


_VALUES = frozenset(
    (
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
        "UNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "FLOAT",
        "BINFLOAT",
    )
)
_MEMOIZED = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"))
_RECALLED = frozenset(("GET", "BINGET", "LONG_BINGET"))
_MADE: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    **dict.fromkeys(("EMPTY_SET", "PERSID", "NEXT_BUFFER", "EXT1", "EXT2", "EXT4"), OtherObject),
}
_WITHOUT_EFFECT = frozenset(("PROTO", "FRAME", "STOP", "READONLY_BUFFER"))
