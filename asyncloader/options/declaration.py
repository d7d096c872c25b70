"""Declares the options of all loaders, once, and holds them as torch's loader does.

Data path: none; read when iteration begins (`epoch_config.py`).

The constructor of `LoaderOptions` is the declaration: names, types and defaults are its signature, and the meaning of
each option is in its docstring, where editors find it. `checks.CHECKS` has the check of each of ours. Everything
else that lists options is derived from these two.

`LoaderSpec` is a `torch.utils.data.DataLoader` with our options. Both loaders are based on it: the sync one *is* one,
the async one *has* one.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import AsyncIterable, Callable, Collection, Iterable, Iterator
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias

import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, Sampler
from torch.utils.data import _DatasetKind as DatasetKind
from typing_extensions import TypeVar

from asyncloader.base.bridge import run_in_thread
from asyncloader.base.topology import RankGroupLike, topology
from asyncloader.delivery.accelerator import DeviceLike
from asyncloader.options.auto import AUTO, AutoWorkers, check_choice, first_number
from asyncloader.options.checks import (
    ABOUT_DATASET,
    CHECKS,
    check_numbers,
    checks_of,
    is_seed,
    warn_without_effect,
)
from asyncloader.options.objects import OPTION_OBJECTS, DeviceOptions, Recovery, Tuning, flattened, unknown_option
from asyncloader.options.unknown_dataset import DEPENDING, AskedAttribute, Unknown, ask_dataset
from asyncloader.samplers.async_sampler import AsyncIndexSource, PositionSource, as_async_source
from asyncloader.samplers.balance import Balance
from asyncloader.samplers.distributed import OnUneven, rank_view
from asyncloader.samplers.generators import DRAWING
from asyncloader.samplers.positions import LoaderDataset, Positions
from asyncloader.samplers.seeded import SeededSampler, with_seeded_draws
from asyncloader.service.client.remote_dataset import RemoteDataset, UnknownDataset, locate
from asyncloader.service.protocol.definition import Defined
from asyncloader.workers.fetch.dataset_kinds import assigns_shards, is_async_stream

OnError: TypeAlias = Literal["raise", "skip", "refill"] | Callable[[Any, Exception], Any]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
B_co = TypeVar("B_co", covariant=True, default=Any)


class LoaderOptions(Generic[T_co, B_co]):
    """The loaders' options: the base of every loader, which inherits the constructor and says what becomes of them.

    Generic in the samples that `collate_fn` gets and in the batches that it returns; without one batches are `Any`.
    """

    def __init__(
        self,
        dataset: Dataset[T_co] | AsyncIterable[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | AsyncIterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | AsyncIterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[T_co]], B_co] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        multiprocessing_context: BaseContext | str | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int | None = 1,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        group: RankGroupLike = None,
        on_uneven: OnUneven = "drop",
        balance: Balance | None = None,
        concurrency: int | None = None,
        decode: Callable[[Any], Any] | None = None,
        on_error: OnError = "raise",
        max_worker_restarts: int | None = None,
        workers: Any = None,
        device: DeviceLike = None,
        recovery: Recovery = Recovery(),
        tuning: Tuning = Tuning(),
        device_options: DeviceOptions = DeviceOptions(),
    ) -> None:
        """Takes torch's arguments, with torch's meanings, checks and errors; then, by keyword, those of asyncloader.

        Args:
            dataset: A map dataset (`__getitem__`, `__len__`) or an iterable one; each may be async.
            batch_size: Samples in a batch; `None`: no batching, samples come as they are.
            shuffle: `True`: a new order each epoch, drawn from torch's generator or from `seed`; of a
                `RemoteIterableDataset`, of its shards, and of its `shuffle_buffer`.
            sampler: The order, as an iterable of indices, also an async one; excludes `shuffle`.
            batch_sampler: An iterable of lists of indices, also an async one; excludes `batch_size`, `shuffle`,
                `sampler` and `drop_last`.
            num_workers: Worker processes, or threads; `0`: fetch in the main process; `"auto"`: the loader chooses.
                A trial of some seconds before the first epoch finds the number; CPUs and the control group's memory
                bound it. Refused for streams, and in an `AsyncDataLoader`.
            collate_fn: A function from a list of samples to a batch; `None`: stack them straight into the ring.
            pin_memory: Copy tensors to page-locked memory; without CUDA a warning and plain memory. Not needed with
                `device="cuda"`.
            drop_last: Leave out the last batch when it is not full.
            timeout: Seconds to wait for a batch from a worker, then `LoaderTimeout` with a report; `0`: for ever.
            worker_init_fn: Called in each worker with its number, before the first sample. With an async dataset it
                may be a coroutine function.
            multiprocessing_context: `"fork"`, `"spawn"`, `"forkserver"` or a context; `None`: the platform's default.
                A context that makes threads is read as `workers="threads"`.
            generator: The torch generator that order and worker seeds are drawn from; excludes `seed`.
            prefetch_factor: Batches that each worker may have ready or in work; `None`: 2 with workers. More where
                `concurrency` needs them.
            persistent_workers: Keep the workers, and their rings, from epoch to epoch.
            pin_memory_device: torch's deprecated argument, taken for compatibility.
            in_order: `False`: give batches as they become ready.
            snapshot_every_n_steps: Batches from one saved state of a stateful sampler or stream to the next; `0` or
                `None`: none is saved. A resumed loader reads and drops the batches since the last one. It is the
                argument of torchdata's `StatefulDataLoader`.
            seed: Seeded mode, in which order and random numbers depend on the seed, the epoch and the sample's
                position alone: `0` to `2**64 - 1`; `None`: torch mode.
            rank: This process's place among the processes that train together, with `seed`; `None`: torch.distributed's
                if it is initialized, else a single process.
            world_size: The number of processes that train together, with `seed`; `None`: as for `rank`.
            group: Instead of `rank` and `world_size`: the torch.distributed process group, or the `DeviceMesh` of one
                dimension, whose ranks get different samples, with `seed`; for example `mesh["dp"]`.
            on_uneven: What to do with samples that the ranks cannot share evenly at the epoch's end: `"drop"` leaves
                out fewer than `world_size` (of shards without a known number of samples, and without `streams=`: all
                that the smallest share lacks), `"repeat"` repeats fewer than `world_size`, `"pad"` fills every rank's
                last batch to `batch_size`, on one rank too, `"error"` raises.
            balance: The lengths of the dataset's samples, as a `Balance`, with `seed`: the ranks divide the samples of
                each global batch so that their batches cost the same; `None`: in the order of the global batch.
            concurrency: Samples of a map dataset that each worker (without workers: this process) fetches at a time,
                over all its outstanding batches; `None`: 256 where they are awaited, else one at a time. A blocking
                dataset has a thread for each, and must be safe to call from several; with `1` it is read ahead of the
                consumer, and always in one thread.
            decode: A function from a sample of the dataset to the sample that is collated. It runs with the sample's
                random numbers.
            on_error: What to do with samples that raise: `"raise"`; `"skip"` leaves them out; `"refill"` puts others
                in their place, drawn from the seed, the epoch and the position, which needs `seed` and a map dataset
                with a length; a function of an index and the exception returns a substitute or raises. It is called
                where the sample would have been made.
            max_worker_restarts: How often a worker that dies is replaced in an epoch, and its tasks repeated; `None`:
                3 with `seed`, where the batches stay the same, else 0.
            workers: Where the workers are: `None`: processes of this machine; `"threads"`: threads of this process,
                for code that releases the GIL; the address of a service, as `"tcp://host:7070"`, several with commas
                between them, or a `Service`. The dataset is then a definition. Or an engine, as `RayWorkers`, which
                takes any dataset. A service needs `seed`; `num_workers` counts its logical workers, which share the
                processes there. The first `iter()` or `len()` asks it about the dataset.
            device: The device where batches are delivered, as torch takes it: `"cuda"`, `"cuda:1"`, a `torch.device`;
                `None`: in the CPU's memory. For CUDA they are copied straight from page-locked rings, ahead of the
                consumer.
            recovery: Limits for workers that hang or grow and for samples that raise, and inexact resumption: see
                `Recovery`.
            tuning: Sizes of buffers and thread pools: see `Tuning`.
            device_options: How batches are delivered on the `device`: see `DeviceOptions`.

        Raises:
            ValueError, TypeError: torch's, in torch's order and words, then ours.
        """
        # The first statement: `locals` has the arguments, and no other names yet.
        arguments = {name: value for name, value in locals().items() if name != "self"}
        if TYPE_CHECKING:  # each of ours is also an attribute, of the same type
            self.snapshot_every_n_steps, self.concurrency, self.decode = snapshot_every_n_steps, concurrency, decode
            self.seed, self.rank, self.world_size = seed, rank, world_size
            self.group: RankGroupLike = group
            self.on_uneven: OnUneven = on_uneven  # named, because pyright would infer `str` for the literals
            self.on_error: OnError = on_error
            self.balance = balance
            self.max_worker_restarts, self.workers, self.device = max_worker_restarts, workers, device
            self.recovery, self.tuning, self.device_options = recovery, tuning, device_options
        self._asyncloader_construct(arguments)

    def _asyncloader_construct(self, arguments: dict[str, Any]) -> None:
        """Make the loader of all arguments, by name. Every loader has its own."""
        raise NotImplementedError


_PARAMETERS = inspect.signature(LoaderOptions).parameters

OPTION_NAMES = tuple(_PARAMETERS)
"""Every argument of the loaders; each but `shuffle`, which becomes a sampler, is an attribute under the same name."""

OUR_OPTION_NAMES = tuple(name for name in OPTION_NAMES if name in CHECKS or name in OPTION_OBJECTS)
"""The options that torch's loader does not have."""

