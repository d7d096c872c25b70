"""Differential fuzz: whatever the samples and the collation, our batches are torch's, to the stride and the flag.

500 cases with ``--all``. For 20,000, and from other numbers, in some minutes:

    export ASYNCLOADER_FUZZ_CASES=20000 ASYNCLOADER_FUZZ_SEED=7
    make test ARGS="--timeout=0 tests/property/test_fuzz_against_torch.py"

A failure names the case; `Cases(seed, collate)[index]` makes its samples again.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader import DataLoader
from tests.drawn import scaled
from tests.helpers.comparing import assert_same
from tests.helpers.running import PATIENCE_S
from tests.property.fuzz_cases import COLLATES, Cases, Record, batch_of

CASES = int(os.environ.get("ASYNCLOADER_FUZZ_CASES") or scaled(500))
SEED = int(os.environ.get("ASYNCLOADER_FUZZ_SEED") or 0)

HELD = 12
"""Batches that are held while more batches are made: then some are copied out, and none may change."""

ONLY_TORCHS = (
    "negative strides",
    "don't support automatic differentiation",
    "DispatchKey Conjugate",
    "has no attribute 'numel'",
    "storage that is not resizable",
)
"""Errors of torch's collation in a worker that ours does not raise: it stacks such samples or, for the last two, raises
the clearer error of collation in the main process.
"""

PLACES = {
    "no workers, default": 2,
    "no workers, own": 2,
    "fork, default": 6,
    "fork, own": 5,
    "spawn, own": 1,  # its workers take seconds to start
}
"""Where and how samples are collated, and the place's share of the cases."""

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of torch's, on arrays and dtypes of all kinds


def outcome(batches: Iterator[Any]) -> tuple[Any, Exception | None]:
    """Return the next batch, or the error in its place."""
    try:
        return next(batches), None
    except StopIteration:
        raise
    except Exception as error:
        return None, error


def compare_details(ours: Any, theirs: Any, where: str) -> None:
    """Fail where strides, flags or attributes differ, which `assert_same` does not compare."""
    if isinstance(theirs, torch.Tensor):
        assert vars(ours) == vars(theirs), where
        assert ours.is_neg() == theirs.is_neg(), where
        if theirs.layout is torch.strided and not _is_loose(theirs):
            assert ours.stride() == theirs.stride(), where
    elif isinstance(theirs, np.ndarray):
        assert str(ours.flags).splitlines()[:2] == str(theirs.flags).splitlines()[:2], where  # contiguous
        assert ours.flags.writeable == theirs.flags.writeable, where
    elif isinstance(theirs, Mapping):
        for key in theirs:
            compare_details(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, list | tuple):
        for number, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            compare_details(x, y, f"{where}[{number}]")
    elif isinstance(theirs, Record):
        compare_details(vars(ours), vars(theirs), where)


def _is_loose(tensor: torch.Tensor) -> bool:
    """Whether the encoding leaves out the gaps between the tensor's elements, and so changes its strides."""
    sizes = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step and n]
    span = 1 + sum((n - 1) * step for n, step in sizes)
    return span * tensor.itemsize > max(4096, 4 * tensor.itemsize * math.prod(n for n, _ in sizes))


def compare(case: int, got: tuple[Any, Exception | None], expected: tuple[Any, Exception | None]) -> None:
    """Fail unless these are the same batch or the same type of error."""
    batch, error = got
    theirs, refused = expected
    if refused is not None and any(text in str(refused) for text in ONLY_TORCHS):
        assert error is not None or not any(text in str(refused) for text in ONLY_TORCHS[3:])
        return
    assert type(error) is type(refused), f"case {case}: {error!r} against {refused!r}"
    if refused is None:
        assert_same(batch, theirs, f"case {case}")
        compare_details(batch, theirs, f"case {case}")


@pytest.mark.parametrize("place", PLACES)
def test_fuzz(place: str) -> None:
    """A loader of ours and a loader of torch's get the same cases in the same order."""
    method, collate = place.split(", ")
    workers = 0 if method == "no workers" else 2
    count = max(1, CASES * PLACES[place] // sum(PLACES.values()))
    cases = range(list(PLACES).index(place), count * len(PLACES), len(PLACES))
    arguments: dict[str, Any] = {
        "dataset": Cases(SEED, collate),
        "batch_sampler": [batch_of(case) for case in cases],
        "collate_fn": COLLATES[collate],
        "num_workers": workers,
    }
    with DataLoader[Any](**arguments, multiprocessing_context=method if workers else None) as loader:
        ours = iter(loader)
        # The start method of torch's workers does not affect batches.
        theirs = iter(torch.utils.data.DataLoader(**arguments, timeout=PATIENCE_S if workers else 0))
        held: deque[tuple[int, Any, Any]] = deque()
        for case in cases:
            held.append((case, outcome(ours), outcome(theirs)))
            compare(*held[-1])
            if len(held) > HELD:
                compare(*held.popleft())
        while held:
            compare(*held.popleft())
        assert next(ours, None) is None
        assert next(theirs, None) is None
        del ours, theirs
