"""Gives each sample random numbers that depend only on (seed, epoch, position), whichever process loads it.

Data path: scheduler -> worker: [seeding] -> fetch -> collate. In seeded mode only; torch's own seeding of workers is in
`setup.py`.

A sample's *position* is its index in the epoch's global order, the same for every number of workers and ranks. Its key
is a 64-bit hash of (seed, epoch, position). The key seeds random numbers in two ways:

* The process-global generators (torch, `random`, numpy) are seeded before each sample. That is exact where samples are
  made one after the other: for a blocking dataset in its worker.
* `sample_rng` returns generators that belong to the current sample alone, through a context variable. That is exact
  everywhere, also where samples are made concurrently in coroutines and threads.

Sources: the step from position to key is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014) with its state jumped to the position.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
from collections.abc import Callable, Generator, Iterator
from contextvars import ContextVar
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from asyncloader.errors import warn_aside

BatchPosition: TypeAlias = int | tuple[int, ...]
"""The position of a batch's first sample, whose followers are its neighbours in the order; or of each sample."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

_random: Any = random._inst  # the process-global one
_random_in_c: Any = super(random.Random, _random)
# The C function that `random.seed` calls for an int, after looking at its argument's type three times.
_seed_random: Callable[[int], None] = _random_in_c.seed
_seed_numpy = np.random.seed
# Not torch.manual_seed, which also visits every accelerator: 1 against 105 microseconds.
_seed_torch: Callable[[int], Any] = torch.default_generator.manual_seed


def derive(seed: int, *words: int | str) -> int:
    """Return a 64-bit number derived from the seed and the words; the same on every machine and in every version."""
    text = "/".join(map(str, ("asyncloader", seed, *words)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def draw_device(generator: torch.Generator | None) -> torch.device:
    """Return where torch draws a number: at the generator's device, or else the default one. On "meta" there are no
    numbers: the CPU.
    """
    device = torch.get_default_device() if generator is None else generator.device
    return torch.device("cpu") if device.type == "meta" else device


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed as torch does, from the generator or the global one."""
    device = draw_device(generator)
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator).item())


class SampleRng:
    """The generators of one sample, each created on first use.

    They are independent of one another and of the process-global ones. Use one object per sample: a second one starts
    from the beginning again.
    """

    info: Any
    """The `WorkerInfo` that a worker thread has for this sample. Not set until the sample's code has asked for it."""

    def __init__(self, key: int) -> None:
        # Nothing else: this runs once per sample.
        self.key = key
        """The seed of the process-global generators where samples are made one after the other in a process."""

    @cached_property
    def torch(self) -> torch.Generator:
        """A CPU generator, for ``torch.rand(..., generator=...)``."""
        # 1, 2 and 3 keep the three generators apart: torch's and Python's have the same engine.
        return torch.Generator().manual_seed(_mix(self.key ^ 1))

    @cached_property
    def numpy(self) -> np.random.Generator:
        """A numpy generator (PCG64)."""
        return np.random.Generator(np.random.PCG64(self.key ^ 2))

    @cached_property
    def random(self) -> random.Random:
        """A generator of Python's `random` module."""
        return random.Random(_mix(self.key ^ 3))  # noqa: S311 - augmentation, not secrets


WORKERS_OWN: ContextVar[torch.Generator | None] = ContextVar("asyncloader_workers_own", default=None)
"""The generator of a worker thread, in place of torch's global one."""

_current: ContextVar[SampleRng | None] = ContextVar("asyncloader_sample_rng", default=None)


def current_sample() -> SampleRng | None:
    """Return the generators of the sample that is being made; None outside of one, and in torch mode."""
    return _current.get()


def sample_rng() -> SampleRng:
    """Return the current sample's own generators: ``sample_rng().torch``, ``.numpy``, ``.random``.

    For use in a dataset, in seeded mode: they depend only on the loader's seed, the epoch and the sample's position.
    Within one sample every call returns the same object, so its sequences continue. Works in coroutines, and in threads
    that run in the context (`asyncio.to_thread` does).

    Elsewhere (in torch mode, or for a sample fetched by hand) the generators are new ones, seeded by one draw from
    torch's global generator, or that of the worker thread: dataset code works unchanged, and follows
    `torch.manual_seed`.
    """
    current = _current.get()
    if current is not None:
        return current
    return SampleRng(int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=WORKERS_OWN.get()).item()))


