"""Batch samplers that group samples of similar length, by number or by tokens.

Data path: batch_plan -> [by_length] -> scheduler -> pool -> worker. It uses only the lengths; workers read the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from asyncloader.samplers.argument_checks import check_lengths, check_positive, checksum
from asyncloader.samplers.batch_plan import BatchPlan, Limits
from asyncloader.samplers.seeded import EpochSampler
from asyncloader.samplers.surviving import Restarting

_BATCHES_PER_WINDOW = 100


class _LengthBatchSampler(EpochSampler[list[int]]):
    """Base of both samplers: a plan per epoch, and the indices of the planned samples."""

    _kept: npt.NDArray[np.integer] | None = None
    """The index of each planned sample. None: all samples are planned."""

    def __init__(
        self,
        lengths: npt.NDArray[np.integer],
        limits: Limits,
        seed: int,
        *,
        shuffle: bool,
        drop_last: bool,
        window: int,
        ranks: int,
    ) -> None:
        super().__init__(seed, shuffle)
        self.drop_last = drop_last
        self.window = window
        self.ranks = ranks
        self._lengths = lengths
        self._limits = limits
        self._checksum = checksum(lengths, self._kept)
        self._planned: BatchPlan | None = None

    @property
    def order_arguments(self) -> dict[str, Any]:
        """The arguments from which the order of an epoch follows, as plain values, for a loader's state."""
        return {
            "lengths": self._checksum,
            **dataclasses.asdict(self._limits),
            "shuffle": bool(self.shuffle),
            "seed": self.seed if self.shuffle else None,
            "drop_last": bool(self.drop_last),
            "ranks": self.ranks,
            "window": self.window,  # last: its default follows from the others, and an error names the first
        }

    def __len__(self) -> int:
        """The exact number of batches of the present epoch. It may differ from epoch to epoch."""
        return len(self._plan())

    def iter_from(self, start: int) -> Iterator[list[int]]:
        """Return the present epoch's batches from number `start` on. Earlier batches are counted, at most, and not
        made.

        Raises:
            ValueError: `start` is not between 0 and the number of batches.
        """
        plan = self._plan()
        if start < 0 or plan.find(start) is None:
            raise ValueError(f"start should be between 0 and {len(plan)}, but got start={start}")
        return Restarting(lambda batch: self._from(plan, batch), start)

    def _from(self, plan: BatchPlan, start: int) -> Iterator[list[int]]:
        window, skipped = plan.find(start) or (plan.windows, 0)
        for number in range(window, plan.windows):
            for offset, batch in enumerate(plan.batches(number)):
                if number > window or offset >= skipped:
                    yield (batch if self._kept is None else self._kept[batch]).tolist()

    def _plan(self) -> BatchPlan:
        """Return the present epoch's plan. It is kept, because it has the counts of its windows' batches."""
        seed = self.seed if self.shuffle else None
        plan = self._planned
        if plan is None or (plan.seed, plan.epoch, plan.drop_last) != (seed, self.epoch, self.drop_last):
            plan = BatchPlan(self._lengths, self._limits, self.window, self.drop_last, seed, self.epoch, self.ranks)
            self._planned = plan
        return plan

    def _description(self) -> str:
        text = f"seed={self.seed}, epoch={self.epoch}, shuffle={self.shuffle}, drop_last={self.drop_last}"
        return text if self.ranks == 1 else f"{text}, ranks={self.ranks}"


