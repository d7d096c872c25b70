"""Imports the user's function, calls it, and makes the loader that a run reads of the loader that it returns.

Data path: module:make_loader -> [target] -> runs, causes. In the processes of `server` only.
"""

from __future__ import annotations

import importlib
import inspect
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncloader.async_loader import AsyncDataLoader
from asyncloader.bridge import run_in_thread
from asyncloader.loader import DataLoader
from asyncloader.options.declaration import LoaderSpec
from asyncloader.samplers.distributed import replicas
from asyncloader.verification.disturbances import LoaderFacts
from asyncloader.workers.fetch.dataset_kinds import is_async_dataset

_PLAIN_ORDERS = [
    (sampler, batch_sampler)
    for sampler in (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler)
    for batch_sampler in (torch.utils.data.BatchSampler, type(None))
]


class CannotVerify(ValueError):
    """The target makes no loader that can be verified. The text says why."""


def import_target(target: str) -> Callable[[], Any]:
    """Import the function that ``"module:name"``, or ``"file.py:name"``, names.

    Raises:
        CannotVerify: the function does not exist.
        Exception: whatever the module raises.
    """
    module_name, _, name = target.rpartition(":")
    if not module_name or not name:
        raise CannotVerify(f"{target!r} names no function: give module:make_loader, or file.py:make_loader")
    folder, file = Path.cwd(), None
    if module_name.endswith(".py"):
        file = Path(module_name).resolve()
        folder, module_name = file.parent, file.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise CannotVerify(f"{target!r}: {folder} and Python's path have no module {error.name!r}") from error
    other = getattr(found, "__file__", None)
    if file is not None and (other is None or Path(other).resolve() != file):
        where = other or "a module of Python itself"
        raise CannotVerify(f"{target!r}: `import {module_name}` gives {where}, which hides it: rename the file")
    for part in name.split("."):
        if not hasattr(found, part):
            raise CannotVerify(f"{target!r}: {getattr(found, '__name__', found)} has no {part!r}")
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def make_loader(make: Callable[[], Any], ambient: int) -> torch.utils.data.DataLoader[Any]:
    """Call the user's function, and return the loader; an async loader's options.

    Args:
        make: the function; it may be async.
        ambient: seeds the process's generators before.

    Raises:
        CannotVerify: it returns something else.
    """
    random.seed(ambient)
    np.random.seed(ambient)
    torch.manual_seed(ambient)
    loader: Any = make()
    if inspect.iscoroutine(loader):
        loader = run_in_thread(loader)
    if isinstance(loader, AsyncDataLoader):
        loader = loader._spec
    if not isinstance(loader, torch.utils.data.DataLoader):
        raise CannotVerify(f"the function returned a {type(loader).__name__}: let it return a DataLoader")
    if isinstance(loader, LoaderSpec) and loader._asyncloader_options.workers not in (None, "threads"):
        raise CannotVerify("the loader's workers are a service: give a loader whose workers are processes")
    return loader


def facts(loader: torch.utils.data.DataLoader[Any]) -> LoaderFacts:
    """Describe a loader."""
    options = loader._asyncloader_options if isinstance(loader, LoaderSpec) else None
    kind = type(loader) if options is None or isinstance(loader, DataLoader) else AsyncDataLoader
    iterable = loader._dataset_kind == torch.utils.data._DatasetKind.Iterable
    size, context = loader.batch_size, loader.multiprocessing_context
    halves = size is not None and size % 2 == 0 and loader.collate_fn is torch.utils.data.default_collate
    single = options is None or (options.rank is None and options.group is None and options.balance is None)
    # A sampler that divides the samples among ranks by itself has no batches of a single rank to compare with.
    single = single and replicas(loader.sampler, loader.batch_sampler) is None
    return LoaderFacts(
        name=f"{kind.__module__.partition('.')[0]}.{kind.__name__}",
        ours=options is not None,
        seeded=options is not None and options.seed is not None,
        iterable=bool(iterable),
        workers=loader.num_workers,
        threads=options is not None and options.workers == "threads",
        method=getattr(context, "get_start_method", torch.multiprocessing.get_start_method)(),
        asynchronous=is_async_dataset(loader.dataset),
        stateful=hasattr(loader.dataset, "state_dict"),
        sampler=not iterable and (type(loader.sampler), type(loader.batch_sampler)) not in _PLAIN_ORDERS,
        ranks=bool(halves and single and not iterable),
    )


def changed(loader: torch.utils.data.DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return the loader that a run reads: like the user's, on the CPU, and seeded.

    Args:
        loader: the user's.
        changes: arguments that replace the user's.
    """
    options = loader._asyncloader_options if isinstance(loader, LoaderSpec) else None
    always: dict[str, Any] = {"device": None, "pin_memory": False}
    if options is None or options.seed is None:
        # A seed excludes torch's generator, from which shuffle=True would draw: the seed's order is verified then.
        always |= {"seed": 0, "generator": None}
    if loader._dataset_kind == torch.utils.data._DatasetKind.Iterable and not hasattr(loader.dataset, "state_dict"):
        always["allow_replay"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these options are not the user's, whose module may make warnings errors
        return DataLoader.from_torch(loader, **(always | changes))
