"""Gives worker threads, and streams, their own answers of `torch.utils.data.get_worker_info` and random numbers.

Data path: none; asked by the user's dataset and transforms.

torch's function returns one variable of its module. A program may have imported the function itself (``from
torch.utils.data import get_worker_info``), so neither another function in torch's module nor the variable can answer by
thread. From the first worker thread on the function therefore has other *code*: in a worker thread, and in whatever
runs in its context (`asyncio` tasks, `asyncio.to_thread`), it returns the thread's own; everywhere else what torch's
code returns, None in the main process.

The same holds for the code of a stream that is read without workers, or in a worker thread.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from asyncloader.base.process_hooks import in_forked_child
from asyncloader.workers.fetch.seeding import WORKERS_OWN, current_sample
from asyncloader.workers.fetch.setup import WorkerSetup

_Base: Any = getattr(torch_worker, "_RNG", object)  # torch has it from 2.13 on


class ThreadRng(_Base):  # type: ignore[misc]
    """The generators of one sample, or of a worker, as torch's ``WorkerInfo.rng``. Each is made when it is asked for.

    Of a sample in seeded mode `torch_generator` and `random_generator` give the numbers that the process-global
    generators give for this sample in a worker process.

    Args:
        key: the seed.
        numpy_seed: that of the numpy generator, of 32 bits.
    """

    _key: int
    _numpy_seed: Any

    def __init__(self, key: int, numpy_seed: Any) -> None:
        # torch's class forbids to set attributes.
        self.__dict__.update(_key=key, _numpy_seed=numpy_seed)

    @cached_property
    def random_generator(self) -> random.Random:
        """A generator of Python's `random` module."""
        return random.Random(self._key)  # noqa: S311 - augmentation, not secrets

    @cached_property
    def torch_generator(self) -> torch.Generator:
        """A CPU generator, which `torch.thread_safe_generator` returns."""
        return torch.Generator().manual_seed(self._key)

    @cached_property
    def numpy_generator(self) -> np.random.Generator:
        """A numpy generator."""
        return np.random.default_rng(self._numpy_seed)


class ContextInfo:
    """What `get_worker_info` returns in one worker thread, or in the code of one stream.

    Args:
        worker_id: the number of the worker, or of the stream.
        setup: of the worker.
        dataset: its copy.
    """

    def __init__(self, worker_id: int, setup: WorkerSetup, dataset: Any) -> None:
        seed = setup.base_seed + worker_id
        self._parts = {"id": worker_id, "num_workers": setup.num_workers, "seed": seed, "dataset": dataset}
        state = torch_worker._generate_state(setup.base_seed, worker_id)  # as torch seeds numpy in a process
        self.own = self._with(ThreadRng(seed, state))

    def now(self) -> Any:
        """Return the `WorkerInfo`: in seeded mode with the generators of the sample that is made."""
        sample = current_sample()
        if sample is None:
            return self.own
        if not hasattr(sample, "info"):
            sample.info = self._with(ThreadRng(sample.key, sample.key >> 32))
        return sample.info

    def _with(self, rng: ThreadRng) -> Any:
        make: Any = torch_worker.WorkerInfo  # before torch 2.13 it takes any fields
        return make(**self._parts, rng=rng, worker_method="thread")


_here: ContextVar[Callable[[], Any] | None] = ContextVar("asyncloader_thread_info", default=None)
"""Returns the answer in this context; None: that of the process."""


def info_here() -> Any:
    """Return the answer of `get_worker_info` in the current context."""
    held = _here.get()
    if held is None:
        return torch_worker._worker_info
    # Two frames above: the caller of `get_worker_info`. torch stacks the tensors of a collate function in a file in
    # /dev/shm if it is told that there is a worker, for a batch that must leave its process. This batch stays.
    return None if sys._getframe(2).f_code is _STACKING else held()


_STACKING = torch_collate.collate_tensor_fn.__code__


def _get_worker_info() -> Any:
    """Its code takes the place of that of torch's function, so it can name nothing but builtins and imports."""
    from asyncloader.workers.fetch.worker_info import info_here

    return info_here()


def answer_with(info: Any) -> None:
    """Have `get_worker_info` return this in the current context from now on.

    Args:
        info: a `WorkerInfo`; or a `ContextInfo`, whose generators are then those of the code.
    """
    in_forked_child(_forget)
    function: Any = torch_worker.get_worker_info
    # Assigning it is one step for other threads: a call runs either code, and both are right for them.
    function.__code__ = _get_worker_info.__code__
    if isinstance(info, ContextInfo):
        _here.set(info.now)
        WORKERS_OWN.set(info.own.rng.torch_generator)
    else:
        _here.set(lambda: info)


def _forget() -> None:
    """In a forked child, which is no worker thread of its parent's, but has the context of the thread that forked."""
    _here.set(None)
    WORKERS_OWN.set(None)


@contextmanager
def answering_with(info: Any) -> Generator[None]:
    """`answer_with` within this context, and nowhere else."""
    here, own = _here.get(), WORKERS_OWN.get()
    answer_with(info)
    try:
        yield
    finally:
        _here.set(here)
        WORKERS_OWN.set(own)
