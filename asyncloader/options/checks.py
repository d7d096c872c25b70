"""Checks the loaders' options when a loader is made: each value by itself, and those that exclude or need one another.

Data path: none. A failed check raises ValueError or TypeError with the given value and what to do instead. `CHECKS` has
one check per option that `LoaderOptions` declares, and so says which options are ours and not torch's.

An option that asks for something that will not happen causes a warning. An option that is met anyway does not:
`ring_bytes` without workers is an upper bound that holds, and in torch mode every loader has ``reorder_window=0``.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.data import BatchSampler

from asyncloader.base.sizes import optional_size
from asyncloader.base.topology import check_group
from asyncloader.errors import NO_PROCESSES, NoEffectWarning, UnsupportedPlatform
from asyncloader.options.auto import AUTO
from asyncloader.samplers.balance import Balance
from asyncloader.samplers.distributed import ON_UNEVEN
from asyncloader.workers.fetch.dataset_kinds import (
    assigns_shards,
    check_plain,
    count_streams,
    is_async_dataset,
    is_awaited,
)
from asyncloader.workers.fetch.sample import check_decode
from asyncloader.workers.source import THREADS

_SEEDED_RESTARTS = 3

Check: TypeAlias = Callable[[str, Any], object]
"""A function of an option's name and value that raises if the value is out of range."""


def checks_of(options: Mapping[str, Any], defaults: Mapping[str, Any], *, iterable: bool) -> list[Callable[[], object]]:
    """Return the checks of all arguments of a loader's constructor that torch does not check, in their order.

    Args:
        options: every argument by name, torch's too; those that are objects with their fields.
        defaults: those of the options, which need no check of their own.
        iterable: whether the dataset is iterated rather than indexed.

    Returns:
        Functions that raise ValueError or TypeError if an option is out of range, or excludes another option or the
        dataset.
    """
    checks: list[Callable[[], object]] = []
    for name, check in CHECKS.items():
        if options[name] is not defaults[name]:  # not `!=`: False equals 0, which it may not stand for
            checks.append(partial(check, name, options[name]))
        if name in _AFTER:
            checks.append(partial(_AFTER[name], options, iterable))
    return checks


def check_numbers(arguments: Mapping[str, Any]) -> None:
    """Raise the TypeError that torch would raise later, or about an operator, if one of its numbers is not a number."""
    workers, ahead = arguments["num_workers"], arguments["prefetch_factor"]
    if workers not in (AUTO, 0) and not hasattr(workers, "__index__"):
        raise TypeError(f"num_workers should be an integer or 'auto', but got num_workers={workers!r}")
    if ahead is not None and ahead != 0 and not hasattr(ahead, "__index__"):
        hint = ': "auto" is gone, and `asyncloader try` measures numbers' if ahead == AUTO else ""
        raise TypeError(f"prefetch_factor should be an integer or None, but got prefetch_factor={ahead!r}{hint}")


def max_restarts(given: int | None, *, seeded: bool) -> int:
    """How often a worker may be replaced in an epoch: as given; by default 3 times in seeded mode, else never."""
    if given is not None:
        return given
    return _SEEDED_RESTARTS if seeded else 0


def is_seed(seed: Any) -> bool:
    """Whether this is a valid `seed=`: an integer of 64 bits without a sign."""
    return isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 1 << 64


# ----------------------------------------------------------------------------------------- values by themselves


def _should_be(what: str, accepts: Callable[[Any], bool]) -> Check:
    def check(name: str, value: Any) -> None:
        if not accepts(value):
            raise ValueError(f"{name} should be {what}, but got {name}={value!r}")

    return check


def _integer(least: int) -> Callable[[Any], bool]:
    """Accepts True and False too, which are integers in Python."""
    return lambda value: isinstance(value, int) and value >= least


