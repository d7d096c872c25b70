"""Makes Accelerate keep our loader: `Accelerator.prepare` would build a stock one from its attributes.

Accelerate's wrapper (`DataLoaderShard`) stays: it moves batches to the device, updates the gradient state and counts
epochs. Only the loader inside it is replaced. `accelerator.save_state` and `load_state` then include the loader's
state, whatever `use_stateful_dataloader` says: a run that was stopped within an epoch resumes at the next batch.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from typing import Any

import torch
from accelerate import skip_first_batches as _skip_first_batches
from accelerate.data_loader import BatchSamplerShard, DataLoaderAdapter, DataLoaderDispatcher, SeedableRandomSampler
from torch.utils.data import BatchSampler

from asyncloader.loaders.loader import DataLoader
from asyncloader.loaders.stateful_loader import StatefulDataLoader
from asyncloader.options.checks import warn_only_of
from asyncloader.options.clone import constructor_arguments, made_from
from asyncloader.options.declaration import is_iterable

_TORCHS_OPTIONS = inspect.signature(torch.utils.data.DataLoader).parameters


def prepare(accelerator: Any, *objects: Any, **options: Any) -> Any:
    """Call `accelerator.prepare(*objects, **options)`, and keep our loaders.

    Args:
        accelerator: an `accelerate.Accelerator`.
        objects: models, optimizers, loaders, schedulers.
        options: `prepare`'s own, for example ``device_placement``.

    Returns:
        The result of `prepare`: one object for one, a tuple for several, in the same order.

    Raises:
        ValueError: as `adopt`.
    """
    prepared = accelerator.prepare(*objects, **options)
    for mine, theirs in zip(objects, prepared if len(objects) > 1 else (prepared,), strict=True):
        if isinstance(mine, DataLoader):
            adopt(theirs, mine)
    return prepared


def log_stats(accelerator: Any, loader: Any, step: int, prefix: str = "", *, interval: bool = False) -> None:
    """Log a prepared loader's `stats()` to the accelerator's trackers.

    Args:
        accelerator: an `accelerate.Accelerator`, after its `init_trackers`. It logs on its main process alone, whose
            loader's figures these are.
        loader: a loader that `prepare` or `adopt` returned, or one of ours.
        step: number of the training step.
        prefix: put before every key, as ``"train/"``.
        interval: count only from the last call with ``interval=True`` on.

    Raises:
        TypeError: the loader, or the loader inside the wrapper, is not one of asyncloader.
    """
    inside = loader.base_dataloader if issubclass(type(loader), DataLoaderAdapter) else loader
    if not isinstance(inside, DataLoader):
        raise TypeError(f"log_stats takes a loader of asyncloader, but got a {type(inside).__name__}; see prepare")
    accelerator.log(inside.stats(prefix, interval=interval), step=step)


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Do for a prepared loader of ours the work of `accelerate.skip_first_batches`, which builds a stock loader.

    Not needed after `accelerator.load_state`, which resumes at the position by itself; a loaded position is reset here.
    In seeded mode nothing is read for skipped batches, and the other batches are those of the whole epoch, to the bit.
    """
    wrapper = issubclass(type(loader), DataLoaderAdapter)
    inside = loader.base_dataloader if wrapper else loader
    skipping = _skip_first_batches(loader, num_batches)
    if not isinstance(inside, DataLoader):
        return skipping
    if wrapper:
        inside.load_state_dict({})  # else the next epoch would resume at a loaded position
    if inside._asyncloader_options.seed is None or is_iterable(inside):
        return adopt(skipping, inside)
    ours = made_from(inside, _skipping(type(inside), num_batches), {}, inside)
    if not wrapper:
        return ours
    _set_num_processes(ours, getattr(inside.batch_sampler, "num_processes", 1))
    skipping.base_dataloader = ours
    return skipping


def adopt(prepared: Any, like: DataLoader[Any] | None = None) -> Any:
    """Replace the loader inside one of Accelerate's wrappers by ours with the same arguments.

    In seeded mode the loader itself shards batches among the processes, as without Accelerate, instead of Accelerate's
    `BatchSamplerShard` (unless that wraps the user's own batch sampler, or ``even_batches`` is False). If that would
    fill up the last batches, ``on_uneven="drop"`` becomes ``"pad"``, so that no sample is left out.

    Args:
        prepared: a `DataLoaderShard`, `DataLoaderDispatcher` or `SkipDataLoader`; or a plain loader, which is rebuilt.
        like: a loader of ours, whose class and options the new loader gets. Default: our `StatefulDataLoader` for
            torchdata's, else our `DataLoader`, with default options.

    Returns:
        `prepared` itself; a new loader if it was a plain one.

    Raises:
        TypeError: `prepared` is none of these (on a TPU Accelerate adds another wrapper), or the loader inside is of a
            third class with a state, which would be lost.
        ValueError: ``use_stateful_dataloader=True``, but several processes get their batches from one, or each reads a
            stream, while Accelerate keeps one state for all. Or `like` has another rank than Accelerate's.
    """
    with warn_only_of(()):
        return _adopt(prepared, like)