DEFAULTS = {name: _PARAMETERS[name].default for name in OUR_OPTION_NAMES}
"""Their defaults."""

FLAT_DEFAULTS = flattened(DEFAULTS)
"""The defaults, and those of the fields of options that are objects."""

_POSITIONAL = tuple(name for name, each in _PARAMETERS.items() if each.kind is each.POSITIONAL_OR_KEYWORD)
_TORCHS_KEYWORDS = tuple(name for name in OPTION_NAMES if name not in (*_POSITIONAL, *OUR_OPTION_NAMES))


def own_constructor(loader: type, name: str, without: Collection[str] = ()) -> None:
    """Give a class a copy of the declared constructor, which Python's own errors about arguments call by its name.

    Args:
        loader: the class; it has an `_asyncloader_construct`.
        name: the class's name in errors.
        without: options that the class does not have.
    """
    declared: Any = LoaderOptions.__init__
    own: Any = types.FunctionType(declared.__code__, declared.__globals__, "__init__", declared.__defaults__)
    functools.update_wrapper(own, declared)
    del own.__wrapped__
    own.__kwdefaults__, own.__qualname__ = declared.__kwdefaults__, f"{name}.__init__"
    parameters = inspect.signature(own).parameters
    own.__signature__ = inspect.Signature([each for each in parameters.values() if each.name not in without])
    own.__annotations__ = {option: kind for option, kind in own.__annotations__.items() if option not in without}
    if without:
        entry = rf"^( *)(?:{'|'.join(without)}):.*\n(?:\1 {{4}}.*\n)*"  # Python 3.13 takes the common indent away
        own.__doc__ = re.sub(entry, "", own.__doc__, flags=re.MULTILINE)
    known = own.__signature__.parameters.keys()

    @functools.wraps(own)
    def constructor(self: Any, /, *args: Any, **options: Any) -> None:
        if not options.keys() <= known:
            raise unknown_option(own.__qualname__, options, known)
        given: list[dict[str, Any]] = []
        own(types.SimpleNamespace(_asyncloader_construct=given.append), *args, **options)
        self._asyncloader_construct(given[0])  # here, so that the user's traceback has one of our frames less

    loader.__init__ = constructor  # type: ignore[misc]