def _number_of(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _optional(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or accepts(value)


def _one_of(*names: str) -> Callable[[Any], bool]:
    return lambda value: value in names


def _is_duration(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _anything(name: str, value: Any) -> None:
    """For options that are only checked together with others, or used as true or false."""


def _device_transform(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} should be a function from a batch to a batch, but got {type(value).__name__}")
    check_plain(f"{name}={value!r}", value)


def _device(name: str, value: Any) -> None:
    if value is None:
        return
    try:
        torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name} should be what torch.device takes, but got {name}={value!r}: {error}") from None


# In the order in which they are made: of several mistakes the first is raised.
CHECKS: dict[str, Check] = {
    "ring_bytes": optional_size,
    "concurrency": _should_be(
        'a positive integer or None ("auto" is gone: `asyncloader try` measures numbers)', _optional(_number_of(1))
    ),
    "decode": lambda _, value: check_decode(value, 0),
    "decode_threads": lambda _, value: check_decode(None, value),
    "group": lambda _, value: check_group(value),
    "balance": _should_be("a Balance or None", lambda value: isinstance(value, Balance)),
    "seed": _should_be("an integer between 0 and 2**64 - 1 or None", _optional(is_seed)),
    "world_size": _should_be("a positive integer", _optional(_integer(1))),
    "rank": _anything,
    "on_uneven": _should_be(f"one of {', '.join(ON_UNEVEN)}", _one_of(*ON_UNEVEN)),
    "allow_replay": _should_be("True or False", lambda value: isinstance(value, bool)),
    "snapshot_every_n_steps": _should_be("a non-negative integer or None", _optional(_integer(0))),
    "reorder_window": _should_be("a non-negative number of batches", _integer(0)),
    "worker_timeout": _should_be("a positive number of seconds or None", _optional(_is_duration)),
    "max_worker_restarts": _should_be("a non-negative integer or None", _optional(_number_of(0))),
    "max_skipped_samples": _should_be("a non-negative integer or None", _optional(_number_of(0))),
    "worker_memory_limit": optional_size,
    "on_error": _should_be(
        "'raise', 'skip', 'refill' or a function of an index and an exception",
        lambda value: value in ("raise", "skip", "refill") or callable(value),
    ),
    "workers": _anything,  # `service/client/remote_dataset.py` has read it before
    "device_prefetch": _should_be("a number of batches, at least 1", _number_of(1)),
    "device_transform": _device_transform,
    "static_buffers": _anything,
    "device": _device,
}


# ------------------------------------------------------------------------------------- several options together


def _check_what_needs_a_seed(options: Mapping[str, Any], iterable: bool) -> None:
    seed, rank, world_size, group = options["seed"], options["rank"], options["world_size"], options["group"]
    if seed is not None and options["generator"] is not None:
        raise ValueError(
            f"seed={seed} and generator exclude one another: with a seed no generator is drawn from. Leave one out"
        )
    if seed is None and (rank is not None or world_size is not None):
        raise ValueError(
            f"rank={rank!r} and world_size={world_size!r} need seed=: without it the loader is torch's, which leaves "
            "sharding to the sampler (torch's DistributedSampler)"
        )
    if seed is None and group is not None:
        raise ValueError(
            f"group={group!r} needs seed=: without it the loader is torch's, which leaves sharding to the sampler "
            "(torch's DistributedSampler)"
        )
    if group is not None and (rank is not None or world_size is not None):
        raise ValueError(
            f"group and rank={rank!r}, world_size={world_size!r} exclude one another: the group says "
            "both. Leave one out"
        )
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together, but got rank={rank!r} and world_size={world_size!r}")
    if options["balance"] is not None:
        _check_balance(options, iterable)


def _check_rank(options: Mapping[str, Any], _: bool) -> None:
    rank, world_size = options["rank"], options["world_size"]
    if world_size is not None and not (isinstance(rank, int) and 0 <= rank < world_size):
        raise ValueError(f"rank should be between 0 and world_size - 1 = {world_size - 1}, but got rank={rank!r}")


def _check_uneven_stream(options: Mapping[str, Any], iterable: bool) -> None:
    on_uneven = options["on_uneven"]
    if iterable and on_uneven in ("pad", "repeat"):
        raise ValueError(
            f"on_uneven={on_uneven!r} needs a map dataset: samples of a stream cannot be fetched a second time. "
            "Use on_uneven='drop' or 'error'"
        )


def _check_balance(options: Mapping[str, Any], iterable: bool) -> None:
    balance, dataset = options["balance"], options["dataset"]
    if options["seed"] is None:
        raise ValueError("balance= needs seed=, from which each rank computes the whole global batch; give a seed")
    if iterable or hasattr(dataset, "plan_streams"):
        raise ValueError(
            "balance= needs a map dataset: the lengths of a stream's samples are not known before they are read"
        )
    if options["batch_sampler"] is not None and type(options["batch_sampler"]) is not BatchSampler:
        raise ValueError(
            "balance= needs batch_size=: the batches of a batch_sampler are divided among the ranks as they are. "
            "BucketBatchSampler and TokenBudgetBatchSampler have ranks=, which puts similar batches in a step"
        )
    if options["batch_size"] is None:
        raise ValueError("balance= needs batch_size=: single samples leave nothing to balance")
    if options["workers"] is None and hasattr(dataset, "__len__") and len(balance) != len(dataset):
        raise ValueError(f"balance= has {len(balance)} lengths, but the dataset has {len(dataset)} samples")


def _check_refill(options: Mapping[str, Any], iterable: bool) -> None:
    if options["on_error"] != "refill":
        return
    if options["seed"] is None:
        raise ValueError("on_error='refill' needs seed=: the substitutes are drawn from it. Or use on_error='skip'")
    if iterable or not hasattr(options["dataset"], "__len__"):
        raise ValueError(
            "on_error='refill' needs a map dataset with a length: substitutes are other samples of it. Use "
            "on_error='skip'"
        )


def _check_what_needs_a_device(options: Mapping[str, Any], _: bool) -> None:
    transforms = options["device_transform"] is not None
    if options["device"] is None and (transforms or options["static_buffers"]):
        name = "device_transform" if transforms else "static_buffers"
        raise ValueError(f"{name} is about batches on a device, and needs device=, for example device='cuda'")


def _check_workers(options: Mapping[str, Any], iterable: bool) -> None:
    if iterable:
        count_streams(options["dataset"])
    if sys.platform == "win32" and options["num_workers"] and options["workers"] != THREADS:
        raise UnsupportedPlatform(f"num_workers={options['num_workers']} asks for {NO_PROCESSES}")
    if options["workers"] == THREADS and (context := options["multiprocessing_context"]) is not None:
        raise ValueError(
            f"workers={THREADS!r} and multiprocessing_context={context!r} exclude one another: threads are started in "
            "this process. Leave one out"
        )


_AFTER: dict[str, Callable[[Mapping[str, Any], bool], None]] = {
    "seed": _check_what_needs_a_seed,
    "rank": _check_rank,
    "on_uneven": _check_uneven_stream,
    "on_error": _check_refill,
    "workers": _check_workers,
    "static_buffers": _check_what_needs_a_device,
}
"""The checks that follow an option's own: of its combinations with other options, and with the dataset."""


# -------------------------------------------------------------------------------------- options without an effect


_said_of: ContextVar[Collection[str] | None] = ContextVar("_said_of", default=None)


ABOUT_DATASET = ("concurrency", "decode_threads", "reorder_window")
"""Options that have an effect, or none, depending on the kind of the dataset. Of a service's dataset, which is unknown
when a loader is made, nothing is said of them."""


@contextlib.contextmanager
def warn_only_of(names: Collection[str]) -> Generator[None]:
    """While a loader is made from another loader: warn of these options only, not of those that it takes over."""
    outer = _said_of.get()
    token = _said_of.set(names if outer is None else [name for name in names if name in outer])
    try:
        yield
    finally:
        _said_of.reset(token)


def warn_without_effect(options: Mapping[str, Any], given: Collection[str], *, iterable: bool) -> None:
    """Warn of options that cannot do what they ask for, at the line outside of asyncloader that makes the loader.

    Args:
        options: every argument by name, torch's too, checked.
        given: those of ours, and `collate_fn`, that differ from their defaults.
        iterable: whether the dataset is iterated rather than indexed.
    """
    said_of = _said_of.get()
    asked = {name: options[name] for name in given if said_of is None or name in said_of}
    if not asked and (options["seed"] is not None or not hasattr(options["dataset"], "streams")):
        return
    for text in _without_effect(options, asked, iterable):
        warnings.warn(text, NoEffectWarning, stacklevel=_frames_of_ours())


def _has_streams(dataset: Any) -> bool:
    """Whether it is a `RemoteIterableDataset` that asks for fixed streams."""
    return getattr(dataset, "streams", None) is not None and assigns_shards(dataset)


def _frames_of_ours() -> int:
    """The `stacklevel` at which the caller's `warnings.warn` names the first line outside of asyncloader."""
    package, frame, level = __name__.partition(".")[0], sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level


def _without_effect(options: Mapping[str, Any], asked: Mapping[str, Any], iterable: bool) -> Iterator[str]:
    """One sentence for each reason; `asked` are the options that may be named as those without an effect."""
    dataset, seed = options["dataset"], options["seed"]
    awaited, assigned = is_async_dataset(dataset), assigns_shards(dataset)

    if asked.get("collate_fn") is not None and is_awaited(options["collate_fn"]):
        yield (
            "async does nothing for collate_fn, which is called, and not awaited: each batch would be a coroutine. "
            "Make it a plain function, and await in the dataset's own methods"
        )

    if seed is None and _has_streams(dataset):
        yield "the dataset's streams= does nothing without seed=, from which the order of fixed streams follows"

    of_workers = [name for name in ("worker_timeout", "worker_memory_limit", "max_worker_restarts") if asked.get(name)]
    threads = options["workers"] == THREADS
    if threads and "workers" in asked:
        of_workers.append("workers")
    if of_workers and not options["num_workers"]:
        yield f"{_named(of_workers, asked)} nothing with num_workers=0, where there are no workers"

    elif asked.get("worker_timeout") and not max_restarts(options["max_worker_restarts"], seeded=seed is not None):
        default = " (the default without seed=)" if options["max_worker_restarts"] is None else ""
        yield (
            f"{_named(['worker_timeout'], asked)} not replace workers with max_worker_restarts=0{default}: one that "
            "hangs is killed, and the epoch ends with WorkerDied. Set max_worker_restarts=3, for example"
        )

    if asked.get("worker_memory_limit") and options["workers"] is not None:
        why = "threads have no memory of their own" if threads else "a service's processes are its own"
        yield f"{_named(['worker_memory_limit'], asked)} nothing with workers=: {why}"

    if iterable and (asked.get("concurrency") or 1) > 1:
        yield (
            f"{_named(['concurrency'], asked)} nothing for an iterable dataset, whose samples are read one after the "
            f"other. Raise num_workers, or {'its read_ahead=' if assigned else 'read ahead in its __aiter__'}"
        )

    if asked.get("decode_threads", 0) > 1:
        blocking = not awaited and (iterable or options["concurrency"] is None)
        if blocking or (options["decode"] is None and (options["workers"] is None or threads)):
            yield f"{_named(['decode_threads'], asked)} nothing without decode=, or where samples are not concurrent"

    if options["on_error"] == "raise" and asked.get("max_skipped_samples", 0) != 0:
        yield (
            f"{_named(['max_skipped_samples'], asked)} nothing with on_error='raise', which raises the first sample's "
            "error. Set on_error='skip', 'refill' or a function"
        )
    if "on_uneven" in asked and seed is None and not assigned:
        yield f"{_named(['on_uneven'], asked)} nothing without seed=: the loader then leaves sharding to the sampler"
    if asked.get("reorder_window") and (seed is None or iterable):
        why = "without seed=" if seed is None else "for an iterable dataset"
        yield f"{_named(['reorder_window'], asked)} nothing {why}: the workers' batches are then taken in turn"
    if "device_prefetch" in asked and options["device"] is None:
        yield f"{_named(['device_prefetch'], asked)} nothing without device="


def _named(names: Collection[str], values: Mapping[str, Any]) -> str:
    """The options with their values, and the verb."""
    return f"{' and '.join(f'{name}={values[name]!r}' for name in names)} {'do' if len(names) > 1 else 'does'}"