def _adopt(prepared: Any, like: DataLoader[Any] | None) -> Any:
    # `type`, here and below: the wrappers report the class of the loader inside them.
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
        inside = prepared.base_dataloader = _replacement(prepared, inside, like)
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
    """Return the options that only our loaders have."""
    if like is None:
        return {}
    return {name: value for name, value in constructor_arguments(like, {}).items() if name not in _TORCHS_OPTIONS}


def _replacement(prepared: Any, inside: Any, like: DataLoader[Any] | None) -> DataLoader[Any]:
    kind, changes = _class_for(inside, like), _own(like)
    seeded, batches, processes = changes.get("seed") is not None, inside.batch_sampler, 1
    if is_iterable(inside):
        batches = None
    for each in (batches, getattr(batches, "batch_sampler", None)):
        sampler = getattr(each, "sampler", None)
        if isinstance(sampler, SeedableRandomSampler) and getattr(sampler, "generator", None) is None:
            # The sampler would make its generator at its first epoch, too late for a loaded state.
            sampler.generator = torch.Generator(torch.get_default_device())
    if type(batches) is BatchSampler:
        changes |= _parts(batches)
    elif seeded and type(batches) is BatchSamplerShard and _shards_as_we_do(batches):
        changes |= _shard_like(batches, changes)
        processes = batches.num_processes
    if seeded and issubclass(type(prepared), DataLoaderDispatcher):
        changes |= {"rank": 0, "world_size": 1}  # one process reads for all
    ours: DataLoader[Any] = kind.from_torch(inside, **changes)
    _set_num_processes(ours, processes)
    return ours


def _shards_as_we_do(shard: Any) -> bool:
    return type(shard.batch_sampler) is BatchSampler and bool(shard.even_batches or shard.drop_last)


def _parts(batches: BatchSampler) -> dict[str, Any]:
    return {"sampler": batches.sampler, "batch_size": batches.batch_size, "drop_last": batches.drop_last}


def _shard_like(shard: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by which a seeded loader gives a process the same batches as the shard would."""
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


def _set_num_processes(ours: DataLoader[Any], processes: int) -> None:
    """Set the number of processes that share a batch on the batch sampler, where `gather_for_metrics` reads it."""
    if processes > 1:
        ours.batch_sampler.num_processes = processes  # type: ignore[union-attr]


def _skipping(kind: type[DataLoader[Any]], first: int) -> type[DataLoader[Any]]:
    """Derive a class of seeded loaders whose epochs begin with batch number `first`."""

    class Skipping(kind):  # type: ignore[valid-type, misc]
        def __iter__(self) -> Any:
            self.load_state_dict({})
            beginning = self.state_dict()
            step = first
            with contextlib.suppress(TypeError):  # its sampler has no length, and reading finds the end
                step = min(first, super().__len__())
            self.load_state_dict({**beginning, "step": step})
            return super().__iter__()

        def __len__(self) -> int:
            return int(max(0, super().__len__() - first))

    return Skipping


# --------------------------------------------------------------------------------------------------------- its state


def _one_state_for_all(prepared: Any, inside: Any) -> bool:
    """Whether one process's state is valid for all processes: Accelerate keeps a single state."""
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
    """Make Accelerate save and load the loader's state, with the epoch's number, which it does not save itself."""
    prepared.use_stateful_dataloader = stateful
    if not stateful:
        return
    epoch = _Epoch(prepared)
    prepared.dl_state_dict = ours.state_dict()
    prepared.adjust_state_dict_for_prefetch = epoch.save
    prepared.load_state_dict = epoch.load
    epoch.save()


class _Epoch:
    """Saves the number of a wrapper's epoch in its state, and restores it.

    The wrapper passes the number to its samplers before each epoch; without it a resumed run would return to epoch 0.
    """

    def __init__(self, wrapper: Any) -> None:
        # Weak, because the wrapper refers to this: a reference cycle would keep its workers until the collector runs.
        self._wrapper = weakref.ref(wrapper)

    def save(self) -> None:
        """Add the number. Accelerate calls this after it has taken the loader's state, to subtract batches that were
        read ahead. Ours needs no such correction: it counts only delivered batches.
        """
        wrapper = self._alive()
        wrapper.dl_state_dict["iteration"] = getattr(wrapper, "iteration", 0)

    def load(self, state_dict: dict[str, Any]) -> None:
        """Load the state and the number, in place of the wrapper's `load_state_dict`."""
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
