"""Addresses single steps of an epoch in seeded mode: makes the loader of a batch, and states that leave steps out.

Data path: none. In seeded mode a batch of a map dataset follows from epoch, step and rank, so the state that a run
would have saved before it is written down without the run.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import BatchSampler, SequentialSampler

from asyncloader.errors import StateError
from asyncloader.options.checks import warn_only_of
from asyncloader.options.clone import constructor_arguments
from asyncloader.options.declaration import LoaderSpec
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.samplers.async_sampler import PositionSource
from asyncloader.samplers.distributed import SeekableSampler
from asyncloader.samplers.index_stream import base_sampler
from asyncloader.workers.source import THREADS

if TYPE_CHECKING:
    from asyncloader.loaders.async_loader import AsyncDataLoader
    from asyncloader.loaders.loader import DataLoader
    from asyncloader.state.checkpoint import StateKeeper


T = TypeVar("T")


def loader_without_workers(spec: LoaderSpec[Any], make: Callable[..., T], rank: int | None) -> T:
    """Return a loader like `spec` for single batches: of this rank (None: its own), without workers and device.

    Raises:
        ValueError: the loader's batches do not follow from epoch and step, or there is no such rank.
    """
    config = _checked(spec)
    here = config.topology
    if rank is not None and rank not in range(here.world_size):
        raise ValueError(f"rank should be between 0 and {here.world_size - 1}, but got rank={rank!r}")
    changes = {
        "num_workers": 0 if config.workers in (None, THREADS) else 1,  # a service's dataset is not in this process
        "device": None,
        "device_transform": None,
        "pin_memory": False,
        "group": None,
        "rank": here.rank if rank is None else rank,
        "world_size": here.world_size,
    }
    arguments = constructor_arguments(spec, changes)
    for name in ("sampler", "batch_sampler"):
        if name in arguments:
            arguments[name] = _copied(arguments[name])
    with warn_only_of(()):
        return make(**arguments)


def begin_at(loader: DataLoader[Any] | AsyncDataLoader[Any], keeper: StateKeeper, epoch: int, step: int) -> None:
    """Let a loader that has not begun, whose `keeper` this is, begin with a step.

    Raises:
        IndexError: the epoch has fewer steps.
        ValueError: epoch or step is not a number from 0 on.
    """
    epoch, step = _checked_number("epoch", epoch), _checked_number("step", step)
    if epoch >= 1 << 63:
        raise ValueError(f"epoch should be below 2**63, but got epoch={epoch}")
    keeper.alone = True  # other ranks need not make this batch, too
    try:
        loader.load_state_dict(_before(loader.state_dict(), epoch, step))
    except StateError as error:
        raise no_step(epoch, step) from error


def no_step(epoch: int, step: int) -> IndexError:
    """Return the error for a step behind the epoch's end."""
    return IndexError(f"epoch {epoch} has no step {step}: it has fewer batches")


def check_step(state: dict[str, Any], epoch: int, step: int) -> None:
    """Check that the batch of the step came. `state`: the loader's after the first batch.

    Raises:
        LookupError: another batch came, because all samples of this step were skipped.
    """
    if state["step"] != step + 1:
        raise LookupError(f"step {step} of epoch {epoch} has no batch: all of its samples were skipped (on_error)")


def without_steps(spec: LoaderSpec[Any], state: dict[str, Any], steps: Iterable[int]) -> dict[str, Any]:
    """Return the state with these steps marked as delivered. See `DataLoader.skip`.

    Args:
        spec: the loader's options.
        state: the position from which its next iterator begins.
        steps: numbers of steps; those that were delivered make no difference.

    Raises:
        IndexError: the epoch has fewer steps.
        ValueError: the loader's batches do not follow from epoch and step, or a step is not a number from 0 on.
    """
    config, left_out = _checked(spec), {_checked_number("each step", step) for step in steps}
    if state["finished"]:
        state = _before(state, state["epoch"] + 1, 0) | {"sampler": None, "seeds": None}
    with suppress(TypeError):  # the number is not known yet
        if left_out and max(left_out) >= (length := len(config.index_sampler)):
            raise IndexError(f"step {max(left_out)} cannot be left out: the epoch has {length} batches")
    at, beyond = state["step"], left_out.union(state["beyond"])
    while at in beyond:
        at += 1
    return {**state, "step": at, "beyond": sorted(step for step in beyond if step > at)}


def _before(state: dict[str, Any], epoch: int, step: int) -> dict[str, Any]:
    """Return the state with the position before a step."""
    return {**state, "epoch": epoch, "step": step, "beyond": [], "finished": False}


def _checked_number(name: str, value: Any) -> int:
    # Also an integer of numpy or torch: steps are found by comparing losses.
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{name} should be an integer from 0 on, but got {value!r}")
    return number


def _checked(spec: LoaderSpec[Any]) -> EpochConfig:
    """Return the options as they are now.

    Raises:
        ValueError: the loader's batches do not follow from epoch and step.
    """
    config = EpochConfig.of(spec)
    sampler = base_sampler(config.index_sampler)
    why = ""
    if not config.seeded:
        why = "the loader has no seed=, so that its batches depend on what was drawn before"
    elif config.iterable:
        why = "the dataset is iterated, and its samples are reached by reading those before; a RemoteIterableDataset "
        why += "needs streams="
    elif config.stateful:
        why = "the dataset has a state (state_dict), so that its samples depend on those that were read before"
    elif isinstance(config.source, PositionSource) and config.source.sampler.changed:
        why = "the order has changed by feedback, which only the loader's own iterators follow"
    elif config.source is not None and not isinstance(config.source, PositionSource):
        why = "the sampler is async, and is read from its beginning"
    elif config.source is None and not isinstance(sampler, SeekableSampler | SequentialSampler | Sequence):
        why = f"{type(sampler).__name__} has no iter_from(start), which gives its indices from a position on"
    if why:
        raise ValueError(f"single steps cannot be addressed: {why}")
    return config


def _copied(sampler: Any) -> Any:
    """Return a copy, on which another epoch can be set."""
    copied = copy.copy(sampler)
    if type(copied) is BatchSampler:
        copied.sampler = copy.copy(copied.sampler)
    return copied
