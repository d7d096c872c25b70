"""Accelerate: `Accelerator.prepare` builds a stock DataLoader from the user's attributes; here it gets ours.

Accelerate's wrapper (`DataLoaderShard`) stays: it moves batches to the device, feeds the gradient state and counts
epochs. Only the loader inside it is exchanged. In return `accelerator.save_state` and `load_state` include the loader's
state, whatever `use_stateful_dataloader` says: a run that is stopped within an epoch goes on at the next batch.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from accelerate import skip_first_batches as _skip_first_batches
from accelerate.data_loader import BatchSamplerShard, DataLoaderAdapter, DataLoaderDispatcher, SeedableRandomSampler
from torch.utils.data import BatchSampler

from asyncloader.clone import constructor_arguments
from asyncloader.loader import DataLoader
from asyncloader.options import is_iterable
from asyncloader.stateful_loader import StatefulDataLoader

__all__ = ["adopt", "prepare", "skip_first_batches"]

_TORCHS_OPTIONS = inspect.signature(torch.utils.data.DataLoader).parameters


def prepare(accelerator: Any, *objects: Any, **options: Any) -> Any:
    """`accelerator.prepare(*objects, **options)`, in which our loaders stay ours.

    Args:
        accelerator: an `accelerate.Accelerator`.
        objects: models, optimizers, loaders, schedulers.
        options: `prepare`'s own, for example ``device_placement``.

    Returns:
        What `prepare` returns: one object for one, a tuple for several, in their order.

    Raises:
        ValueError: see `adopt`.
    """
    prepared = accelerator.prepare(*objects, **options)
    for mine, theirs in zip(objects, prepared if len(objects) > 1 else (prepared,), strict=True):
        if isinstance(mine, DataLoader):
            adopt(theirs, mine)
    return prepared


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """`accelerate.skip_first_batches`, which builds a stock loader anew, for a prepared loader of ours.

    Not needed after `accelerator.load_state`, which finds the position by itself; a position that was loaded is
    forgotten here. In seeded mode nothing is read for what is skipped, and the rest is that of the whole epoch to the
    bit.
    """
    wrapper = issubclass(type(loader), DataLoaderAdapter)
    inside = loader.base_dataloader if wrapper else loader
    skipping = _skip_first_batches(loader, num_batches)
    if not isinstance(inside, DataLoader):
        return skipping
    if wrapper:
        inside.load_state_dict({})  # or the next epoch would begin there
    if inside._asyncloader_options.seed is None or is_iterable(inside):
        return adopt(skipping, inside)
    ours = _skipping(type(inside), num_batches)(**constructor_arguments(inside, {}, inside))
    if not wrapper:
        return ours
    _tell(ours, getattr(inside.batch_sampler, "num_processes", 1))
    skipping.base_dataloader = ours
    return skipping


def adopt(prepared: Any, like: DataLoader[Any] | None = None) -> Any:
    """Exchange the loader inside one of Accelerate's wrappers by ours with the same arguments.

    In seeded mode the loader shares batches out among the processes by itself, as it does without Accelerate, in the
    place of Accelerate's `BatchSamplerShard` (unless that wraps the user's own batch sampler, or ``even_batches`` is
    False). Where that would fill the last batches up, ``on_uneven="drop"`` becomes ``"pad"``: nothing is left out.

    Args:
        prepared: a `DataLoaderShard`, `DataLoaderDispatcher` or `SkipDataLoader`; or a plain loader, which is rebuilt.
        like: a loader of ours whose own options, and class, the new one gets. Default: our `StatefulDataLoader` in the
            place of torchdata's, else our `DataLoader`; with their defaults.

    Returns:
        `prepared` itself; a new loader if it was a plain one.

    Raises:
        TypeError: it is neither (on a TPU Accelerate wraps once more), or what is inside is a loader of somebody else
            that keeps a state, which would be lost.
        ValueError: ``use_stateful_dataloader=True``, but several processes get their batches from one, or each reads a
            stream: Accelerate keeps one state for all processes. Or `like` names another rank than Accelerate's.
    """
    # `type`, here and below: the wrappers claim the class of what is inside them.
    wrapper = issubclass(type(prepared), DataLoaderAdapter)
    if not wrapper and not issubclass(type(prepared), torch.utils.data.DataLoader):
        raise TypeError(
            f"adopt takes a loader, or one of Accelerate's wrappers around one, but got {type(prepared).__name__}"
        )
    inside = prepared.base_dataloader if wrapper else prepared
    if not wrapper:
        return inside if isinstance(inside, DataLoader) else _class_for(inside, like).from_torch(inside, **_own(like))
    stateful = _one_state_for_all(prepared, inside)
    if not isinstance(inside, DataLoader):
        inside = prepared.base_dataloader = _exchanged(prepared, inside, like)
        if like is not None and like._asyncloader_options.seed is not None and not getattr(prepared, "iteration", 1):
            prepared.iteration = like.state_dict()["epoch"]
    _keep_state(prepared, inside, stateful)
    return prepared


# ------------------------------------------------------------------------------------------------- the loader inside


def _class_for(inside: Any, like: DataLoader[Any] | None) -> type[DataLoader[Any]]:
    torchdatas = any(base.__module__.startswith("torchdata.") for base in type(inside).__mro__)
    if hasattr(inside, "state_dict") and not torchdatas:
        raise TypeError(
            f"a {type(inside).__name__} keeps a state that this loader does not have; keep the stock loader"
        )
    if like is not None:
        return type(like)
    return StatefulDataLoader if torchdatas else DataLoader


def _own(like: DataLoader[Any] | None) -> dict[str, Any]:
    """The options that only our loaders have."""
    if like is None:
        return {}
    return {name: value for name, value in constructor_arguments(like, {}).items() if name not in _TORCHS_OPTIONS}


def _exchanged(prepared: Any, inside: Any, like: DataLoader[Any] | None) -> DataLoader[Any]:
    kind, changes = _class_for(inside, like), _own(like)
    seeded, batches, processes = changes.get("seed") is not None, inside.batch_sampler, 1
    if is_iterable(inside):
        batches = None
    for each in (batches, getattr(batches, "batch_sampler", None)):
        sampler = getattr(each, "sampler", None)
        if isinstance(sampler, SeedableRandomSampler) and getattr(sampler, "generator", None) is None:
            # It would make one when its first epoch begins, too late to be set to a state.
            sampler.generator = torch.Generator(torch.get_default_device())
    if type(batches) is BatchSampler:
        changes |= _parts(batches)
    elif seeded and type(batches) is BatchSamplerShard and _shares_as_we_do(batches):
        changes |= _shared_out(batches, changes)
        processes = batches.num_processes
    if seeded and issubclass(type(prepared), DataLoaderDispatcher):
        changes |= {"rank": 0, "world_size": 1}  # one process reads for all
    ours: DataLoader[Any] = kind.from_torch(inside, **changes)
    _tell(ours, processes)
    return ours


def _shares_as_we_do(shard: Any) -> bool:
    return type(shard.batch_sampler) is BatchSampler and bool(shard.even_batches or shard.drop_last)


def _parts(batches: BatchSampler) -> dict[str, Any]:
    return {"sampler": batches.sampler, "batch_size": batches.batch_size, "drop_last": batches.drop_last}


def _shared_out(shard: Any, own: dict[str, Any]) -> dict[str, Any]:
    """The arguments by which a seeded loader gives a process what the shard would."""
    here = shard.process_index, shard.num_processes
    named = own.get("rank"), own.get("world_size")
    if named not in ((None, None), here):
        raise ValueError(
            f"the loader has rank={named[0]} and world_size={named[1]}, but Accelerate's are {here[0]} and {here[1]}; "
            "leave them out"
        )
    changes = _parts(shard.batch_sampler) | {"rank": here[0], "world_size": here[1]}
    if shard.split_batches:
        changes["batch_size"] //= shard.num_processes
    if shard.even_batches and own.get("on_uneven", "drop") == "drop":
        changes["on_uneven"] = "pad"
    return changes


def _tell(ours: DataLoader[Any], processes: int) -> None:
    """Accelerate asks the batch sampler how many processes share a batch: `gather_for_metrics` goes by it."""
    if processes > 1:
        ours.batch_sampler.num_processes = processes  # type: ignore[union-attr]


def _skipping(kind: type[DataLoader[Any]], first: int) -> type[DataLoader[Any]]:
    """A class of seeded loaders whose epochs begin with batch number `first`."""

    class Skipping(kind):  # type: ignore[valid-type, misc]
        def __iter__(self) -> Any:
            self.load_state_dict({})
            beginning = self.state_dict()
            self.load_state_dict({**beginning, "step": min(first, super().__len__())})
            return super().__iter__()

        def __len__(self) -> int:
            return int(max(0, super().__len__() - first))

    return Skipping


# --------------------------------------------------------------------------------------------------------- its state


def _one_state_for_all(prepared: Any, inside: Any) -> bool:
    """Whether the state of one process is right for all of them, of which Accelerate keeps one."""
    processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    dispatched = issubclass(type(prepared), DataLoaderDispatcher)
    stream = is_iterable(inside)
    if processes == 1 or not (dispatched or stream):
        return True
    if prepared.use_stateful_dataloader:
        raise ValueError(
            f"use_stateful_dataloader=True, but {processes} processes "
            + ("get their batches from the first one" if dispatched else "each read a stream")
            + ", and Accelerate keeps one state for all of them. Use a map dataset with dispatch_batches=False, or "
            "leave use_stateful_dataloader out and save the loaders' states yourself, one a process"
        )
    return False


def _keep_state(prepared: Any, ours: DataLoader[Any], stateful: bool) -> None:
    """Make Accelerate save and load the loader's state, and with it the number of the epoch, which it does not save."""
    prepared.use_stateful_dataloader = stateful
    if not stateful:
        return
    epoch = _Epoch(prepared)
    prepared.dl_state_dict = ours.state_dict()
    prepared.adjust_state_dict_for_prefetch = epoch.note
    prepared.load_state_dict = epoch.load
    epoch.note()


