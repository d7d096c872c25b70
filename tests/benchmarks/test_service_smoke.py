"""The benchmark of the service: each kind moves its bytes, wrong ones are noticed, and like is compared with like."""

from __future__ import annotations

import pytest

from . import service
from .harness import JobFailed
from .service import BARE, BARE_TLS, KINDS, LOCAL, TCP, TLS, UNIX, Figure


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    # What TLS and UNIX have of their own takes twenty seconds each.
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind in (TLS, UNIX))) for kind in KINDS],
)
def test_each_kind_is_measured(kind: str) -> None:
    """In a process of its own, with every batch checked."""
    figure = service.run_apart(kind, 1 << 20, 1 << 25)
    assert figure.rate > 0
    assert figure.cpu >= 0


def test_wrong_bytes_end_the_measurement() -> None:
    """A batch that is cut, altered or missing is an error, not a number."""
    good = service.content(1000)
    bad = good.copy()
    bad[500] += 1
    for batches, text in [
        ([good, bad], "other bytes"),
        ([good[1:]], "other bytes"),
        ([good] * 5, "5 batches came, and 6"),
    ]:
        with pytest.raises(JobFailed, match=text):
            service._checked(iter(batches), 1000, 6)


def test_the_table_compares_with_the_right_one() -> None:
    """Ratios are medians of the rounds' ratios; figures that were not measured have no line."""
    rates = {
        BARE: [4.0, 2.0, 4.0],
        TCP: [2.0, 2.0, 3.0],
        BARE_TLS: [1.0] * 3,
        TLS: [0.5] * 3,
        LOCAL: [2.0] * 3,
        UNIX: [1.0] * 3,
    }
    results = {(kind, "1 MiB"): [Figure(rate, 1 / rate) for rate in found] for kind, found in rates.items()}
    lines = {line.split(" | ")[1]: line for line in service.table(results).splitlines()[2:]}
    assert set(lines) == set(rates)
    assert f"2.00 | 0.50 | {BARE} | **0.75** | 1.33 |" in lines[TCP]
    assert f"{BARE_TLS} | **0.50** | 2.00 |" in lines[TLS]
    assert f"{LOCAL} | **0.50** | 2.00 |" in lines[UNIX]
