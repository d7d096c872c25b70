"""`PackedLoader`: rows of packed sequences from a loader of sequences whose lengths are known once they are read.

Data path: ring -> windows -> [packed_loader] -> training loop.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

from asyncloader.base.topology import Topology, topology
from asyncloader.errors import StateError
from asyncloader.packing.collate import PackSequences
from asyncloader.packing.windows import RowPosition, Window, WindowPacker
from asyncloader.workers.fetch.error_pickle import hide_our_frames

B = TypeVar("B")

_VERSION = 1
_KEYS = {"version", "loader", "carried", "delivered", "batch_size", "rank", "world_size"}
_ORDER = ("streams", "shuffle_buffer", "shuffle_shards")  # of fixed streams
_PACKING = {"max_tokens", "strategy", "domain"}
_NOT_IN_EARLIER = {"packing", *_ORDER}


class PackedLoader:
    """The rows of a loader whose ``collate_fn`` is a `JoinSequences`: for sequences of a stream, above all.

    Each batch of the loader is a window: its sequences are packed into rows of at most `max_tokens` tokens. So the
    loader's ``batch_size`` is the number of sequences that are packed together: 1,000, say. The remainder of a
    window is packed with the next window, and with no later one. The rows follow from the loader's batches alone.

    Iterate it with ``for``, or with ``async for`` over an `AsyncDataLoader`. Each rank packs its own sequences, so the
    ranks have different numbers of rows, and a state belongs to its rank. Open and close the loader itself.

    A row is what `PackSequences` makes of it, on the device of the loader's batches.

    The loader's epoch is over with its last window: after a loop that is left within the rows of that one, the next
    loop begins the next epoch, unless a state is loaded.

    Args:
        loader: with ``batch_size=`` and ``collate_fn=JoinSequences(...)``.
        drop_last: leave out the remainder of the last window, a row that is not full. Default False.
        pad_to, pad_values: as of `PackSequences`.

    Raises:
        TypeError: the loader has no `state_dict`.
    """

    def __init__(
        self,
        loader: Any,
        *,
        drop_last: bool = False,
        pad_to: int | None = None,
        pad_values: Mapping[str, float] | None = None,
    ) -> None:
        if not hasattr(loader, "state_dict"):
            raise TypeError(
                f"PackedLoader reads a loader of asyncloader, whose state it keeps, but got {type(loader).__module__}."
                f"{type(loader).__name__}; DataLoader.from_torch(loader) makes one"
            )
        self.loader = loader
        self.drop_last = drop_last
        self._collate = PackSequences(pad_to=pad_to, pad_values=pad_values)
        self._packer: WindowPacker | None = None  # of the newest iterator, until its epoch ends
        self._loaded: dict[str, Any] = {}
        self._taken: dict[str, Any] = {}  # the loaded state from which that iterator began

    def __getstate__(self) -> dict[str, Any]:
        # A copy reads a loader of its own, which begins, or goes on from a loaded state, with the copy's iterator.
        return {**vars(self), "loader": copy.copy(self.loader), "_packer": None}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._load_again()
        batches = iter(self.loader)
        return _SyncRows(self, batches, self._begin())

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        self._load_again()
        batches = aiter(self.loader)
        return _AsyncRows(self, batches, self._begin())

    def _load_again(self) -> None:
        """Load the state of an iterator that was asked for its first row and could not pack a window."""
        if self._packer is not None and self._packer.unbegun and self._taken:
            self.load_state_dict(self._taken)

    def state_dict(self) -> dict[str, Any]:
        """The newest iterator's position, at a row: a new dictionary of plain values. Between epochs: the next epoch.

        It has the loader's state before a window, and numbers: how many rows of the window were delivered, and which
        sequences of the window before are packed with it; and the options of the packing. On resuming, at most two
        windows are read again. Empty if the loader's is.

        Raises:
            StateError: the loader has no exact position.
        """
        if self._packer is not None:
            position = self._packer.position
        else:
            position = RowPosition(self.loader.state_dict(), [], 0, None)
            if loaded := self._resumed(position.state):
                return copy.deepcopy(loaded)
        if not position.state:
            return {}
        return {
            "version": _VERSION,
            "loader": copy.deepcopy(position.state),
            "carried": copy.deepcopy(position.carried),
            "delivered": position.delivered,
            "packing": position.options,
            **self._described(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at this position with the next iteration, unless the loader's `set_epoch` chooses another epoch first.
        An empty dictionary resets the position. Of `JoinSequences`, `max_tokens`, `strategy` and whether it has a
        `domain` must be as before: they are compared when the first window comes, which raises the StateError.

        Raises:
            StateError: the state is damaged, of another version, of a loader with another ``batch_size`` or other
                options of fixed streams, or of another rank or number of ranks; or the loader refuses its part. The
                text says what to do.
        """
        if state_dict:
            _check(state_dict, self._described())
        self.loader.load_state_dict(state_dict["loader"] if state_dict else {})
        self._loaded = copy.deepcopy(state_dict)
        self._packer = None

    def _described(self) -> dict[str, Any]:
        """Return the values that must be the same where a state is loaded. In another order, also in one that
        ``elastic="set"`` allows, the windows are others.
        """
        spec = getattr(self.loader, "_spec", self.loader)
        here = topology(spec) if hasattr(spec, "_asyncloader_options") else Topology(0, 1)
        dataset: Any = getattr(spec, "dataset", None)
        order = dataset.described() if hasattr(type(dataset), "plan_streams") else {}
        numbers = {"batch_size": getattr(self.loader, "batch_size", None), **here._asdict()}
        return numbers | {name: order.get(name) for name in _ORDER}

    def _resumed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the loaded state; empty without one, or if the loader, of this state, begins another epoch."""
        loaded = self._loaded
        return loaded if loaded and loaded["loader"].get("epoch") == state.get("epoch") else {}

    def _begin(self) -> WindowPacker:
        state = self.loader.state_dict()
        self._taken, self._loaded = self._resumed(state), {}
        loaded = self._taken
        position = RowPosition(state, loaded.get("carried", []), loaded.get("delivered", 0), loaded.get("packing"))
        self._packer = WindowPacker(self._collate, position, drop_last=self.drop_last)
        return self._packer


class _Rows(Generic[B]):
    def __init__(self, owner: PackedLoader, batches: B, packer: WindowPacker) -> None:
        self._owner = owner
        self._batches = batches
        self._packer = packer
        self._read: list[Window] = []  # taken from the loader, and not packed; one at most
        self._state: Any = None  # the loader's, before that window

    def _is_over(self) -> bool:
        """Whether no window follows. Called where the rows of the window were delivered."""
        self._packer.asked = True
        if self._packer.over and self._owner._packer is self._packer:
            self._owner._packer = None
        return self._packer.over


class _SyncRows(_Rows[Iterator[Window]], Iterator[dict[str, Any]]):
    def __next__(self) -> dict[str, Any]:
        packer = self._packer
        while (row := packer.row()) is None:
            if self._is_over():
                raise StopIteration
            if not self._read:
                self._state = self._owner.loader.state_dict()
                try:
                    # In C: a window that was taken is in the list, whenever Ctrl-C comes.
                    self._read.extend(islice(self._batches, 1))
                except BaseException as error:
                    hide_our_frames(error)  # this one refers to the iterator, which may keep the error
                    raise
            packer.add(self._state, self._read)
        packer.delivered += 1
        return row


class _AsyncRows(_Rows[AsyncIterator[Window]], AsyncIterator[dict[str, Any]]):
    async def __anext__(self) -> dict[str, Any]:
        packer = self._packer
        while (row := packer.row()) is None:
            if self._is_over():
                raise StopAsyncIteration
            if not self._read:
                state = self._owner.loader.state_dict()
                try:
                    window = await anext(self._batches, None)
                except BaseException as error:
                    hide_our_frames(error)
                    raise
                self._state, self._read = state, [] if window is None else [window]
            packer.add(self._state, self._read)
        packer.delivered += 1
        return row


def _check(state: Any, here: dict[str, Any]) -> None:
    if not isinstance(state, dict) or not _KEYS <= state.keys() <= _KEYS | _NOT_IN_EARLIER:
        raise StateError("the state is damaged, or not of a PackedLoader")
    if state["version"] != _VERSION:
        raise StateError(f"the state has version {state['version']!r:.100}, but this asyncloader knows {_VERSION}")
    carried, delivered = state["carried"], state["delivered"]
    packing = state.get("packing")
    if (
        type(delivered) is not int
        or delivered < 0
        or not isinstance(state["loader"], dict)
        or not isinstance(carried, list)
        or not all(map(_is_slice, carried))
        or not (packing is None or (isinstance(packing, dict) and packing.keys() == _PACKING))
    ):
        raise StateError("the state is damaged: its rows, its sequences, its loader or its options cannot be read")
    for name, value in here.items():
        if name in state and state[name] != value:
            raise StateError(
                f"the state was saved with {name}={state[name]!r:.100}, but this loader has {name}={value!r}: windows, "
                f"and so rows, would be others; use {name}={state[name]!r:.100}, or begin anew without the state"
            )


def _is_slice(value: Any) -> bool:
    if not isinstance(value, list) or [type(number) for number in value] != [int] * 3:
        return False
    sequence, start, stop = value
    return bool(0 <= sequence < 1 << 62 and 0 <= start < stop < 1 << 62)