class BucketBatchSampler(_LengthBatchSampler):
    """Batches of `batch_size` samples of similar lengths, so that little is padded.

    Windows, order and arguments are as of `TokenBudgetBatchSampler`, but for these:

    Args:
        batch_size: samples of a batch. Only the last batch of an epoch may have fewer.
        drop_last: leave out the last batch if it has fewer samples. With `shuffle`, it may be of any length.
        window: samples that are sorted together, rounded up to whole batches, the same number for each rank. Default:
            100 batches.
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        window: int | None = None,
        ranks: int = 1,
    ) -> None:
        batch_size, ranks = check_positive("batch_size", batch_size), check_positive("ranks", ranks)
        batches = _BATCHES_PER_WINDOW if window is None else -(-check_positive("window", window) // batch_size)
        super().__init__(
            _compact(lengths),
            Limits(max_batch_size=batch_size),
            seed,
            shuffle=shuffle,
            drop_last=drop_last,
            window=-(-batches // ranks) * ranks * batch_size,
            ranks=ranks,
        )
        self.batch_size = batch_size

    @property
    def order_arguments(self) -> dict[str, Any]:
        """As of both samplers; under their names here."""
        found = super().order_arguments
        return {"batch_size": found.pop("max_batch_size")} | found

    def __repr__(self) -> str:
        return f"<BucketBatchSampler of {len(self._lengths)}, batch_size={self.batch_size}, {self._description()}>"


class TokenBudgetBatchSampler(_LengthBatchSampler):
    """Batches of samples of similar lengths, up to a number of tokens: few long samples, or many short samples.

    A batch counts as its longest length times its samples, its size once it is padded. The order of (seed, epoch) is
    cut into windows. Each window is sorted by length and cut into batches, which are shuffled among themselves; within
    a batch the longest sample comes first. Every sample comes once in an epoch. The batches are a function of the
    arguments and the epoch alone: the same in every process, and an iteration can begin with any batch.

    A larger window fills batches better and pads less, and is less random: a batch in each window may be filled in
    part. It takes memory, besides the lengths, each in the number of bytes that the longest length needs (and the
    indices of the remaining samples, if some are skipped).

    Args:
        lengths: of each sample of the dataset, in its order: positive integers, shape ``(samples,)``. Copied.
        max_tokens: most tokens of a batch.
        seed: 0 to 2**64 - 1.
        padding: False counts the sum of a batch's lengths, for models that take samples of all lengths without
            padding. Then nothing is sorted: a batch is a piece of the shuffled order. Default True.
        pad_to: lengths count as their next multiple of this, for a collation that pads to it. Default 1.
        max_batch_size: most samples of a batch. Default: no limit.
        shuffle: False takes the windows in the order of the dataset and leaves their batches in order, the longest
            first. Default True.
        drop_last: leave out the last batch of the epoch if another sample like its longest would fit. With `shuffle`,
            it may be of any length. Default False.
        window: samples that are sorted together. Default: about 100 batches, by the mean length.
        ranks: number of ranks that take a batch each at a step: these batches have similar lengths, too, so that no
            rank waits for a batch with more, or longer, samples. The loader gives each rank its own. A run that
            continues with another number of ranks must keep this argument, or its order changes. Default 1.
        on_too_long: for a sample that is longer than `max_tokens`: ``"error"`` (default) raises, ``"skip"`` leaves it
            out of every epoch and counts it in `skipped`.

    Raises:
        TypeError: lengths are not integers.
        ValueError: a sample is too long; or a length, a size, or the seed is out of range.
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        max_tokens: int,
        seed: int,
        *,
        padding: bool = True,
        pad_to: int = 1,
        max_batch_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        window: int | None = None,
        ranks: int = 1,
        on_too_long: Literal["error", "skip"] = "error",
    ) -> None:
        max_tokens, pad_to = check_positive("max_tokens", max_tokens), check_positive("pad_to", pad_to)
        ranks = check_positive("ranks", ranks)
        if max_batch_size is not None:
            max_batch_size = check_positive("max_batch_size", max_batch_size)
        if window is not None:
            window = check_positive("window", window)
        if on_too_long not in ("error", "skip"):
            raise ValueError(f'on_too_long should be "error" or "skip", but got on_too_long={on_too_long!r}')
        known = _compact(lengths)
        too_long = known > max_tokens // pad_to * pad_to
        self.skipped = int(np.count_nonzero(too_long))
        """Number of samples that are left out because they are too long."""
        if self.skipped:
            if on_too_long == "error":
                first, padded = int(np.argmax(too_long)), f" (padded to a multiple of {pad_to})" if pad_to > 1 else ""
                raise ValueError(
                    f"sample {first} has length {known[first]}{padded}, which is more than max_tokens={max_tokens}; "
                    f"{self.skipped} of {len(known)} samples are too long, and the longest has {known.max()}. Raise "
                    'max_tokens, cut the samples, or leave them out with on_too_long="skip".'
                )
            kept = np.flatnonzero(~too_long)
            self._kept = kept.astype(np.min_scalar_type(len(known)))
            known = known[kept]
        if window is None:
            mean_size = max_tokens * len(known) // max(1, int(known.sum(dtype=np.int64)))
            window = _BATCHES_PER_WINDOW * max(1, min(mean_size, max_batch_size or mean_size))
        super().__init__(
            known,
            Limits(max_batch_size=max_batch_size, max_tokens=max_tokens, pad_to=pad_to, padding=bool(padding)),
            seed,
            shuffle=shuffle,
            drop_last=drop_last,
            window=window,
            ranks=ranks,
        )
        self.max_tokens = max_tokens

    def __repr__(self) -> str:
        return f"<TokenBudgetBatchSampler of {len(self._lengths)}, max_tokens={self.max_tokens}, {self._description()}>"


def _compact(lengths: npt.ArrayLike) -> npt.NDArray[np.integer]:
    """Return a checked, read-only copy of the lengths, each in the number of bytes that the longest length needs."""
    given = check_lengths(lengths, "sample")
    if not given.size:
        return given
    shortest = int(np.argmin(given))
    if given[shortest] < 1:
        raise ValueError(
            f"lengths should be positive, but sample {shortest} has length {given[shortest]}. "
            "If empty samples are meant, count them as 1."
        )
    kept = given.astype(np.min_scalar_type(int(given.max())), copy=True)
    kept.flags.writeable = False
    return kept