class OurOptions(LoaderOptions[Any], Recovery, Tuning, DeviceOptions):
    """The options that torch's loader does not have, as given to a loader's constructor, and the fields of those that
    are objects. Fixed.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


class _Defaults:
    """Our options' defaults, as class attributes of the loaders; torch's own classes go before it."""


for _name, _default in DEFAULTS.items():
    setattr(_Defaults, _name, _default)


class LoaderSpec(LoaderOptions[T_co, B_co], torch.utils.data.DataLoader[T_co], _Defaults):
    """torch's loader with torch's options and ours. All can be read, unmodified, under their own names. The instance's
    `vars` hold those of our options that differ from the defaults, for code that makes a loader from them.

    A subclass may have attributes of any name, also of the name of one of our options; such an attribute is the
    subclass's own. Our options count as they were given to the constructor, and are read from `_asyncloader_options`.
    """

    _asyncloader_replays = False
    """Whether streams are replayed even without `allow_replay`."""

    _asyncloader_awaits_workers = False
    """Whether `iter()` waits until the workers have begun, and raises an error of one that could not."""

    _asyncloader_choice: AutoWorkers | None = None
    """The loader's own choice of the number of workers; None: the user gave it."""

    _asyncloader_options: OurOptions

    def _asyncloader_construct(self, arguments: dict[str, Any]) -> None:
        if arguments["workers"] is not None or isinstance(arguments["dataset"], Defined | RemoteDataset):
            arguments = locate(arguments)
        unknown = isinstance(arguments["dataset"], UnknownDataset)
        if unknown:
            CHECKS["seed"]("seed", arguments["seed"])  # or torch would make a sampler, which needs the length
        self._asyncloader_make(arguments)
        if unknown:
            # Not left in the instance: in the class, `AskedAttribute` asks a node.
            attributes = {name: vars(self).pop(name) for name in DEPENDING}
            vars(self)["_asyncloader_unknown"] = Unknown(arguments, attributes)
        self.__dict__["_asyncloader_made"] = True  # our options are fixed from here on

    def _asyncloader_make(self, arguments: dict[str, Any]) -> None:
        """Check the arguments, and set the attributes."""
        check_numbers(arguments)
        if isinstance(arguments["sampler"], Positions):  # of a loader from whose attributes this one is made
            arguments = {**arguments, "sampler": None}
        dataset = arguments["dataset"]
        if isinstance(dataset, LoaderDataset):
            # With a sampler of the user's torch's constructor raises its error, as for any iterable dataset.
            orders = is_seed(arguments["seed"]) and arguments["sampler"] is arguments["batch_sampler"] is None
            arguments = dataset.for_loader(arguments, arguments["seed"] if orders else None)
            dataset = arguments["dataset"]
        given = _for_torch(arguments)
        construct: Any = super(LoaderOptions, self).__init__  # torch's, or that of another base of the user's class
        construct(*(given[name] for name in _POSITIONAL), **{name: given[name] for name in _TORCHS_KEYWORDS})
        if is_async_stream(dataset):
            self.__dict__["dataset"] = dataset  # torch forbids assigning it from here on
        flat, defaults = flattened(arguments), FLAT_DEFAULTS
        for check in checks_of(flat, defaults, iterable=is_iterable(self)):
            check()  # here, and not in a function of its own: the user's traceback is a frame shorter
        if arguments["num_workers"] == AUTO:
            check_choice(flat, iterable=is_iterable(self))
            self.__dict__["_asyncloader_choice"] = AutoWorkers()
        self._asyncloader_options = OurOptions({name: flat[name] for name in defaults})
        self.check_worker_number_rationality()
        changed = [name for name in defaults if flat[name] != defaults[name]]
        changed += ["collate_fn"] * (flat["collate_fn"] is not None)
        unknown = isinstance(dataset, UnknownDataset)
        known = [name for name in changed if name not in ABOUT_DATASET] if unknown else changed
        warn_without_effect(flat, known, iterable=is_iterable(self))
        for name in changed:
            if name in DEFAULTS and name not in vars(self):
                owner = next(base for base in type(self).__mro__ if name in vars(base))
                if owner is _Defaults:  # else the name is the subclass's
                    setattr(self, name, flat[name])

    @property
    def generator(self) -> torch.Generator | None:
        """torch's argument; in seeded mode, while an iterator is made, a generator of the seed."""
        drawing = DRAWING.get()
        if drawing is not None and drawing.loader is self:
            return drawing.generator
        return vars(self).get("generator")

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        vars(self)["generator"] = generator

    @property
    def _index_sampler(self) -> Any:
        drawing = DRAWING.get()
        if drawing is not None and drawing.loader is self:
            return drawing.index_sampler
        # torch's iterator calls `iter()` on it; for an async sampler that is empty, and a task of the loop reads it.
        plain = super()._index_sampler
        source = as_async_source(plain)
        if self._asyncloader_options.seed is None or is_iterable(self):
            return plain if source is None else source
        if source is None:
            return rank_view(self, plain)
        source.share, source.seeded = rank_view(self, plain).share, True
        return source

    def __len__(self) -> int:
        """Number of batches in an epoch. Approximate on several ranks that share a stream's shards, as these differ in
        size.

        Raises:
            TypeError: the number is unknown.
            TransportError: the shards of fixed streams could not be counted, which the first call does.
            ServiceUnavailable: no node at `workers=` could be asked about the dataset, which the first call does.
        """
        ask_dataset(self)
        source = self._index_sampler
        if isinstance(source, PositionSource) and source.sampler.dataset.samples is None:
            run_in_thread(source.plan())
        ranks = topology(self).world_size
        if ranks == 1 or not (is_iterable(self) and assigns_shards(self.dataset)):
            return super().__len__()
        share = len(self.dataset) // ranks  # type: ignore[arg-type]
        size = self.batch_size or 1
        return share // size if self.drop_last else -(-share // size)

    def _asyncloader_workers_begin(self) -> None:
        """Hook: called before workers start for an iterator of this loader."""

    def check_worker_number_rationality(self) -> None:
        """Give torch's warning about too many workers; not of threads, of workers elsewhere, or of a number that the
        loader chooses.
        """
        options = vars(self).get("_asyncloader_options")
        # torch's constructor calls this before the options are known.
        if options is None or options.workers is not None or self._asyncloader_choice:
            return
        super().check_worker_number_rationality()


