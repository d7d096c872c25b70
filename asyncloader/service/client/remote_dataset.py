"""Turns a loader's definition and `workers=` into the dataset that it plans with.

Data path: options -> [remote_dataset] -> plan.

Without `workers=` that is the dataset itself, made in this process. With `workers=` it has no samples: at first it is
an `UnknownDataset`, as a constructor must not wait for the network; from the first `iter()` or `len()` on it is a
`RemoteDataset` of the kind and length that a node has reported.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

from torch.utils.data import Dataset, IterableDataset, default_collate, default_convert

from asyncloader.base.bridge import in_thread
from asyncloader.samplers.positions import PlacedSamples, ShardStream
from asyncloader.service.protocol.definition import (
    FUNCTIONS,
    Defined,
    PickledDefinition,
    check_extra,
    pickle_definition,
)
from asyncloader.workers.source import THREADS

if TYPE_CHECKING:
    from asyncloader.ranks.agreement import Agreement
    from asyncloader.ranks.exchange import RankExchange
    from asyncloader.remote.shard_splitting import EpochPlan
    from asyncloader.service.protocol.records import DatasetInfo
    from asyncloader.service.protocol.shard_plan import Catalog, Plan, PlanRequest


class RemoteDataset:
    """Stands for a dataset that a service reads.

    Args:
        defined: its definition.
        service: the service.
        info: its kind and length, which must be the same at every node.
    """

    def __init__(self, defined: Defined, service: Any, info: DatasetInfo) -> None:
        self.defined = defined
        self.service = service
        self.info = info
        self.catalog: Catalog | None = None
        """If the loader assigns its shards: the catalog of the newest plan."""
        # The loader looks for these two attributes to know whether a dataset has a state. With assigned shards it keeps
        # the position itself.
        if info.stateful and info.shuffle is None:
            self.state_dict = self.load_state_dict = self._is_elsewhere

    async def _ask_plan(self, request: PlanRequest) -> Plan:
        """Have a node plan an epoch. Errors as `ask_plan`."""
        from asyncloader.service.client.connect import ask_plan

        given_up = threading.Event()
        try:
            return await in_thread(partial(ask_plan, self.service, self.defined, request, given_up))
        finally:
            given_up.set()  # a cancelled epoch must not leave a thread that looks for a node

    def _is_elsewhere(self, *_: Any) -> NoReturn:
        raise TypeError(f"{self!r} is read by the service's workers, and has no samples here: iterate the loader")

    def __repr__(self) -> str:
        return f"{self.defined!r} at {self.service.url}"


class UnknownDataset(RemoteDataset, Dataset[Any]):
    """Stands for a dataset that a service reads until a node has been asked about it.

    To torch's constructor it is a map dataset: those arguments are checked that must be right for any dataset.

    Args:
        defined: its definition.
        place: the service, or an engine: `serve` takes a pickled definition, and returns the service that reads it.
    """

    def __init__(self, defined: Defined, place: Any) -> None:
        self.defined = defined
        self._place = place

    def ask(self) -> RemoteDataset:
        """Ask a node about the dataset; have the engine start nodes before, if there is one. Blocks.

        Raises:
            ServiceUnavailable: no node of the service could be asked in time.
        """
        from asyncloader.service.client.connect import ask_dataset_info

        defined, service = self.defined, self._place
        if hasattr(service, "serve"):
            service = service.serve(defined.definition)
        info = ask_dataset_info(service, defined)
        if info.shuffle is not None:
            return _Shards(defined, service, info)
        sized = info.length is not None
        kind = _class_for(iterable=info.iterable, asynchronous=info.asynchronous, sized=sized)
        return kind(defined, service, info)

    def __len__(self) -> int:
        return len(self.ask())  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        self._is_elsewhere()

    def __repr__(self) -> str:
        return f"{self.defined!r} at {getattr(self._place, 'url', self._place)}"


def _length(self: RemoteDataset) -> int:
    assert self.info.length is not None
    return self.info.length


async def _await_elsewhere(self: RemoteDataset, _: Any) -> Any:
    self._is_elsewhere()


@cache
def _class_for(*, iterable: bool, asynchronous: bool, sized: bool) -> type[RemoteDataset]:
    """Return the class of a kind of datasets: a loader decides by type and methods, as torch's does."""
    elsewhere = RemoteDataset._is_elsewhere
    methods: dict[str, Any] = {"__len__": _length} if sized else {}
    if iterable:
        methods["__aiter__" if asynchronous else "__iter__"] = elsewhere
    else:
        methods["__getitem__"] = _await_elsewhere if asynchronous else elsewhere
    bases: tuple[Any, ...] = () if iterable and asynchronous else (IterableDataset if iterable else Dataset,)
    return type("RemoteDataset", (RemoteDataset, *bases), methods)


