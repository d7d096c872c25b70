"""A sampler that packs sequences of known lengths into rows of at most `max_tokens` tokens; and the dataset of rows.

Data path: bin_packing -> [sampler] -> scheduler -> pool -> worker: [sampler: `SequenceRows`] -> collate. The sampler
uses only the lengths; workers read the sequences.

The epoch's shuffled order is cut into windows. The sequences of a window are packed, those of each domain apart, and
the window's rows are shuffled among themselves. The remainder, less than a row of each domain, is packed with the
next window; after the last window it makes rows that are short. So a window depends on the windows before it: to find a
row, these are packed again.

The rows depend on the arguments alone, and will never change between versions, like the permutation.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, Subset

from asyncloader.packing.bin_packing import NOTHING, STRATEGIES, Slices, Strategy, pack, whole
from asyncloader.packing.collate import Sequences, cut
from asyncloader.samplers.argument_checks import check_lengths, check_positive, checksum
from asyncloader.samplers.permutation import Permutation
from asyncloader.samplers.seeded import EpochSampler
from asyncloader.samplers.surviving import Restarting
from asyncloader.workers.fetch.dataset_kinds import fetches_batches

OnTooLong = Literal["error", "skip", "truncate", "split"]
_CHOICES: tuple[str, ...] = get_args(OnTooLong)

Row: TypeAlias = tuple[int, ...] | tuple[tuple[int, int, int], ...]
"""A row's sequences: their indices; or slices ``(index, start, stop)``, tokens `start` to `stop` of a sequence."""

_ROWS_PER_WINDOW, _LEAST_WINDOW = 100, 1000


class _ShuffledEpoch(NamedTuple):
    """The values that choose an epoch's rows, beside the lengths and the arguments that stay.

    Attributes:
        seed: None: the order of the lengths, and the rows of a window in theirs.
        epoch: chooses another shuffle.
        drop_last: leave out the remainder after the last window.
    """

    seed: int | None
    epoch: int
    drop_last: bool


