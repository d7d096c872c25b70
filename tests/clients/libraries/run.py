"""Runs one client library in this process and compares its batches with those that torch's loader gives it.

``python -m tests.clients.libraries.run with_timm early spawn``: first a fork of this process uses the unchanged
library; then this process does, with `install` entered before the library is imported, or after. Every batch must be
the same to the bit, and made by our iterators.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import pickle
import random
import sys
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

import asyncloader
from asyncloader.epoch.sync_inline import SyncInlineIterator
from asyncloader.epoch.sync_iterator import WorkerIterator
from tests.clients.libraries.gaps import fill_torchaudio
from tests.helpers.comparing import assert_same

fill_torchaudio()  # in spawned workers, too, which import this module before they read their dataset

WORKERS = (0, 2)


def main(client: str, when: str, method: str) -> None:
    """Raise an error at the first difference."""
    expected_bytes = _stock(client)
    multiprocessing.set_start_method(method)
    with contextlib.ExitStack() as stack:
        if when == "early":
            stack.enter_context(asyncloader.install())
        library = importlib.import_module(f"tests.clients.{client}")
        if when == "late":
            stack.enter_context(asyncloader.install())
        expected = pickle.loads(expected_bytes)
        for workers in WORKERS:
            with _iterators_made() as made:
                found = _batches(library.batches, workers)
            assert_same(found, expected[workers], f"{workers} workers")
            assert made == {WorkerIterator if workers else SyncInlineIterator}, f"{workers} workers: {made}"
        # torch makes these iterators itself, and the batches must be the same
        if hasattr(library, "batches_of_threads"):
            with _iterators_made() as made:
                found = _batches(library.batches_of_threads, 2)
            assert_same(found, expected["threads"], "threads")
            assert made == {_MultiProcessingDataLoaderIter}, f"threads: {made}"


def _stock(client: str) -> bytes:
    """Return the library's batches with torch's loader, from a process of its own: here it is not imported yet.

    Its workers are forked, whatever ours are: the batches do not depend on that, and spawned workers import the
    library again in each epoch, which takes minutes.
    """
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_send_stock, args=(client, there))
    child.start()
    there.close()
    try:
        return here.recv_bytes()
    finally:
        child.join()


def _send_stock(client: str, to: Any) -> None:
    library = importlib.import_module(f"tests.clients.{client}")
    with _iterators_made() as made:
        batches: dict[Any, Any] = {workers: _batches(library.batches, workers) for workers in WORKERS}
        if hasattr(library, "batches_of_threads"):
            batches["threads"] = _batches(library.batches_of_threads, 2)
    assert made == {_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter}, made
    to.send_bytes(pickle.dumps(batches))


def _batches(make: Callable[[int], Any], workers: int) -> Any:
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    batches = make(workers)
    assert all(batches.values()), "nothing to compare"
    return batches


@contextlib.contextmanager
def _iterators_made() -> Generator[set[type]]:
    """Within this context, collect the classes of all iterators that are made, torch's and ours."""
    made: set[type] = set()
    with contextlib.ExitStack() as stack:
        for kind in (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter, SyncInlineIterator, WorkerIterator):
            stack.callback(setattr, kind, "__init__", kind.__init__)
            kind.__init__ = _noting(made, kind, kind.__init__)  # type: ignore[method-assign]
        yield made


def _noting(made: set[type], kind: type, init: Any) -> Any:
    @functools.wraps(init)
    def noted(*args: Any, **kwargs: Any) -> None:
        made.add(kind)
        init(*args, **kwargs)

    return noted


if __name__ == "__main__":
    main(*sys.argv[1:])
