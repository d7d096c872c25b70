"""The sampler of a dataset whose indices are positions of its own order: 0, 1, 2 and so on.

Data path: [positions] -> async_sampler -> scheduler.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from asyncloader.errors import StateError
from asyncloader.samplers.seeded import SeededSampler

if TYPE_CHECKING:
    from asyncloader.ranks.exchange import RankExchange


class PlannedDataset(Protocol):
    """The part of `remote.fixed_streams.FixedStreams` that its order needs."""

    @property
    def samples(self) -> int | None:
        """Number of samples; None before `plan_streams`."""
        ...

    @property
    def lanes(self) -> int:
        """Number of steps in a row that are read from different places; step ``n + lanes`` goes on where n stopped."""
        ...

    @property
    def seed(self) -> int:
        """The loader's."""
        ...

    async def plan_streams(self, batch: int, ranks: RankExchange | None = None) -> None:
        """Find out the number, for global batches of this size; with `ranks`, together with the other ranks, each of
        which calls this within `RankExchange.planning`.
        """
        ...

    def described(self) -> dict[str, Any]:
        """Return the values that must be the same where a state is loaded; None where a value is not known yet."""
        ...

    @property
    def elastic(self) -> bool | None:
        """Whether a state of another order is resumed as a set of samples; None: no such state can be, or go on."""
        ...

    def left(self, before: Sequence[Any], epoch: int) -> int:
        """Return the number of samples of an epoch that these orders of a state have not had."""
        ...


class LoaderDataset:
    """Base of a dataset that a loader reads in another form, or in an order of the dataset's own.

    It is a class to derive from, not a protocol: a user's dataset may have methods of any names.
    """

    def for_loader(self, arguments: dict[str, Any], seed: int | None) -> dict[str, Any]:
        """Return the arguments with which a loader reads the dataset.

        Args:
            arguments: of the loader's constructor, by name.
            seed: of the order that the dataset chooses; None: it chooses none, as in torch mode.
        """
        raise NotImplementedError


class ShardStream(LoaderDataset):
    """Base of a stream of shards: with `streams` and a seed a loader reads the samples at positions of an order."""

    def shuffled(self) -> Any:
        """Return the dataset for a loader with ``shuffle=True``."""
        raise NotImplementedError

    def fixed_streams(self, seed: int) -> Any:
        """Return the dataset for a loader with this seed; itself if it has no number of streams."""
        raise NotImplementedError

    def for_loader(self, arguments: dict[str, Any], seed: int | None) -> dict[str, Any]:
        """Return the arguments with the shuffled dataset, and with its order if it has one."""
        shards: Any = self.shuffled() if arguments["shuffle"] else self
        dataset = shards if seed is None else shards.fixed_streams(seed)
        order = arguments["sampler"] if dataset is shards else Positions(dataset)
        return arguments | {"dataset": dataset, "sampler": order, "shuffle": None}


class PlacedSamples(LoaderDataset):
    """Base of the samples of a `source` at positions of an order. Another loader reads the source once more."""

    source: Any

    def for_loader(self, arguments: dict[str, Any], seed: int | None) -> dict[str, Any]:
        """Return the arguments for the source."""
        made: dict[str, Any] = self.source.for_loader(arguments | {"dataset": self.source}, seed)
        return made


COUNTED = "shards", "sources"
"""Names of described values that are known once the samples are counted."""

AS_A_SET = 'elastic="set" of the dataset resumes the samples that were not delivered, in another order'


