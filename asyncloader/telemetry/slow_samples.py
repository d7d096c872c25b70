"""Times single samples, and keeps the names of the slowest, in memory that other processes may read at any time. Pure.

Data path: fetchers -> [slow_samples] -> statistics -> run_figures -> diagnosis.

Samples that cost next to nothing are not timed one by one: the fetchers ask `timing`. The others are counted by octaves
of their time, and the slowest have a slot each with their name. One thread of one process writes; a reader that comes
in between leaves out the slot that is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import frexp
from struct import Struct
from typing import Any, NamedTuple

CHEAP_S = 100e-6
"""Samples that take less than this on average are not timed: timing takes some 0.7 us for each."""

_OCTAVES = 32
_SLOTS = 8
_NAME_BYTES = 64
_SLOT = Struct(f"<dd{_NAME_BYTES}s")  # seconds, times, name
_VALUES = Struct("<dd")
_COUNTED = 8 * 2 * _OCTAVES
_LARGE_SHARE = 0.1
_FEW = 16  # at most one of this number of samples is slow
_SHOWN = 4

SLOW_BYTES = _COUNTED + _SLOTS * _SLOT.size
"""Size of a process's part."""


class SlowFigures(NamedTuple):
    """The counts of single samples, and the slowest by name.

    Attributes:
        seconds: by octave: of samples that took from ``2**(octave - 1)`` to ``2**octave`` microseconds.
        times: how many there were, by octave.
        named: the slowest: for each name its seconds, and how often it was made.
    """

    seconds: Sequence[float]
    times: Sequence[float]
    named: Mapping[str, tuple[float, float]]


NO_SAMPLES = SlowFigures((0.0,) * _OCTAVES, (0.0,) * _OCTAVES, {})


class SlowSamples:
    """The slowest samples of one process.

    Args:
        memory: a writable buffer of `SLOW_BYTES`: zeros, or what another object has counted, which goes on from there;
            None: private memory.
    """

    __slots__ = ("_known", "_least", "_memory", "_octaves", "fetched", "fetched_s")

    def __init__(self, memory: Any = None) -> None:
        self._memory = memoryview(bytearray(SLOW_BYTES) if memory is None else memory)[:SLOW_BYTES]
        self._octaves = self._memory[:_COUNTED].cast("d")
        found = figures(self._memory).named.items()
        # By name: slot, seconds and times.
        self._known = {name: (slot, seconds, times) for slot, (name, (seconds, times)) in enumerate(found)}
        self._least = 0.0  # mean seconds of the quickest sample that has a slot, if none is free
        self.fetched = 0
        """Samples that were made so far, in the process that makes them."""
        self.fetched_s = 0.0
        """Seconds of that."""

    @property
    def timing(self) -> bool:
        """Whether the next samples are to be timed one by one. The first samples are."""
        return self.fetched_s >= CHEAP_S * self.fetched

    def passed(self, number: int, seconds: float) -> None:
        """Count samples that were not timed one by one."""
        self.fetched += number
        self.fetched_s += seconds

    def note(self, seconds: Sequence[float], name: Callable[[int], str], passed: float) -> None:
        """Count samples; also one by one, if they are to be timed.

        Args:
            seconds: that each took.
            name: returns that of a sample, by its number in `seconds`; empty: no name is known.
            passed: seconds that all of them took.
        """
        timing = self.timing
        self.passed(len(seconds), passed)
        if not timing:
            return
        octaves = self._octaves
        for item, took in enumerate(seconds):
            octave = min(_OCTAVES - 1, max(0, frexp(took * 1e6)[1]))
            octaves[octave] += took
            octaves[_OCTAVES + octave] += 1.0
            if took > self._least and (known := name(item)):
                self._keep(known, took)

    def _keep(self, name: str, took: float) -> None:
        known = self._known
        if name in known:
            slot, seconds, times = known[name]
        else:
            slot, seconds, times = len(known), 0.0, 0.0
            if slot == _SLOTS:
                slot = known.pop(min(known, key=self._mean))[0]
        known[name] = slot, seconds + took, times + 1
        offset = _COUNTED + slot * _SLOT.size
        # A slot without seconds is empty for a reader that comes in between.
        _VALUES.pack_into(self._memory, offset, 0.0, 0.0)
        _SLOT.pack_into(self._memory, offset, 0.0, times + 1, name.encode(errors="replace")[:_NAME_BYTES])
        _VALUES.pack_into(self._memory, offset, seconds + took, times + 1)
        if len(known) == _SLOTS:
            self._least = min(map(self._mean, known))

    def _mean(self, name: str) -> float:
        _, seconds, times = self._known[name]
        return seconds / times


