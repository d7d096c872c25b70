"""Reads a loader's constructor arguments back from it, to make the same loader again or a changed one.

Data path: none. Used by `clone` and `from_torch`, and so by the integrations with frameworks that build a loader of
their own from the attributes of the user's.

torch keeps the objects that it made of its arguments, not the arguments: a sampler instead of ``shuffle=True``, a
batch sampler instead of a batch size. Passed back unchanged they would exclude one another, or tie a new dataset to the
length of the old one. So whatever torch made by default is left out, to be made again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import RandomSampler, SequentialSampler, default_collate, default_convert
from torch.utils.data import _DatasetKind as DatasetKind
from torch.utils.data.datapipes.datapipe import _IterDataPipeSerializationWrapper, _MapDataPipeSerializationWrapper

from asyncloader.options.auto import AUTO
from asyncloader.options.checks import warn_only_of
from asyncloader.options.declaration import DEFAULTS, OPTION_NAMES, OUR_OPTION_NAMES, LoaderSpec
from asyncloader.options.objects import flattened, grouped
from asyncloader.options.unknown_dataset import without_asking
from asyncloader.samplers.positions import Positions
from asyncloader.samplers.seeded import SeededSampler

T = TypeVar("T")

_ONLY_WITH_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
_BATCHING = ("batch_size", "shuffle", "sampler", "drop_last")
_PLAIN = [
    name
    for name in OPTION_NAMES
    if name not in ("dataset", "collate_fn", "batch_sampler", *_BATCHING, *OUR_OPTION_NAMES)
]


def made_from(
    loader: torch.utils.data.DataLoader[Any],
    make: Callable[..., T],
    changes: Mapping[str, Any],
    own: object | None = None,
) -> T:
    """A loader like `loader`, made by `make`; for the rest see `constructor_arguments`.

    Of options without an effect it warns only if they are among the changes.
    """
    with warn_only_of(flattened(changes)):
        return make(**constructor_arguments(loader, changes, own))


def constructor_arguments(
    loader: torch.utils.data.DataLoader[Any], changes: Mapping[str, Any], own: object | None = None
) -> dict[str, Any]:
    """Keyword arguments for a constructor that make a loader like `loader`, `changes` applied.

    Args:
        loader: torch's loader or one of ours; its options as they are now.
        changes: arguments that replace the loader's, and fields of those that are objects. ``batch_sampler`` replaces
            all arguments about batches; ``sampler`` replaces ``shuffle`` and vice versa. ``num_workers=0`` drops the
            arguments that need workers.
        own: the loader itself, if its own class is called. A user's subclass whose constructor takes an argument with
            the name of one of our options keeps the value under that name. Default None: one of our classes is.
    """
    if isinstance(loader, LoaderSpec):
        loader = without_asking(loader)
    arguments: dict[str, Any] = {"dataset": _plain_dataset(loader.dataset)}
    for name in _PLAIN:
        if hasattr(loader, name):  # older versions of torch lack some
            arguments[name] = getattr(loader, name)
    if getattr(loader, "_asyncloader_choice", None) is not None:
        arguments["num_workers"] = AUTO
    arguments |= _ours(loader, own)
    if loader.collate_fn is not (default_collate if loader._auto_collation else default_convert):
        arguments["collate_fn"] = loader.collate_fn
    if not changes.get("num_workers", loader.num_workers):
        # torch refuses these arguments without workers.
        for name in _ONLY_WITH_WORKERS:
            del arguments[name]
    elif not loader.num_workers:
        del arguments["prefetch_factor"]  # None, there
    arguments |= _batching(loader, changes)
    return arguments | grouped(changes, arguments)


def _ours(loader: torch.utils.data.DataLoader[Any], own: object | None) -> dict[str, Any]:
    if isinstance(loader, LoaderSpec):
        given = {name: getattr(loader._asyncloader_options, name) for name in OUR_OPTION_NAMES}
        if own is not None:
            given |= {name: getattr(own, name) for name in vars(own).keys() & _own_arguments(type(own))}
    else:
        # The only attribute of another class, torchdata's StatefulDataLoader, that has the same meaning here.
        given = {name: getattr(loader, name) for name in ("snapshot_every_n_steps",) if hasattr(loader, name)}
    return {name: value for name, value in given.items() if value != DEFAULTS[name]}


def _own_arguments(kind: type) -> set[str]:
    """Our options that the constructor of a user's subclass takes by name."""
    if kind.__init__.__module__.partition(".")[0] == __name__.partition(".")[0]:  # type: ignore[misc]
        return set()
    return inspect.signature(kind).parameters.keys() & set(OUR_OPTION_NAMES)


def _plain_dataset(dataset: Any) -> Any:
    if isinstance(dataset, (_IterDataPipeSerializationWrapper, _MapDataPipeSerializationWrapper)):
        return dataset._datapipe
    return dataset


def _batching(loader: torch.utils.data.DataLoader[Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    if changes.get("batch_sampler") is not None:
        return {}
    batching: dict[str, Any] = {"batch_size": loader.batch_size}
    if changes.get("batch_size", loader.batch_size) is not None:
        batching["drop_last"] = loader.drop_last
    if loader._dataset_kind == DatasetKind.Iterable:
        return batching
    if loader.batch_size is None and loader.batch_sampler is not None:  # the user's own
        if "batch_sampler" in changes or any(name in changes for name in _BATCHING):
            return {}
        return {"batch_sampler": loader.batch_sampler}
    if "sampler" not in changes and "shuffle" not in changes:
        batching |= _order(loader)
    return batching


def _order(loader: torch.utils.data.DataLoader[Any]) -> dict[str, Any]:
    sampler = loader.sampler
    if sampler is vars(loader).get("_asyncloader_shuffled", ...):
        return {"shuffle": True}
    if isinstance(sampler, Positions):
        return {}  # the dataset's own order, which the constructor chooses
    source = getattr(sampler, "data_source", None)
    if source is loader.dataset or source is _plain_dataset(loader.dataset):
        if type(sampler) is SequentialSampler:
            return {}
        if (
            isinstance(loader, LoaderSpec)
            and type(sampler) is SeededSampler
            and sampler.seed == loader._asyncloader_options.seed
        ):
            return {"shuffle": True} if sampler.shuffle else {}
        if (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and sampler._num_samples is None
            and sampler.generator is loader.generator
        ):
            return {"shuffle": True}
    return {"sampler": sampler}
