"""Packs and reads the messages of a handshake, and a node's reports on its processes. Pure: no sockets.

Data path: loader -> [records] -> connection -> [records] -> node, and back.

Some of these messages are read before either side has proved that it has the token. So the reader makes numbers, texts,
bytes, lists, and named tuples of these with the fields of each message's type, and nothing else: no dictionary, no set,
no tensor, no type by its name. Other values (`msgpack_values.py`) are read only after the proof, and not by the node.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Meta

Name: TypeAlias = Annotated[str, Meta(max_length=300)]
"""A text that names something."""
Count: TypeAlias = Annotated[int, Meta(ge=0)]
"""An integer from 0 to 2**64 - 1."""

_T = TypeVar("_T")


class DatasetInfo(NamedTuple):
    """The kind and length of a dataset, with which a loader plans an epoch.

    Attributes:
        iterable: whether it is iterated.
        length: its length; None: it has no length.
        asynchronous: whether it is read on an event loop.
        stateful: whether it has a state of its own.
        shuffle: if the loader assigns its shards: samples that each worker shuffles together; else None.
        problem: why it cannot be served; empty: it can.
        streams: its number of fixed streams; None: it has none.
        shuffle_shards: of fixed streams, whether their shards are read in another order each epoch.
    """

    iterable: bool = False
    length: int | None = None
    asynchronous: bool = False
    stateful: bool = False
    shuffle: int | None = None
    problem: str = ""
    streams: Count | None = None
    shuffle_shards: bool = False

    def difference(self, planned: DatasetInfo) -> str:
        """Describe how this dataset differs from the dataset of the plan; empty: in nothing that a plan needs."""
        for name, mine, theirs in zip(self._fields, self, planned, strict=True):
            if mine != theirs and name != "problem":
                return f"its dataset has {name}={mine}, and the loader planned with {name}={theirs}"
        return ""


class DeathReport(NamedTuple):
    """A node's report to a loader that a process of its worker has died.

    Attributes:
        pid: its process id.
        exitcode: that of `WorkerDied`.
        reason: that of `WorkerDied`.
        trace: that of `WorkerDied`.
        blamed: whether it carried out a task of this worker connection, and of no other.
        shared: whether it may also have carried out a task of another worker connection.
    """

    pid: int
    exitcode: int | None
    reason: str
    trace: str
    blamed: bool
    shared: bool


def pack_record(record: Any) -> bytes:
    """Pack a named tuple of plain values. Characters of a text that are not valid Unicode are replaced.

    Raises:
        ValueError: it has an integer of more than 64 bits.
    """
    try:
        return msgspec.msgpack.encode(record)
    except UnicodeEncodeError:  # a path or an error's text may contain surrogates, and must not break the connection
        return msgspec.msgpack.encode(_valid(record))
    except OverflowError:
        raise ValueError("an integer of more than 64 bits cannot be sent to a service") from None


def _valid(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return [_valid(each) for each in value] if isinstance(value, list | tuple) else value


@cache  # making a decoder takes longer than reading a message
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def read_record(kind: type[_T], body: bytes) -> _T:
    """Read a message's body as this named tuple. Its annotations are the types and ranges of the fields.

    Raises:
        ValueError: the body is not such a record.
    """
    try:
        record: _T = _decoder(cast("Any", kind)).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        name = kind.__name__.strip("_").removesuffix("Message").upper()
        raise ValueError(f"broken stream: {name}: a body that cannot be read ({error!s:.200})") from None
    return record
