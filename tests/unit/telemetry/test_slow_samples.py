"""The slowest samples of a process: what is timed, which names are kept, and readers that come in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from asyncloader.telemetry.slow_samples import CHEAP_S, SLOW_BYTES, SlowSamples, figures, joined


def names(first: int = 0) -> Callable[[int], str]:
    return lambda item: f"index {first + item}"


def noted(*batches: Sequence[float]) -> bytearray:
    """The memory behind batches whose samples took these seconds."""
    memory, first = bytearray(SLOW_BYTES), 0
    samples = SlowSamples(memory)
    for took in batches:
        samples.note(took, names(first), sum(took))
        first += len(took)
    return memory


def test_the_slowest_keep_their_names_and_all_are_counted() -> None:
    """However many come later that are quicker; a sample that is made again adds to its name."""
    memory = noted([0.3, 0.002, 0.2], [0.001] * 100, [0.12 - 0.001 * item for item in range(20)])
    SlowSamples(memory).note([0.5], lambda _: "index 0", 0.5)
    found = figures(memory)
    assert found.named.keys() == {"index 0", "index 2", *(f"index {103 + item}" for item in range(6))}
    assert found.named["index 0"] == pytest.approx((0.8, 2))
    assert sum(found.times) == 124
    assert sum(found.seconds) == pytest.approx(0.502 + 0.1 + 2.21 + 0.5)


def test_cheap_samples_are_not_timed_one_by_one() -> None:
    """The first are, as nothing is known of them; then not until they have become expensive on average."""
    samples = SlowSamples(memory := bytearray(SLOW_BYTES))
    assert samples.timing
    samples.note([CHEAP_S / 10] * 8, names(), CHEAP_S * 0.8)
    assert not samples.timing
    samples.note([1.0], lambda _: "index 8", CHEAP_S / 10)
    assert "index 8" not in figures(memory).named
    samples.passed(1, CHEAP_S * 100)
    assert samples.timing


def test_a_name_that_is_being_written_is_left_out() -> None:
    """A reader in between finds a slot without seconds, or odd bytes: it neither raises nor shows them."""
    memory = noted([0.3], [0.2])
    assert len(figures(memory).named) == 2
    memory[512:520] = bytes(8)
    assert figures(memory).named.keys() == {"index 1"}
    for byte in (0xFF, 0x07, 0x80):
        memory[512 + 80 :] = bytes([byte]) * (len(memory) - 592)
        assert all(name.isprintable() for name in figures(memory).named)


def test_long_names_are_cut() -> None:
    """Also within a character."""
    samples = SlowSamples(memory := bytearray(SLOW_BYTES))
    samples.note([0.1], lambda _: "é" * 100 + "\n", 0.1)
    samples.note([0.1], lambda _: "x" + "é" * 100, 0.1)
    assert {*figures(memory).named} == {"é" * 32, "x" + "é" * 31}


def test_the_figures_of_processes_add_up() -> None:
    """By name, as the workers of two epochs may have made the same sample."""
    both = joined([figures(noted([0.3, 0.1])), figures(noted([0.5]))])
    assert {*both.named} == {"index 0", "index 1"}
    assert both.named["index 0"] == pytest.approx((0.8, 2))
    assert sum(both.times) == 3
