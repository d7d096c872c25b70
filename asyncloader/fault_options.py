"""The options that say what becomes of workers that die and samples that raise: their checks and defaults.

Data path: options -> [fault_options] -> scheduler, pool, worker. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

__all__ = ["DEFAULT_MAX_BAD_SAMPLES", "BadSamples", "OnError", "check_fault_options", "max_restarts"]

OnError: TypeAlias = Literal["raise", "skip"] | Callable[[Any, Exception], Any]
BadSamples: TypeAlias = Literal["short", "refill"]

DEFAULT_MAX_BAD_SAMPLES = 1000

_SEEDED_RESTARTS = 3


def check_fault_options(
    *,
    worker_timeout: Any,
    max_worker_restarts: Any,
    on_error: Any,
    bad_samples: Any,
    max_bad_samples: Any,
    worker_memory_limit: Any,
    seed: Any,
    dataset: Any,
    iterable: bool,
) -> None:
    """Check them.

    Raises:
        ValueError: one is out of range, or needs another.
    """
    if worker_timeout is not None and not (_is_number(worker_timeout) and worker_timeout > 0):
        raise ValueError(
            f"worker_timeout should be a positive number of seconds or None, but got worker_timeout={worker_timeout!r}"
        )
    for name, value, least in (
        ("max_worker_restarts", max_worker_restarts, 0),
        ("max_bad_samples", max_bad_samples, 0),
        ("worker_memory_limit", worker_memory_limit, 1),
    ):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            kind = "a positive number of bytes" if name == "worker_memory_limit" else "a non-negative integer"
            raise ValueError(f"{name} should be {kind} or None, but got {name}={value!r}")
    if on_error not in ("raise", "skip") and not callable(on_error):
        raise ValueError(
            "on_error should be 'raise', 'skip' or a function of an index and an exception, but got "
            f"on_error={on_error!r}"
        )
    if bad_samples not in ("short", "refill"):
        raise ValueError(f"bad_samples should be 'short' or 'refill', but got bad_samples={bad_samples!r}")
    if bad_samples == "refill":
        _check_refill(on_error=on_error, seed=seed, dataset=dataset, iterable=iterable)


def _check_refill(*, on_error: Any, seed: Any, dataset: Any, iterable: bool) -> None:
    if on_error != "skip":
        raise ValueError(f"bad_samples='refill' needs on_error='skip', but got on_error={on_error!r}")
    if seed is None:
        raise ValueError("bad_samples='refill' needs seed=: the substitutes are drawn from it")
    if iterable or not hasattr(dataset, "__len__"):
        raise ValueError("bad_samples='refill' needs a map dataset with a length: substitutes are other samples of it")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def max_restarts(given: int | None, *, seeded: bool) -> int:
    """How often a worker may be replaced in an epoch: as given; else 3 times where that is exact."""
    if given is not None:
        return given
    return _SEEDED_RESTARTS if seeded else 0