class PackingSampler(EpochSampler[Row]):
    """Rows of sequences of known lengths, of at most `max_tokens` tokens together. A row is a sample of `SequenceRows`.

    The order of (seed, epoch) is cut into windows, and the sequences of a window are packed. The remainder, less
    than a row, is packed with the next window. A window's rows are shuffled among themselves. Every token comes once in
    an epoch. The rows are a function of the arguments and the epoch alone: the same in every process, and an iteration
    can begin with any row, for which the windows before it are packed (about 1 s for a million sequences).

    A row is a tuple of indices. Where sequences may be cut (`slices`), it is a tuple of slices
    ``(index, start, stop)``: tokens `start` to `stop` of a sequence.

    Sequences without tokens are left out.

    Args:
        lengths: tokens of each sequence of the dataset, in its order: integers, 0 or more, shape ``(sequences,)``.
            Copied.
        max_tokens: most tokens of a row.
        seed: 0 to 2**64 - 1.
        strategy:
            ``"best_fit"`` (default): the longest sequences first, each to the fullest row that has room for it.
            ``"wrap"``: the sequences one after the other, cut where a row is full. All rows are full but the last.
        domains: label of each sequence, integers or strings, shape ``(sequences,)``: a row has sequences of one domain
            only. Default: all sequences are of one domain.
        on_too_long: for a sequence of more than `max_tokens` tokens: ``"error"`` raises, ``"skip"`` leaves it out of
            every epoch and counts it in `skipped`, ``"truncate"`` takes its first `max_tokens` tokens, and ``"split"``
            cuts it into rows and a rest that is packed. Default: ``"error"`` for ``"best_fit"``, else ``"split"``.
        shuffle: False takes the sequences in the order of the dataset, and a window's rows in the order in which they
            were begun. Default True.
        drop_last: leave out the remainder after the last window: of each domain, one row that is not full. Default
            False.
        window: sequences that are packed together. A larger window fills rows better. Default: about 100 rows by the
            mean length, and at least 1,000 sequences.

    Raises:
        TypeError: lengths are not integers.
        ValueError: a sequence is too long; or a length, a number, or an option is out of range.
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        max_tokens: int,
        seed: int,
        *,
        strategy: Strategy = "best_fit",
        domains: npt.ArrayLike | None = None,
        on_too_long: OnTooLong | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__(seed, shuffle)
        rule = rule_of(on_too_long, strategy)
        self.max_tokens = check_positive("max_tokens", max_tokens)
        self.strategy: Strategy = strategy
        self.drop_last = drop_last
        self.slices = strategy != "best_fit" or rule in ("truncate", "split")
        """Whether rows consist of slices, and not of indices."""
        given = _checked(lengths)
        labels = None if domains is None else _numbered(domains, len(given))
        too_long = given > self.max_tokens
        number = int(np.count_nonzero(too_long))
        if number and rule == "error":
            raise ValueError(_too_long(given, int(np.argmax(too_long)), number, self.max_tokens))
        self.skipped = number if rule == "skip" else 0
        """Number of sequences that are left out because they are too long."""
        kept = np.flatnonzero((given > 0) & ~too_long) if rule == "skip" else np.flatnonzero(given)
        if rule == "truncate" and number:  # otherwise the number of `max_tokens` may not fit the lengths' type
            given = np.minimum(given, self.max_tokens)
        self._kept = None if len(kept) == len(given) else kept.astype(np.min_scalar_type(len(given)))
        if self._kept is not None:
            given, labels = given[kept], None if labels is None else labels[kept]
        self._lengths = given.astype(np.min_scalar_type(int(given.max())) if len(given) else np.uint8)
        self._domains = labels
        mean = int(given.sum(dtype=np.int64)) // len(given) if len(given) else 1
        if window is None:
            self.window = max(_LEAST_WINDOW, _ROWS_PER_WINDOW * self.max_tokens // mean)
        else:
            self.window = check_positive("window", window)
        self._checksum = checksum(self._lengths, self._kept, labels)
        self._counted: tuple[_ShuffledEpoch, int] | None = None  # the number of an epoch's rows

    @property
    def order_arguments(self) -> dict[str, Any]:
        """The arguments from which the order of an epoch follows, as plain values, for a loader's state."""
        return {
            "strategy": self.strategy,
            "max_tokens": self.max_tokens,
            "slices": self.slices,
            "lengths or domains": self._checksum,
            "shuffle": bool(self.shuffle),
            "seed": self.seed if self.shuffle else None,
            "drop_last": bool(self.drop_last),
            "window": self.window,  # last: its default follows from the others, and an error names the first
        }

    def __len__(self) -> int:
        """The exact number of rows of the present epoch. It may differ from epoch to epoch."""
        return self._count(self._present())

    def iter_from(self, start: int) -> Iterator[Row]:
        """Return the present epoch's rows from number `start` on.

        Raises:
            ValueError: `start` is not between 0 and the number of rows.
        """
        epoch = self._present()
        if start and not 0 < start <= self._count(epoch):
            raise ValueError(f"start should be between 0 and {self._count(epoch)}, but got start={start}")
        return Restarting(lambda row: self._from(epoch, row), start)

    def _present(self) -> _ShuffledEpoch:
        return _ShuffledEpoch(self.seed if self.shuffle else None, self.epoch, self.drop_last)

    def _count(self, epoch: _ShuffledEpoch) -> int:
        """Return the number of an epoch's rows. Packs every window, once."""
        if self._counted is None or self._counted[0] != epoch:
            self._counted = epoch, sum(len(rows) for _, rows in self._windows(epoch))
        return self._counted[1]

    def _from(self, epoch: _ShuffledEpoch, row: int) -> Iterator[Row]:
        for number, rows in self._windows(epoch):
            if row < len(rows):
                for each in _shuffled(epoch, number, len(rows))[row:]:
                    yield self._row(rows[each])
            row = max(0, row - len(rows))

    def _row(self, slices: Slices) -> Row:
        indices = slices[:, 0] if self._kept is None else self._kept[slices[:, 0]]
        if self.slices:
            return tuple(zip(indices.tolist(), slices[:, 1].tolist(), slices[:, 2].tolist(), strict=True))
        return tuple(indices.tolist())

    def _windows(self, epoch: _ShuffledEpoch) -> Iterator[tuple[int, list[Slices]]]:
        """Yield the number of each window and its rows, in the order of their domains."""
        total = len(self._lengths)
        order = None if epoch.seed is None else Permutation(total, epoch.seed, epoch.epoch)
        left: dict[int, Slices] = {}
        for number, first in enumerate(range(0, total, self.window)):
            indices = np.arange(first, min(first + self.window, total))
            if order is not None:
                indices = order(indices)
            rows: list[Slices] = []
            for domain, own in self._by_domain(whole(self._lengths[indices], indices)):
                slices = np.concatenate([left.get(domain, NOTHING), own])
                packed, left[domain] = pack(slices, self.max_tokens, self.strategy)
                rows += packed
            if first + self.window >= total and not epoch.drop_last:
                rows += [rest for _, rest in sorted(left.items()) if len(rest)]
            yield number, rows

    def _by_domain(self, slices: Slices) -> Iterator[tuple[int, Slices]]:
        if self._domains is None:
            yield 0, slices
            return
        domains = self._domains[slices[:, 0]]
        order = np.argsort(domains, kind="stable")
        names, starts = np.unique(domains[order], return_index=True)
        yield from zip(names.tolist(), np.split(slices[order], starts[1:]), strict=True)

    def __repr__(self) -> str:
        return (
            f"<PackingSampler of {len(self._lengths)}, max_tokens={self.max_tokens}, strategy={self.strategy!r}, "
            f"seed={self.seed}, epoch={self.epoch}, shuffle={self.shuffle}, drop_last={self.drop_last}>"
        )


