"""Declares the options that few runs set, in three objects: `Recovery`, `Tuning` and `DeviceOptions`.

Data path: none; the loaders' constructor takes one of each (`declaration.py`). A field's name is unique among all
options, so ``loader.clone(worker_timeout=30)`` changes a single one.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from asyncloader.base.sizes import Size
from asyncloader.options.checks import CHECKS


class _OptionObject:
    """Checks the fields when the object is made; its text shows those that differ from the defaults."""

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Make the object; `__init__` sets the fields."""
        known: dict[str, Any] = getattr(cls, "__dataclass_fields__", {})
        if not options.keys() <= known.keys():
            raise unknown_option(f"{cls.__name__}.__init__", options, known)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, value in _fields(self).items():
            CHECKS[name](name, value)

    def __repr__(self) -> str:
        changed = [f"{name}={value!r}" for name, value in _fields(self).items() if value != getattr(type(self), name)]
        return f"{type(self).__name__}({', '.join(changed)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Recovery(_OptionObject):
    """How a loader deals with workers that hang or grow, with many samples that raise, and with inexact positions.

    Args:
        worker_timeout: Seconds that a worker may take for one task before it is killed and replaced; `None`: no limit.
            Start-up may always take 60.
        worker_memory_limit: Bytes, or a text as `"8GiB"`, by which a worker's private memory may grow since its start
            before it is replaced, between two tasks; `None`: no limit. A worker whose stream could not be resumed (no
            state, no `allow_replay`) is not replaced.
        max_skipped_samples: The number of samples of an epoch that may raise before `TooManySkippedSamples`; `None`:
            any number.
        allow_replay: `True`: a stream without a state of its own is read again from its beginning to resume it, and
            batches that were delivered are dropped; `False`: such a state is refused.

    Raises:
        ValueError: a field is out of range.
    """

    worker_timeout: float | None = None
    worker_memory_limit: Size | None = None
    max_skipped_samples: int | None = 1000
    allow_replay: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class Tuning(_OptionObject):
    """Sizes of buffers and thread pools. The defaults follow the data; samples and their order never depend on these.

    Args:
        ring_bytes: Upper bound of each worker's ring in bytes, or as a text (`"512MB"`), at least 4096 a slot; `None`:
            it follows the batches seen. Larger batches then go through memory of their own, once each.
        reorder_window: Batches that may be ready before an earlier, slower one, with `seed`, as far as the rings have
            room.
        decode_threads: Threads in each worker for `decode`, where samples are awaited or fetched by threads; `0`: in
            the event loop, or in the thread that fetched.

    Raises:
        ValueError: a field is out of range.
    """

    ring_bytes: Size | None = None
    reorder_window: int = 16
    decode_threads: int = 1


@dataclass(frozen=True, kw_only=True, repr=False)
class DeviceOptions(_OptionObject):
    """How batches are delivered on the `device`.

    Args:
        device_prefetch: Batches that may be on the device, or on their way, before they are asked for.
        device_transform: A function from a batch on the device to the batch that is delivered. It runs in a thread and
            a stream of the loader, so it must not be a function of `torch.compile(mode="reduce-overhead")`.
        static_buffers: `True`: deliver every batch in the same tensors, for CUDA graphs; a batch is then valid until
            the next batch is taken. Each of the first 32 combinations of shapes has tensors of its own.

    Raises:
        ValueError, TypeError: a field is out of range.
    """

    device_prefetch: int = 1
    device_transform: Callable[[Any], Any] | None = None
    static_buffers: bool = False


OPTION_OBJECTS: dict[str, type[Any]] = {"recovery": Recovery, "tuning": Tuning, "device_options": DeviceOptions}
"""The constructor's arguments that are such objects, with their classes."""

for _kind in OPTION_OBJECTS.values():  # else it would be that of `__new__`
    _kind.__signature__ = inspect.Signature([*inspect.signature(_kind.__init__).parameters.values()][1:])

_OBJECT_OF = {field.name: name for name, kind in OPTION_OBJECTS.items() for field in dataclasses.fields(kind)}


_ELSEWHERE = {
    "bs": "batch_size",
    "drop_remainder": "drop_last",
    "num_replicas": "world_size",
    "prefetch": "prefetch_factor",
}
"""Names that other libraries give to options."""


def unknown_option(function: str, options: Iterable[str], known: Collection[str]) -> TypeError:
    """Return Python's error for the first argument that does not exist, with the right spelling and place of an option.

    Args:
        function: called with the options.
        options: names of the arguments.
        known: those that exist.
    """
    name = next(name for name in options if name not in known)
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{_instead(name, known)}")


def _instead(name: str, known: Collection[str]) -> str:
    from difflib import get_close_matches

    if name in _OBJECT_OF:
        kind = OPTION_OBJECTS[_OBJECT_OF[name]].__name__
        return f": it is a field of {kind}, so write {_OBJECT_OF[name]}={kind}({name}=...)"
    meant = get_close_matches(_ELSEWHERE.get(name, name), [*known, *_OBJECT_OF], n=1, cutoff=0.8)
    return "".join(
        f". Did you mean {each!r}?" if each in known else _instead(each, known).replace(": it", f": {each!r}", 1)
        for each in meant
    )


def _fields(given: Any) -> dict[str, Any]:
    return {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}


def flattened(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the fields of their option objects beside them, each under its own name.

    Raises:
        TypeError: an option object is something else.
    """
    flat = dict(arguments)
    for name, kind in OPTION_OBJECTS.items():
        if name in arguments:
            if not isinstance(arguments[name], kind):
                raise TypeError(
                    f"{name} should be an asyncloader.{kind.__name__}, but got {name}={arguments[name]!r}; for example "
                    f"{name}={kind.__name__}({next(iter(kind.__dataclass_fields__))}=...)"
                )
            flat |= _fields(arguments[name])
    return flat


def grouped(arguments: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The arguments with fields of option objects put into their objects.

    Args:
        arguments: by name; may contain both an object and its fields.
        defaults: where objects come from that `arguments` does not have. Default: objects with default fields.
    """
    whole = {name: value for name, value in arguments.items() if name not in _OBJECT_OF}
    for field in arguments.keys() & _OBJECT_OF.keys():
        name = _OBJECT_OF[field]
        before = whole.get(name, (defaults or {}).get(name)) or OPTION_OBJECTS[name]()
        whole[name] = dataclasses.replace(before, **{field: arguments[field]})
    return whole