class SampleSeeder:
    """Seeds the samples of one epoch.

    Args:
        seed: the loader's.
        epoch: the epoch's number.
        words: distinguish streams that number their own samples (those of an iterable dataset's workers).
        concurrent: samples are made concurrently; the process-global generators are not seeded.
    """

    __slots__ = ("_base", "_batch_base", "_collation_base", "_concurrent")

    def __init__(self, seed: int, epoch: int, *words: int | str, concurrent: bool = False) -> None:
        self._base = derive(seed, "sample", epoch, *words)
        self._batch_base = derive(seed, "batch", epoch, *words)
        self._collation_base = derive(seed, "collation", epoch, *words)
        self._concurrent = concurrent

    def sample(self, position: int) -> None:
        """Seed the code that makes the sample at `position`, in the current context."""
        self._begin((self._base + position * _GOLDEN) & _MASK)

    def each(self, first: int, step: int) -> Iterator[int]:
        """Yield `first`, ``first + step`` and so on without end. When a position is yielded, the code that makes its
        sample has been seeded, in the current context.
        """
        # `sample`, inlined: this runs once per sample. Adding a step saves the product with the position.
        word, word_step, concurrent, position = self._base + first * _GOLDEN, step * _GOLDEN, self._concurrent, first
        while True:
            word &= _MASK
            mixed = ((word ^ (word >> 30)) * _MIX_1) & _MASK
            mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _MASK
            _seed(mixed ^ (mixed >> 31), concurrent)
            yield position
            position += step
            word += word_step

    def batch(self, position: int) -> None:
        """Seed the code that fetches a whole batch, whose first sample has this position."""
        self._begin((self._batch_base + position * _GOLDEN) & _MASK)

    def collation(self, position: int) -> None:
        """Seed the user's collation of the batch whose first sample has this position."""
        self._begin((self._collation_base + position * _GOLDEN) & _MASK)

    def _begin(self, word: int) -> None:
        # `_mix`, inlined: this runs once per sample.
        word = ((word ^ (word >> 30)) * _MIX_1) & _MASK
        word = ((word ^ (word >> 27)) * _MIX_2) & _MASK
        _seed(word ^ (word >> 31), self._concurrent)


def _seed(key: int, concurrent: bool) -> None:
    """Make these the random numbers of the current sample; if it is not made concurrently, the global ones, too."""
    _current.set(SampleRng(key))
    if not concurrent:
        _seed_random(key)
        _random.gauss_next = None  # as `random.seed` does
        # torch takes the lower half, numpy the upper one: their engines are the same, and should not give the
        # same numbers.
        _seed_numpy(key >> 32)
        _seed_torch(key)


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * _MIX_1) & _MASK
    word = ((word ^ (word >> 27)) * _MIX_2) & _MASK
    return word ^ (word >> 31)


@contextlib.contextmanager
def global_generators_kept() -> Generator[None]:
    """Restore the process-global generators and the current sample afterwards: for loading in the caller's process."""
    outer = _current.get()
    states = random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
        _current.set(outer)


_BATCHES_BETWEEN_CHECKS = 64


