"""`asyncloader.install()`: subclasses of torch's loader, and code that makes torch's iterators by itself."""

from __future__ import annotations

import abc
import copy
import pickle
import warnings
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch
from torch.utils.data.dataloader import (
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from asyncloader import DataLoader, install
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Numbers
from tests.helpers.installing import Torchs, told

pytestmark = pytest.mark.usefixtures("constructors")
T = TypeVar("T")


class Sized(Protocol):
    """A protocol that a loader class declares."""

    def __len__(self) -> int: ...


class Plain(type):
    """A metaclass unrelated to others."""


class Shifted:
    """Mixed in before torch's class: relies on `super()` to reach it."""

    def __iter__(self) -> Any:
        return (batch + 1 for batch in super().__iter__())  # type: ignore[misc]


def shapes() -> dict[str, Any]:
    """New subclasses of torch's class, in the forms found in public code."""

    class Inherited(Torchs[Any]):
        pass

    class Mixed(Shifted, Torchs[Any]):
        pass

    class Typed(Torchs[T], Generic[T]):
        pass

    class Interface(Torchs[Any], Sized):
        pass

    class Abstract(Torchs[Any], abc.ABC):
        pass

    class AbstractMeta(Torchs[Any], metaclass=abc.ABCMeta):
        pass

    class OwnMeta(Torchs[Any], metaclass=Plain):
        pass

    class Slots(Torchs[Any]):
        __slots__ = ("spare",)

    class Explicit(Torchs[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.early = 1
            Torchs.__init__(self, *args, **kwargs)
            self.seed = "a subclass's own"

    class MultiEpoch(Torchs[Any]):
        """Keeps one iterator for its life, over a sampler that never ends."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.count: int = super().__len__()
            self._DataLoader__initialized = False
            self.batch_sampler: Any = Repeated(self.batch_sampler)
            self._DataLoader__initialized = True
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return self.count

        def __iter__(self) -> Any:
            for _ in range(len(self)):
                yield next(self.iterator)

    kinds = [Inherited, Mixed, Typed, Interface, Abstract, AbstractMeta, OwnMeta, Slots, Explicit, MultiEpoch]
    return {kind.__name__: kind for kind in kinds}


class Repeated:
    """A sampler without end."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        while True:
            yield from iter(self.sampler)


BEFORE = shapes()


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("shape", BEFORE)
def test_subclasses_of_torchs(shape: str, when: str) -> None:
    """Defined before or inside, whatever it is mixed with: inside, a subclass makes loaders that are instances of it
    and of ours; the subclass itself does not become ours.
    """
    with install():
        kind = BEFORE[shape] if when == "before" else shapes()[shape]
        assert issubclass(kind, torch.utils.data.DataLoader)
        loader = kind(Numbers(7), batch_size=2, num_workers=1)
        again = kind(Numbers(3))
    after = kind(Numbers(7), batch_size=2)
    assert (type(after), isinstance(after, DataLoader)) == (kind, False)
    assert isinstance(loader, kind)
    assert isinstance(loader, DataLoader)
    assert type(again) is type(loader)
    assert (type(loader).__name__, type(loader).__qualname__) == (kind.__name__, kind.__qualname__)
    assert not issubclass(kind, DataLoader)
    for _ in range(2):
        assert_same(list(loader), list(after))
    assert loader.stats()["data/batches"] == 8
    assert vars(after).keys() <= vars(loader).keys()


def test_a_subclass_keeps_its_attributes() -> None:
    """Attributes set by its constructor, before and after torch's, exist, under names of our options as well."""
    with install():
        loader = BEFORE["Explicit"](Numbers(3))
    assert (loader.early, loader.seed) == (1, "a subclass's own")
    assert len(list(loader)) == 3


class Theirs(Torchs[Any]):
    """A library's subclass of torch's loader."""

    def __init__(self, dataset: Any, batch_size: int = 2) -> None:
        super().__init__(dataset, batch_size)


@pytest.mark.parametrize("kind", [Torchs, Theirs])
def test_its_loaders_pickle_copy_and_clone(kind: Any) -> None:
    """A loader made inside is pickled, copied and constructed again outside, and keeps its class."""
    with install():
        inside = kind(Numbers(4), batch_size=2)
        packed = pickle.dumps(inside)
    for twin in (pickle.loads(packed), copy.copy(inside), copy.deepcopy(inside), type(inside)(Numbers(4), 2)):
        assert type(twin) is type(inside)
        assert_same(list(twin), list(inside))


def test_a_class_that_nothing_can_be_derived_from() -> None:
    """A warning names the class once, and its loaders are torch's."""

    class Registered(Torchs[Any]):
        def __init_subclass__(cls, *, key: str) -> None:
            """Requires an argument of every subclass."""

    with warnings.catch_warnings(record=True) as caught, install():
        warnings.simplefilter("always")
        loaders = [Registered(Numbers(3)), Registered(Numbers(3))]
    assert len(told(caught)) == 1
    assert "Registered" in told(caught)[0]
    assert "'key'" in told(caught)[0]
    assert [len(list(loader)) for loader in loaders] == [3, 3]


# --------------------------------------------------------------------------------- those that make torch's iterators


class Imitation:
    """An object with the attributes of torch's loader, read by torch's iterators, as in fastai."""

    def __init__(self, dataset: Any, num_workers: int) -> None:
        self.dataset, self.num_workers = dataset, num_workers
        self.sampler = self._index_sampler = range(len(dataset))
        self.collate_fn = torch.utils.data.default_convert
        self._dataset_kind, self._IterableDataset_len_called = _DatasetKind.Map, None
        self._auto_collation = self.drop_last = self.pin_memory = self.persistent_workers = False
        self.timeout, self.prefetch_factor, self.in_order, self.pin_memory_device = 0, 2, True, ""
        self.worker_init_fn = self.generator = self.multiprocessing_context = None

    def __iter__(self) -> Any:
        kinds: Any = (_MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter)
        return iter(kinds[self.num_workers == 0](self))


class _OwnIterator(_MultiProcessingDataLoaderIter):
    """A subclass of torch's iterator, which its loader makes, as in LitData."""


class Streaming(Torchs[Any]):
    """The loader that makes `_OwnIterator`."""

    def _get_iterator(self) -> Any:
        return _OwnIterator(self) if self.num_workers else _SingleProcessDataLoaderIter(self)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Imitation, Streaming])
def test_own_iterators_are_named_once(kind: Any, workers: int) -> None:
    """A loader that makes torch's iterators by itself keeps working, and one warning per block names it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(kind(Numbers(3), num_workers=workers))
        for _ in range(2):
            with install():
                assert len(list(kind(Numbers(3), num_workers=workers))) == 3
                assert len(list(kind(Numbers(3), num_workers=workers))) == 3
    assert [f"{kind.__module__}.{kind.__qualname__}:" in text for text in told(caught)] == [True, True]