class _Shards(RemoteDataset, ShardStream, IterableDataset[Any]):
    """A dataset whose shards the loader assigns; a node plans each epoch. Interface as `RemoteIterableDataset`."""

    def __init__(self, defined: Defined, service: Any, info: DatasetInfo) -> None:
        super().__init__(defined, service, info)
        self.shuffle_buffer = info.shuffle or 0
        self.shard_urls: Sequence[str] = ()
        """The shards' names, from the first plan on."""

    def __iter__(self) -> Any:
        self._is_elsewhere()

    __aiter__ = __iter__
    open_worker_stream = RemoteDataset._is_elsewhere

    def shuffled(self) -> Self:
        """Return this dataset, if its definition shuffles samples and shards. A loader's ``shuffle=True``.

        Raises:
            ValueError: it does not, or has no fixed streams.
        """
        if not (self.info.shuffle and self.info.shuffle_shards):
            raise ValueError(
                "shuffle=True does not reach a service's dataset of shards, which shuffles by itself: give "
                "shuffle_buffer= in its definition, and leave shuffle= out"
            )
        return self

    async def list_together(self, agreement: Agreement) -> None:
        """Take part in what ranks do before their first plan. The nodes list the shards."""
        from asyncloader.ranks.exchange import in_daemon

        await in_daemon(agreement.share_list)

    async def plan(self, workers: int, rank: int, ranks: int, key: int | None, *, common: bool = True) -> EpochPlan:
        """Have a node plan the epoch. See `RemoteIterableDataset.plan`.

        Raises:
            ServiceUnavailable: no node could be reached in time.
            ValueError: a node sent an invalid plan.
        """
        from asyncloader.remote.shard_splitting import CatalogRange, EpochPlan, EpochShares, is_catalog_range
        from asyncloader.service.protocol.shard_plan import Catalog, PlanRequest

        known = "" if self.catalog is None else self.catalog.fingerprint
        plan = await self._ask_plan(PlanRequest(workers, rank, ranks, key, common, known))
        names = self.shard_urls if plan.fingerprint == known else plan.names
        # The plan comes from a node, which is not trusted: its numbers become indices of lists.
        if not all(is_catalog_range(each, len(names)) for assignment in plan.assignments for each in assignment):
            raise ValueError("broken stream: a plan with ranges that cannot be")
        # Both, and only now: to a loader that has a plan's fingerprint, a node does not send the names again.
        self.shard_urls, self.catalog = names, Catalog(workers, ranks, plan.fingerprint)
        assignments = [tuple(CatalogRange(*each) for each in assignment) for assignment in plan.assignments]
        return EpochPlan(assignments, EpochShares(ranks, plan.samples, plan.left_out))

    def fixed_streams(self, seed: int) -> _FixedStreams | Self:
        """Return the dataset as a loader with this seed reads it. As `RemoteIterableDataset.fixed_streams`."""
        return self if self.info.streams is None else _FixedStreams(self, seed)


class _FixedStreams(RemoteDataset, PlacedSamples, Dataset[Any]):
    """Fixed streams, whose samples a node counts and a service's workers read. Interface as `FixedStreams`.

    Args:
        source: the dataset.
        seed: the loader's.
    """

    def __init__(self, source: _Shards, seed: int) -> None:
        self.defined, self.service, self.info = source.defined, source.service, source.info
        self.source = source
        self.seed = seed
        self._planned: list[tuple[Catalog, int]] = []  # and the samples; shared with the iterators' copies

    async def __getitem__(self, position: int) -> Any:
        self._is_elsewhere()

    def for_iterator(self) -> Self:
        """As `FixedStreams.for_iterator`."""
        return copy.copy(self)

    @property
    def catalog(self) -> Catalog | None:  # type: ignore[override]
        """The shards of the plan, with which the workers begin."""
        return self._planned[0][0] if self._planned else None

    @property
    def samples(self) -> int | None:
        """As `FixedStreams.samples`."""
        return self._planned[0][1] if self._planned else None

    @property
    def lanes(self) -> int:
        """As `FixedStreams.lanes`."""
        from asyncloader.remote.stream_order import LANES

        return LANES

    elastic: bool | None = None
    """As `PlannedDataset.elastic`: the workers of a service know no orders of a state."""

    def left(self, before: Sequence[Any], epoch: int) -> int:  # noqa: ARG002 - the interface
        """As `FixedStreams.left`."""
        self._is_elsewhere()

    def described(self) -> dict[str, Any]:
        """As `FixedStreams.described`."""
        return {
            "streams": self.info.streams,
            "shuffle_buffer": self.info.shuffle,
            "shuffle_shards": self.info.shuffle_shards,
            "shards": self._planned[0][0].fingerprint if self._planned else None,
        }

    async def plan_streams(self, batch: int, ranks: RankExchange | None = None) -> None:
        """Have a node count the samples, and compare them with those of the other ranks' nodes. See
        `FixedStreams.plan_streams`.

        Raises:
            ServiceUnavailable: no node could be reached in time.
        """
        from asyncloader.ranks.exchange import together

        await together(self._plan(batch), ranks)
        if ranks is not None:
            catalog, samples = self._planned[0]
            await ranks.compare({"samples": samples, "digest of the shards": catalog.fingerprint})

    async def _plan(self, batch: int) -> None:
        from asyncloader.service.protocol.shard_plan import Catalog, PlanRequest

        if not self._planned:
            plan = await self._ask_plan(PlanRequest(1, 0, 1, None, True, ""))
            if plan.samples is None:
                raise ValueError("broken stream: a plan of fixed streams without their samples")
            self._planned[:] = [(Catalog(1, 1, plan.fingerprint, batch), plan.samples)]
        catalog, samples = self._planned[0]
        self._planned[:] = [(catalog._replace(batch=batch), samples)]