for _name in DEPENDING:
    setattr(LoaderSpec, _name, AskedAttribute(_name))


def _for_torch(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments for torch's constructor, which knows no "auto", no asynchronous streams and no seeds."""
    given, dataset = dict(arguments), arguments["dataset"]
    if given["num_workers"] == AUTO:
        given["num_workers"] = first_number()
    if is_async_stream(dataset):
        given["dataset"] = _StreamForTorch()  # so that torch checks the arguments as for an iterable dataset
        return given
    seeded = is_seed(given["seed"])
    if seeded and given["sampler"] is given["batch_sampler"] is None and not isinstance(dataset, IterableDataset):
        given |= {"sampler": SeededSampler(dataset, given["seed"], shuffle=bool(given["shuffle"])), "shuffle": None}
    elif seeded or given["seed"] is None:
        for name in ("sampler", "batch_sampler"):
            if given[name] is not None:
                given[name] = with_seeded_draws(given[name], given["seed"])
    return given


class _StreamForTorch(IterableDataset[Any]):
    """Stands for an asynchronous stream of another class while torch's constructor checks the dataset."""

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("an asynchronous stream cannot be iterated with a plain for")


own_constructor(LoaderSpec, "DataLoader")


class OverridableProperty(Generic[T]):
    """A read-only property that an instance may override by assigning to its name. Subclasses of torch's loader use any
    names for their attributes, so ours must not be in their way; our own code never reads a loader through these.
    """

    def __init__(self, read: Callable[[Any], T]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> T:
        return self if instance is None else self._read(instance)  # type: ignore[return-value]


# A user's subclass of the loader may have attributes of any name. So what follows are functions, not attributes.


def is_iterable(spec: LoaderSpec[Any]) -> bool:
    """Whether the dataset is iterated rather than indexed."""
    return bool(spec._dataset_kind == DatasetKind.Iterable)


def given_options(spec: LoaderSpec[Any]) -> list[str]:
    """Those of our options that differ from the defaults, as ``name=value``."""
    given = {name: getattr(spec._asyncloader_options, name) for name in OUR_OPTION_NAMES}
    return [f"{name}={value!r}" for name, value in given.items() if value != DEFAULTS[name]]


def fixed_option(name: str) -> str:
    """The error's text where one of our options is set after construction."""
    return f"{name} is fixed when a loader is made; clone({name}=...) makes another one"


def async_index_source(spec: LoaderSpec[Any]) -> AsyncIndexSource | None:
    """The index sampler if it is an async one, else None."""
    sampler = spec._index_sampler
    return sampler if isinstance(sampler, AsyncIndexSource) else None