class Positions:
    """The sampler of a planned dataset.

    Args:
        dataset: the dataset.
    """

    def __init__(self, dataset: PlannedDataset) -> None:
        self.dataset = dataset
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    @property
    def changed(self) -> bool:
        """Whether the order depends on more than dataset and epoch."""
        return False

    def __len__(self) -> int:
        """Number of samples. TypeError: it is not known yet."""
        samples = self.dataset.samples
        if samples is None:
            raise TypeError("the number of samples is known when the first epoch begins, which counts them")
        return samples

    async def __aiter__(self) -> AsyncIterator[int]:
        """Yield all positions; for code that reads the sampler itself."""
        for position in range(len(self)):
            yield position

    def begin(self, epoch: int) -> None:
        """Note that an epoch begins. Called in the thread that iterates."""

    def loaded(self, begun: int | None) -> None:
        """Note that a loader's state was loaded. `begun`: its epoch, if that has begun."""

    def resumed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with that which was changed since it was loaded."""
        return state

    def sampler(self, epoch: int) -> Any:  # noqa: ARG002
        """Return an epoch's items, as a plain sampler that begins anywhere."""
        return SeededSampler(self, 0, shuffle=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the values that the order depends on."""
        return self.dataset.described()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that a saved state is of this order.

        Raises:
            StateError: it is not; the text says what differs.
        """
        here = self.dataset.described()
        if not isinstance(state, dict):
            raise StateError(f"the state is broken: that of its streams is {type(state).__name__}")
        for name, value in here.items():
            saved = _completed(state.get(name), value)
            if saved == value or (name in COUNTED and None in (saved, value)):
                continue  # not known yet
            part, before, now = _first_difference(name, saved, value)
            if part.endswith("shards"):
                whose = "" if part == "shards" else f" ({part})"
                raise StateError(
                    f"the state was saved of other shards{whose}, or of shards with other numbers of samples: use the "
                    "same shards, or begin anew without the state"
                )
            advice = "" if self.dataset.elastic is None else f"; {AS_A_SET}"
            raise StateError(
                f"the state was saved with {part}={before!r:.100}, but this dataset has {part}={now!r:.100}; use "
                f"{part}={before!r:.100}, or begin anew without the state{advice}"
            )

    def follow(self, state: dict[str, Any]) -> None:
        """Go on after the epoch of a state: every epoch begins with position 0."""


def _completed(saved: Any, here: Any) -> Any:
    """Return the description of sources from a state; of earlier versions, they lack the digests of map datasets."""
    if isinstance(saved, list) and isinstance(here, list) and len(saved) == len(here):
        return [_completed(one, other) for one, other in zip(saved, here, strict=True)]
    if isinstance(saved, dict) and isinstance(here, dict) and saved.keys() == here.keys() - {"shards"}:
        return here | saved
    return saved


def _first_difference(name: str, saved: Any, here: Any) -> tuple[str, Any, Any]:
    """Return the first part in which two values differ, with its name: ``sources[2].samples``."""
    if isinstance(saved, dict) and isinstance(here, dict) and saved.keys() == here.keys():
        keys = ((f"{name}.{key}", key) for key in here)
    elif isinstance(saved, list) and isinstance(here, list) and len(saved) == len(here):
        keys = ((f"{name}[{number}]", number) for number in range(len(here)))
    else:
        return name, saved, here
    for inner, key in keys:
        if saved[key] != here[key]:
            return _first_difference(inner, saved[key], here[key])
    return name, saved, here


class RestOfPositions(Positions):
    """The positions of an epoch behind the parts that other orders have had.

    Args:
        positions: of the whole epoch.
        before: these orders, from a state.
    """

    def __init__(self, positions: Positions, before: Sequence[Any]) -> None:
        super().__init__(positions.dataset)
        self.epoch = positions.epoch
        self._before = before
        self._samples = positions.dataset.left(before, positions.epoch)

    def __len__(self) -> int:
        return self._samples

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `Positions`, with the orders before."""
        return super().state_dict() | {"before": self._before}


def as_a_set(state: dict[str, Any], dataset: PlannedDataset, batch: int | None) -> dict[str, Any]:
    """Return a state of another order as a state of this order, behind a part of the other; other states as they are.

    Args:
        state: a checked state.
        dataset: of the loader.
        batch: samples in the loader's global batch.

    Raises:
        StateError: it cannot be resumed here.
    """
    sampler = state["sampler"]
    saved = None if sampler is None else sampler["sampler"]
    before = (saved.get("before") or []) if isinstance(saved, dict) else []
    if not isinstance(before, list | tuple):
        raise StateError(f"the state is broken: its earlier orders are {before!r:.200}")
    before = list(before)
    if before and dataset.elastic is None:
        raise StateError(f"the state is of a set of samples, which {dataset!r} cannot read: resume it without workers=")
    if not dataset.elastic or state["beyond"]:  # steps that were left out are no part of an order
        return state
    if state["finished"] or sampler is None or not isinstance(saved, dict):
        return state | {"batch_size": batch} if state["finished"] or not state["step"] else state
    here = dataset.described()
    names = [name for name in here if name != "shards"]
    if state["batch_size"] == batch and all(saved.get(name) == here[name] for name in names):
        return state
    if state["step"]:
        before.append([state["batch_size"], *(saved.get(name) for name in names), state["step"]])
    changed = {**here, "shards": saved.get("shards"), "before": before}
    return state | {"batch_size": batch, "step": 0, "sampler": sampler | {"at": 0, "sampler": changed}}