class _Epoch:
    """Puts the number of a wrapper's epoch into its state, and takes it from there.

    The wrapper tells its samplers the number before each epoch: without it a resumed run would go back to epoch 0.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)  # which holds this: a cycle would keep workers until a collection

    def note(self) -> None:
        """Called by Accelerate when it has taken the loader's state. There is nothing to adjust besides: that state
        counts the batches that the user got.
        """
        wrapper = self._alive()
        wrapper.dl_state_dict["iteration"] = getattr(wrapper, "iteration", 0)

    def load(self, state_dict: dict[str, Any]) -> None:
        """In the place of the wrapper's `load_state_dict`."""
        wrapper = self._alive()
        wrapper.base_dataloader.load_state_dict(state_dict)
        if state_dict:
            over = bool(state_dict["finished"]) or state_dict.get("_iterator_finished") is True
            wrapper.iteration = state_dict.get("iteration", state_dict["epoch"]) + over
        wrapper.dl_state_dict = wrapper.base_dataloader.state_dict()
        wrapper.dl_state_dict.setdefault("iteration", getattr(wrapper, "iteration", 0))

    def _alive(self) -> Any:
        wrapper = self._wrapper()
        if wrapper is None:
            raise ReferenceError("the prepared loader is gone")
        return wrapper

    def __reduce__(self) -> tuple[Any, ...]:
        return _Epoch, (self._alive(),)