def locate(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a loader's arguments with the dataset that it plans with: made here, or an `UnknownDataset`. Asks no node.

    Raises:
        TypeError, ValueError: the arguments do not fit a definition, or `workers=`.
    """
    dataset, workers = arguments["dataset"], arguments["workers"]
    defined = dataset.defined if isinstance(dataset, RemoteDataset) else dataset
    if workers is None or workers == THREADS:
        return arguments if not isinstance(defined, Defined) else _here(defined, arguments)
    place = _place(workers)
    engine: Any = place if hasattr(place, "serve") else None
    if engine is None and not isinstance(defined, Defined):
        raise TypeError(
            f"workers={workers!r} reads what a definition makes, but got a {type(dataset).__name__}: put what makes it "
            "into a function with @asyncloader.definition, and give the loader what that returns"
        )
    if arguments["seed"] is None:
        raise ValueError(f"workers={workers!r} needs seed=: without it random numbers belong to a worker's process")
    # A framework makes a loader of another loader's attributes. That loader's `collate_fn` is torch's, because the
    # function of its dataset runs in the workers, and must not be replaced.
    if isinstance(dataset, RemoteDataset) and arguments["collate_fn"] in (default_collate, default_convert):
        arguments = arguments | {"collate_fn": None}
    functions = {name: arguments[name] for name in FUNCTIONS if arguments[name] is not None}
    for name in functions:
        # Functions can be sent with a pickled dataset only: another dataset is made from the definition's name.
        if isinstance(defined, Defined) and not isinstance(defined.definition, PickledDefinition):
            raise ValueError(  # noqa: TRY004
                f"{name} runs in the service's workers: return it from {defined.definition.name}, beside the dataset"
            )
    if callable(arguments["on_error"]):
        raise ValueError("on_error runs in the service's workers: use 'skip' or 'refill' with workers=")  # noqa: TRY004
    if not arguments["num_workers"]:
        raise ValueError(f"workers={workers!r} needs num_workers, the number of logical workers: at least 1")
    # Imported only now: without `workers=` a loader needs neither msgspec nor any of this.
    check_extra()
    from asyncloader.service.protocol.handshake import Hello

    if engine is not None:
        dataset = UnknownDataset(pickle_definition(defined, functions), engine)
        return arguments | dict.fromkeys(functions) | {"dataset": dataset}
    Hello.of(defined)  # raises here for arguments that cannot be sent
    return arguments | {"dataset": UnknownDataset(defined, place)}


def _place(workers: Any) -> Any:
    """Return the place that `workers=` names: a `Service`, or an engine.

    Raises:
        TypeError, ValueError: it names none.
    """
    from asyncloader.service.protocol.address import Service

    if isinstance(workers, str) and ":" in workers:
        return Service(workers)
    if isinstance(workers, Service) or (hasattr(workers, "serve") and not isinstance(workers, type)):
        return workers
    hint = ""
    if workers == "shared":
        hint = "It was removed: start asyncloader serve --listen unix:/path before the ranks, and give its address. "
    elif isinstance(workers, int) and workers > 1:
        hint = f"Did you mean num_workers={workers}? "
    elif isinstance(workers, list | tuple | set):
        hint = "Several addresses are one text, with commas between them. "
    raise (ValueError if isinstance(workers, str) else TypeError)(
        f"workers={workers!r} names no place. {hint}For processes of this machine leave workers= out, and give "
        f"num_workers=; else give {THREADS!r}, the address of a service (tcp://host:port or unix:/path), a Service or "
        "an engine"
    )


def _here(defined: Defined, arguments: dict[str, Any]) -> dict[str, Any]:
    dataset, functions = defined.make()
    for name in functions:
        if arguments[name] is not None:
            raise ValueError(f"{name} comes from {defined.definition.name} already, beside its dataset: leave it out")
    return arguments | {"dataset": dataset, **functions}