def figures(memory: Any) -> SlowFigures:
    """Return the counts so far. Any process.

    Args:
        memory: a buffer that a `SlowSamples` of this process or another writes.
    """
    # Twice: a name that is being written differs.
    once, again = bytes(memory), bytes(memory)
    counted = memoryview(again)[:_COUNTED].cast("d").tolist()
    named = {}
    for slot, other in zip(*(_SLOT.iter_unpack(each[_COUNTED:]) for each in (once, again)), strict=True):
        text = slot[2].rstrip(b"\0").decode(errors="ignore")  # it may be cut within a character
        if slot == other and slot[0] > 0.0 and slot[1] >= 1.0 and text.isprintable():
            named[text] = slot[0], slot[1]
    return SlowFigures(counted[:_OCTAVES], counted[_OCTAVES:], named)


def joined(found: Iterable[SlowFigures]) -> SlowFigures:
    """Add up the figures of several processes. Of the names the slowest are kept."""
    seconds, times, named = [0.0] * _OCTAVES, [0.0] * _OCTAVES, dict[str, tuple[float, float]]()
    for each in found:
        seconds = [one + other for one, other in zip(seconds, each.seconds, strict=True)]
        times = [one + other for one, other in zip(times, each.times, strict=True)]
        for name, (took, made) in each.named.items():
            before = named.get(name, (0.0, 0.0))
            named[name] = before[0] + took, before[1] + made
    kept = sorted(named.items(), key=lambda pair: -pair[1][0] / pair[1][1])[:_SLOTS]
    return SlowFigures(seconds, times, dict(kept))


def slowest(found: SlowFigures, delayed_s: float) -> tuple[dict[str, float], str]:
    """Judge whether few samples take a large share of the time: each four times as long as half of all, or longer.

    Args:
        found: the counts. A sample that is made in several epochs counts in each.
        delayed_s: seconds for which the processes had to wait for CPUs: that is not the samples' fault.

    Returns:
        The number of the slow samples and their share in the time of all, and a sentence with the slowest; both empty
        without such samples.
    """
    of, whole = sum(found.times), sum(found.seconds)
    # From four times the upper end of the octave that has the median.
    first = 3 + next((octave for octave, sofar in enumerate(accumulate(found.times)) if 2 * sofar >= of), 0)
    number, seconds = sum(found.times[first:]), sum(found.seconds[first:])
    if not 0 < number <= of / _FEW or seconds < max(_LARGE_SHARE * whole, delayed_s / 2):
        return {}, ""
    means = sorted(((took / made, name, made) for name, (took, made) in found.named.items()), reverse=True)
    named = [each for each in means if each[0] > means[0][0] / 2][:_SHOWN]
    words = ", ".join(f"{name} ({in_words(mean)})" for mean, name, _ in named)
    more = "" if sum(made for *_, made in named) >= number else " and others"
    few, verb = ("1 sample", "takes") if number == 1 else (f"{number:.0f} samples", "take")
    text = f" {few} of {of:.0f} {verb} {seconds / whole:.0%} of the samples' time: {words}{more}."
    return {"slow_samples": number, "slow_samples_frac": seconds / whole}, text


def in_words(seconds: float) -> str:
    """Return a time with its unit."""
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