def _shuffled(epoch: _ShuffledEpoch, window: int, rows: int) -> list[int]:
    """Return the order of a window's rows."""
    if epoch.seed is None:
        return list(range(rows))
    key = b"".join(number.to_bytes(8, "little") for number in (epoch.seed, epoch.epoch, window))
    digest = hashlib.shake_256(b"asyncloader packing" + key).digest(8)
    order: list[int] = Permutation(rows, int.from_bytes(digest, "little"))(np.arange(rows)).tolist()
    return order


def rule_of(on_too_long: OnTooLong | None, strategy: Strategy) -> OnTooLong:
    """Return the rule for sequences that are too long, with its default for the strategy.

    Raises:
        ValueError: it, or the strategy, is unknown.
    """
    if str(strategy) in ("first_fit", "best_fit_wrap"):
        raise ValueError(
            f'strategy={strategy!r} was removed: "wrap" fills all rows, and "best_fit" nearly all without a cut'
        )
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy should be one of {STRATEGIES}, but got strategy={strategy!r}")
    if on_too_long not in (None, *_CHOICES):
        raise ValueError(f"on_too_long should be one of {_CHOICES}, but got on_too_long={on_too_long!r}")
    return on_too_long or ("error" if strategy == "best_fit" else "split")


def _checked(lengths: npt.ArrayLike) -> npt.NDArray[np.integer]:
    given = check_lengths(lengths, "sequence")
    if given.size and given[shortest := int(np.argmin(given))] < 0:
        raise ValueError(f"lengths should be 0 or more, but sequence {shortest} has length {given[shortest]}")
    return given


def _numbered(domains: npt.ArrayLike, number: int) -> npt.NDArray[np.integer] | None:
    """Return the number of each sequence's domain; None if all are of one."""
    labels = np.asarray(domains)
    if labels.shape != (number,):
        raise ValueError(f"domains should have one label a sequence, shape ({number},), but got shape {labels.shape}")
    names, numbers = np.unique(labels, return_inverse=True)
    return numbers.astype(np.min_scalar_type(len(names))) if len(names) > 1 else None


def _too_long(lengths: npt.NDArray[np.integer], first: int, number: int, max_tokens: int) -> str:
    return (
        f"sequence {first} has {lengths[first]} tokens, which is more than max_tokens={max_tokens}; {number} of "
        f"{len(lengths)} sequences are too long, and the longest has {lengths.max()}. Raise max_tokens, or choose "
        'on_too_long="truncate", "split" or "skip".'
    )


class SequenceRows(Subset[Any]):
    """The rows of a dataset's sequences. Its indices are rows, as `PackingSampler` gives them; a sample is a row.

    The sequences of a row are read one after the other; by one call of `__getitems__`, if the dataset has its own; or,
    if the dataset is asynchronous, all at the same time. In seeded mode they share the random numbers of their row. A
    sequence that raises is an error of its row, which `on_error` skips or replaces.

    A slice reads its whole sequence and cuts it. A dataset that can read parts (a memory-mapped file) may take rows as
    its indices itself, and return a list of sequences, without `SequenceRows`.

    Args:
        dataset: a map dataset of sequences as `PackSequences` takes them, with a length, and `__getitem__` or
            `__getitems__`, which may be asynchronous.
    """

    # A Subset, because loaders know that it enters the contexts, and awaits the samples, of the dataset within.

    def __init__(self, dataset: Dataset[Any]) -> None:
        super().__init__(dataset, range(len(dataset)))  # type: ignore[arg-type]

    @property
    def __getitems__(self) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        """None: rows are read one by one."""
        return

    def __getitem__(self, index: Row) -> Any:
        """Return the list of a row's sequences; or an awaitable of it, if the dataset is asynchronous.

        Raises:
            TypeError, ValueError: an object is no sequence, or has fewer than `stop` tokens.
        """
        numbers = [each if isinstance(each, int) else each[0] for each in index]
        if fetches_batches(self.dataset):
            found = self.dataset.__getitems__(numbers)  # type: ignore[attr-defined]
        else:
            found = [self.dataset[number] for number in numbers]
        if inspect.isawaitable(found) or any(map(inspect.isawaitable, found)):
            return _await(found, index)
        return _cut(found, index)


async def _await(found: Any, row: Row) -> Sequences:
    if inspect.isawaitable(found):
        found = await found
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_result(each)) for each in found]
    except ExceptionGroup as errors:
        # The first that was raised: as where one sequence is read after the other.
        raise errors.exceptions[0] from None
    return _cut([task.result() for task in tasks], row)


async def _result(sequence: Any) -> Any:
    return await sequence if inspect.isawaitable(sequence) else sequence


def _cut(found: Sequence[Any], row: Sequence[Any]) -> Sequences:
    return Sequences(
        sequence if isinstance(each, int) else cut(sequence, *each[1:])
        for sequence, each in zip(found, row, strict=True)
    )
