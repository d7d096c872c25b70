"""Turns a loader's definition and `workers=` into the dataset that it plans with.

Data path: options -> [served] -> plan.

Without `workers=` that is the dataset which the definition makes here. With it, it is a stand-in that has the served
dataset's kind and length, which the service says, and no samples.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch.utils.data import Dataset, IterableDataset

from asyncloader.service.definition import FUNCTIONS, Defined
from asyncloader.service.extra import check_extra

__all__ = ["ServedDataset", "located"]


class ServedDataset:
    """Stands for a dataset that a service reads.

    Args:
        defined: its definition.
        service: where it is.
        length: its length; None if it has none.
        stateful: whether it has a state of its own.
    """

    def __init__(self, defined: Defined, service: Any, length: int | None, *, stateful: bool) -> None:
        self.defined = defined
        self.service = service
        self._length = length
        if stateful:
            self.state_dict = self.load_state_dict = self._is_elsewhere

    def _is_elsewhere(self, *_: Any) -> NoReturn:
        raise TypeError(f"{self!r} is read by the service's workers, and has no samples here: iterate the loader")

    def __repr__(self) -> str:
        return f"{self.defined!r} at {self.service.url}"


class _Sized(ServedDataset):
    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{self!r} has no length")
        return self._length


class _Map(_Sized, Dataset[Any]):
    def __getitem__(self, index: Any) -> Any:
        self._is_elsewhere()


class _AsyncMap(_Sized, Dataset[Any]):
    async def __getitem__(self, index: Any) -> Any:
        self._is_elsewhere()


class _Stream(ServedDataset, IterableDataset[Any]):
    def __iter__(self) -> Any:
        self._is_elsewhere()


class _SizedStream(_Sized, _Stream):
    pass


class _AsyncStream(ServedDataset):
    def __aiter__(self) -> Any:
        self._is_elsewhere()


class _SizedAsyncStream(_Sized, _AsyncStream):
    pass


_KINDS: dict[tuple[bool, bool, bool], type[ServedDataset]] = {  # iterable, asynchronous, sized
    (False, False, True): _Map,
    (False, True, True): _AsyncMap,
    (True, False, False): _Stream,
    (True, False, True): _SizedStream,
    (True, True, False): _AsyncStream,
    (True, True, True): _SizedAsyncStream,
}


def located(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a loader's arguments with the dataset that it plans with.

    Raises:
        TypeError, ValueError: the arguments do not go with a definition, or with `workers=`.
        ServiceUnavailable: no node of the service was there in time.
    """
    dataset, workers = arguments["dataset"], arguments["workers"]
    defined = dataset.defined if isinstance(dataset, ServedDataset) else dataset
    if workers is None:
        return _here(defined, arguments)
    if not isinstance(defined, Defined):
        raise TypeError(
            f"workers={workers!r} reads what a definition makes, but got a {type(dataset).__name__}: put what makes it "
            "into a function with @asyncloader.definition, and give the loader what that returns"
        )
    if arguments["seed"] is None:
        raise ValueError(f"workers={workers!r} needs seed=: without it random numbers belong to a worker's process")
    for name in FUNCTIONS:
        if arguments[name] is not None:
            raise ValueError(
                f"{name} runs in the service's workers: return it from {defined.definition.name}, beside the dataset"
            )
    if callable(arguments["on_error"]):
        raise ValueError("on_error runs in the service's workers: use 'skip' or 'refill' with workers=")  # noqa: TRY004
    if not arguments["num_workers"]:
        raise ValueError(f"workers={workers!r} needs num_workers, the number of logical workers: at least 1")
    check_extra()
    from asyncloader.service.address import Service
    from asyncloader.service.dialing import ask_facts
    from asyncloader.service.shared import shared_service

    if workers == "shared":
        workers = shared_service(defined)
    service = workers if isinstance(workers, Service) else Service(workers)
    facts = ask_facts(service, defined)
    if service.share and (facts.iterable or facts.stateful):
        raise ValueError(f"share='epoch' is for datasets with an index and without a state, and {defined!r} is not one")
    kind = _KINDS[facts.iterable, facts.asynchronous, facts.length is not None]
    return arguments | {"dataset": kind(defined, service, facts.length, stateful=facts.stateful)}


def _here(defined: Defined, arguments: dict[str, Any]) -> dict[str, Any]:
    dataset, functions = defined.make()
    for name in functions:
        if arguments[name] is not None:
            raise ValueError(f"{name} comes from {defined.definition.name} already, beside its dataset: leave it out")
    return arguments | {"dataset": dataset, **functions}