class GlobalDrawCheck:
    """Warns once when concurrent samples draw from the process-global generators, which is not reproducible.

    The states are looked at after batches 1, 2, 4, ... 64, 128, 192, ...: that takes as long as making a small batch.
    """

    def __init__(self) -> None:
        self._before: tuple[Any, Any, Any] | None = generator_marks()
        self._batches, self._due = 0, 1

    def rebase(self) -> None:
        """Accept the draws since the last check."""
        if self._before is not None:
            self._before = generator_marks()

    def rebase_after_batch(self) -> None:
        """Accept the draws since the last check, after a batch whose collation drew: call it after each of them."""
        # Before the batch that is looked at; what comes before would be accepted then anyway.
        if self._batches + 1 >= self._due:
            self.rebase()

    def check(self) -> None:
        """After the samples of a batch: warn if anything was drawn since the last check."""
        if self._before is None:
            return
        self._batches += 1
        if self._batches < self._due:
            return
        self._due += min(self._due, _BATCHES_BETWEEN_CHECKS)
        now = generator_marks()
        names = [name for name, a, b in zip(("random", "numpy", "torch"), self._before, now, strict=True) if a != b]
        self._before = now
        if names:
            # One warning is enough; from here on the states are not compared any more.
            self._before = None
            warn_aside(
                f"A dataset drew from the process-global generators ({', '.join(names)}), but its "
                "samples are made concurrently, so these draws depend on timing. Use asyncloader.sample_rng().torch, "
                ".numpy or .random in the dataset.",
                stacklevel=2,
            )


def numpy_mark() -> Any:
    """Return a value that changes when numpy draws from its process-global generator."""
    state: Any = np.random.get_state(legacy=False)
    inner = state["state"]
    if "pos" not in inner:  # the program has set another generator than numpy's usual one
        return str(state)
    # Not all of the 624 words: each draw moves `pos`, or renews the words, and a normal draw may set `has_gauss`.
    return inner["pos"], int(inner["key"][0]), state["has_gauss"]


def generator_marks() -> tuple[Any, Any, Any]:
    """Return values that change when `random`, numpy or torch draws from its process-global generator."""
    torchs = torch.default_generator.get_state().numpy().tobytes()
    return hash(random.getstate()), numpy_mark(), hash(torchs)


class EpochSeeding:
    """Seeds the samples, batches and collations of one epoch.

    Args:
        samples: seeds samples; where they are made concurrently, in their contexts only.
        collation: seeds the global generators for the user's collation; None: it is not seeded.
        replicas: difference of the positions of neighbouring samples of a batch.
        check: warns when concurrent samples draw from the global generators; None where other code draws from them,
            too.
        keeps_generators: whether collation restores the global generators afterwards: where samples are made
            concurrently in the user's own process.
    """

    def __init__(
        self,
        samples: SampleSeeder,
        collation: SampleSeeder | None,
        replicas: int,
        check: GlobalDrawCheck | None = None,
        *,
        keeps_generators: bool = False,
    ) -> None:
        self.samples = samples
        self.replicas = replicas
        self._collation = collation
        self._check = check
        self._keeps_generators = keeps_generators

    def collated(self, collate: Callable[[Any], Any], position: BatchPosition, samples: Any) -> Any:
        """Collate these samples, which have this position."""
        first = position[0] if isinstance(position, tuple) else position
        if self._check is not None:
            # Before collation seeds the generators, which would hide what the samples drew.
            self._check.check()
        if self._collation is None:
            return collate(samples)
        if self._keeps_generators:
            with global_generators_kept():
                self._collation.collation(first)
                return collate(samples)
        self._collation.collation(first)
        try:
            return collate(samples)
        finally:
            # The seeding above, and what collation drew, are no draws of samples.
            if self._check is not None:
                self._check.rebase_after_batch()


# ------------------------------------------------------- the process-global generators' states, in torch mode

RngState: TypeAlias = tuple[Any, Any, bytes]
"""The states of `random`, numpy and torch."""


def rng_state() -> RngState:
    """Return the states of the process-global generators of `random`, numpy and torch."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes()


def set_rng_state(state: RngState) -> None:
    """Set the process-global generators to states that `rng_state` returned, perhaps in another process."""
    ours, numpys, torchs = state
    random.setstate(ours)
    np.random.set_state(numpys)
    # A bytearray: torch warns about memory that cannot be written, as that of bytes.
    torch.set_rng_state(torch.frombuffer(bytearray(torchs), dtype=torch.uint8))


def save_rng_state() -> bytes:
    """Return what `rng_state` returns, pickled."""
    return pickle.dumps(rng_state(), 5)


def restore_rng_state(saved: bytes) -> None:
    """Set the process-global generators to states that `save_rng_state` returned in another worker."""
    set_rng_state(pickle.loads(saved))
