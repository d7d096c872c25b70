"""The loaders that feed a card, each set up as its documentation advises. Batches are [images, labels], there."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

import asyncloader

from .gpu_plan import LOADERS, OURS, SPDL_ARENA, SPDL_DROP_IN, SPDLS, TORCH_PREFETCHER, TORCH_TO

AHEAD = 2  # batches for each worker, as torch's prefetch_factor


def available() -> tuple[str, ...]:
    """The loaders that can be had here: SPDL only if it is installed."""
    missing = () if importlib.util.find_spec("spdl") else SPDLS
    return tuple(name for name in LOADERS if name not in missing)


def open_loader(name: str, dataset: Dataset[Any], batch: int, workers: int, device: torch.device) -> Any:
    """The loader called `name` over the dataset in its order: to be iterated, ours by ``async for`` if so called.

    Args:
        name: from `gpu_plan.LOADERS`.
        dataset: map-style.
        batch: samples in a batch.
        workers: worker processes (threads, for SPDL's arena).
        device: where batches come.
    """
    if name in OURS:
        return getattr(asyncloader, name)(dataset, batch_size=batch, num_workers=workers, device=device)
    if name in (TORCH_TO, TORCH_PREFETCHER):
        pin = device.type == "cuda"
        loader = torch.utils.data.DataLoader(dataset, batch_size=batch, num_workers=workers, pin_memory=pin)
        return prefetched(loader, device) if name == TORCH_PREFETCHER else moved(loader, device)
    return SPDL_OPENERS[name](dataset, batch, workers, device)


def moved(loader: Iterable[list[torch.Tensor]], device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Each batch copied in the current stream when it is asked for."""
    for batch in loader:
        yield [tensor.to(device, non_blocking=True) for tensor in batch]


def prefetched(loader: Iterable[list[torch.Tensor]], device: torch.device) -> Iterator[list[torch.Tensor]]:
    """The usual prefetcher: the next batch is copied in a side stream while the consumer works on its batch.

    The consumer's stream waits for the side stream before the next copy is given to it; `record_stream` keeps a batch's
    memory from being given to a later copy while the consumer's kernels still read it.
    """
    if device.type != "cuda":
        yield from moved(loader, device)
        return
    stream = torch.cuda.Stream(device)
    batches = iter(loader)

    def preload() -> list[torch.Tensor] | None:
        batch = next(batches, None)
        if batch is None:
            return None
        with torch.cuda.stream(stream):
            return [tensor.to(device, non_blocking=True) for tensor in batch]

    coming = preload()
    while coming is not None:
        consumer = torch.cuda.current_stream(device)
        consumer.wait_stream(stream)
        batch = coming
        for tensor in batch:
            tensor.record_stream(consumer)
        coming = preload()
        yield batch
        del batch


# ------------------------------------------------------------------------------------------------ SPDL


class Indices(Iterable[list[int]]):
    """The index batches of the dataset, in order."""

    def __init__(self, samples: int, batch: int) -> None:
        self.samples = samples
        self.batch = batch

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, self.samples - self.batch + 1, self.batch):
            yield list(range(first, first + self.batch))


class Fetch:
    """From a list of indices to a collated batch; picklable with its dataset."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __call__(self, indices: list[int]) -> Any:
        return default_collate([self.dataset[index] for index in indices])


def _arena(dataset: Dataset[Any], batch: int, workers: int, device: torch.device) -> Any:
    spdl = importlib.import_module("spdl.pipeline")
    builder = spdl.PipelineBuilder().add_source(Indices(len(dataset), batch))  # type: ignore[arg-type]
    builder = builder.pipe(Fetch(dataset), concurrency=workers, output_order="input").add_sink(AHEAD * workers)
    unit = sum(tensor.nbytes for tensor in default_collate([dataset[0]] * batch))
    make: Callable[..., Any] = spdl.SharedMemorySegmentPool
    # From 0.9 on its pool can be page-locked.
    pinned = {"pin_memory": device.type == "cuda"} if "pin_memory" in inspect.signature(make).parameters else {}
    arena = make(segment_size=unit + 65_536, count=2 * AHEAD * workers, **pinned)
    source = spdl.run_pipeline_in_subprocess(
        builder, num_threads=workers, buffer_size=AHEAD * workers, mp_context="fork", arena=arena
    )
    return _transferred(source, device)


def _drop_in(dataset: Dataset[Any], batch: int, workers: int, device: torch.device) -> Any:
    spdl = importlib.import_module("spdl.dataloader")
    loader = spdl.get_pytorch_dataloader(
        dataset,
        batch_size=None,
        batch_sampler=Indices(len(dataset), batch),  # type: ignore[arg-type]
        num_workers=workers,
        multiprocessing_context="fork",
        in_order=True,
    )
    return _transferred(loader, device)


def _transferred(source: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """SPDL's own way to the device: a stage of one thread, one batch ahead of the consumer."""
    spdl = importlib.import_module("spdl.pipeline")
    with ThreadPoolExecutor(1, "spdl-transfer") as executor:
        builder = spdl.PipelineBuilder().add_source(source).pipe(_transfer(device), executor=executor)
        pipeline = builder.add_sink(1).build(num_threads=1)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()


def _transfer(device: torch.device) -> Callable[[Any], Any]:
    if device.type != "cuda":
        return lambda batch: [tensor.clone() for tensor in batch]
    io = importlib.import_module("spdl.io")
    function: Callable[[Any], Any] = getattr(io, "transfer_tensor_h2d", None) or io.transfer_tensor
    return function


SPDL_OPENERS = {SPDL_ARENA: _arena, SPDL_DROP_IN: _drop_in}
