"""A subclass's attributes with the names of our options belong to the subclass, and switch nothing on."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch.utils.data

from asyncloader import AsyncDataLoader, DataLoader, DeviceOptions, Recovery, StatefulDataLoader, install
from asyncloader.options.declaration import OUR_OPTION_NAMES
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Numbers
from tests.helpers.running import collect, run_async

# Values that programs keep under these names; taken for options they would change the batches, or fail.
THEIRS: dict[str, Any] = dict.fromkeys(OUR_OPTION_NAMES, "theirs") | {
    "seed": 7,
    "rank": 3,
    "world_size": 4,
    "device": "meta",
    "decode": str,
    "device_options": DeviceOptions(device_transform=str, static_buffers=True),
    "recovery": Recovery(worker_timeout=1e-9, max_skipped_samples=0),
}


def keep(loader: Any) -> None:
    for name, value in THEIRS.items():
        setattr(loader, name, value)


class Before(DataLoader[Any]):
    """Sets them before our constructor begins."""

    def __init__(self, *args: Any, **options: Any) -> None:
        keep(self)
        super().__init__(*args, **options)


class After(DataLoader[Any]):
    """Sets them after our constructor has returned."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        keep(self)


class StatefulAfter(StatefulDataLoader[Any]):
    """Sets them after the constructor of the class that stands for torchdata's loader."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        keep(self)


class Properties(DataLoader[Any]):
    """Computes them by properties that cannot be set."""


def _computed(name: str) -> property:
    return property(lambda _: THEIRS[name])


for each in THEIRS:
    setattr(Properties, each, _computed(each))


WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        (Before, torch.utils.data.DataLoader),
        (After, torch.utils.data.DataLoader),
        (Properties, torch.utils.data.DataLoader),
        (StatefulAfter, StatefulDataLoader),  # shuffles as torchdata's does
    ],
)
@WORKERS
def test_batches_are_as_without(kind: Any, plain: Any, workers: int) -> None:
    """Two shuffled epochs are those of a loader without such attributes, which keep the subclass's values."""
    options = {"batch_size": 4, "shuffle": True, "num_workers": workers}
    torch.manual_seed(5)
    expected = [list(plain(Numbers(18), **options)) for _ in range(2)]
    torch.manual_seed(5)
    found = []
    for _ in range(2):
        with kind(Numbers(18), **options) as loader:
            found.append(list(loader))
            assert {name: getattr(loader, name) for name in THEIRS} == THEIRS
    assert_same(found, expected)


@pytest.mark.parametrize("kind", [Before, After, Properties])
def test_what_was_given_counts(kind: Any) -> None:
    """Options that the subclass passes on are in force, also in a clone, although it keeps others of these names."""
    options: dict[str, Any] = {
        "batch_size": 4,
        "shuffle": True,
        "seed": 11,
        "recovery": Recovery(max_skipped_samples=5),
    }
    expected = list(DataLoader[Any](Numbers(18), **options))
    with kind(Numbers(18), **options) as loader:
        for other in (loader, loader.clone(), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
            assert_same(list(other), expected)
            assert "seeded by 11" in other.explain()


class Moving(DataLoader[Any]):
    """Takes an argument with the name of an option of ours and another meaning."""

    def __init__(self, dataset: Any, *, device: str = "cpu", **options: Any) -> None:
        super().__init__(dataset, **options)
        self.device = device


class AsyncMoving(AsyncDataLoader[Any]):
    """`Moving` for the asynchronous loader."""

    def __init__(self, dataset: Any, *, device: str = "cpu", **options: Any) -> None:
        super().__init__(dataset, **options)
        self.device = device


@pytest.mark.parametrize("kind", [Moving, AsyncMoving])
def test_an_argument_of_its_own(kind: Any) -> None:
    """A clone gets the value that the subclass keeps."""
    loader = kind(Numbers(6), device="meta", batch_size=2, concurrency=9)
    clone = loader.clone()
    assert (clone.device, clone.batch_size, clone.concurrency) == ("meta", 2, 9)
    assert "device:" not in clone.explain()
    assert loader.clone(device="cuda").device == "cuda"


# Names that look private, or like ours, under which programs keep values; some are set before torch's constructor ran.
NAMES = (
    *("errors", "padding", "stats", "explain", "clone", "feedback", "_state", "_ours", "_options", "_replays"),
    *("_workers_begin", "_keeper", "_spec", "_closed", "order", "_bridge", "_newest", "_statistics", "_draws"),
)


class AnyNames(DataLoader[Any]):
    """Sets half of them before our constructor, half after it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        for name in NAMES[::2]:
            setattr(self, name, [name])
        super().__init__(*args, **options)
        for name in NAMES[1::2]:
            setattr(self, name, [name])


class AsMembers(DataLoader[Any]):
    """Has them as properties of the class, which an instance cannot set."""


def _named(name: str) -> property:
    return property(lambda _: [name])


for each in NAMES:
    setattr(AsMembers, each, _named(each))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [AnyNames, AsMembers])
@WORKERS
def test_every_other_name_is_the_subclasss_too(kind: Any, workers: int) -> None:
    """Two epochs, a state and a copy are those of a plain loader; the subclass's values stay."""
    loader = kind(Numbers(18), 4, num_workers=workers, on_error="skip")
    for each in (loader, copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert_same([list(each), list(each)], [collect("torch", Numbers(18), batch_size=4)] * 2)
        assert {name: getattr(each, name) for name in NAMES} == {name: [name] for name in NAMES}
        iterator = iter(each)
        next(iterator)
        assert each.state_dict()["step"] == 1
        each.close()


@pytest.mark.parametrize("kind", [DataLoader, AsyncDataLoader])
def test_what_is_computed_gives_way(kind: Any) -> None:
    """A computed attribute has our value until the program assigns its own."""
    loader = kind(Numbers(4))
    assert (loader.skipped_samples, loader.padding) == ([], 0)
    loader.skipped_samples, loader.padding = ["theirs"], "same"
    assert (loader.skipped_samples, loader.padding) == (["theirs"], "same")


class OfTorch(torch.utils.data.DataLoader[Any]):
    """A subclass of torch's loader, from before the program switched to ours."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        keep(self)
        self.snapshot_every_n_steps = 3  # torchdata's loader has this option, with the same meaning


@pytest.mark.parametrize("kind", [DataLoader, AsyncDataLoader])
def test_from_a_subclass_of_torchs(kind: Any) -> None:
    """The subclass's attributes are not taken for options, except `snapshot_every_n_steps`."""
    loader = kind.from_torch(OfTorch(Numbers(6), batch_size=2))
    fresh = kind(Numbers(6))
    given = {name: getattr(loader, name) for name in THEIRS}
    assert given == {name: getattr(fresh, name) for name in THEIRS} | {"snapshot_every_n_steps": 3}
    run = collect("torch", Numbers(6), batch_size=2)
    assert_same(list(loader) if kind is DataLoader else run_async(_all(loader)), run)


async def _all(loader: AsyncDataLoader[Any]) -> list[Any]:
    async with loader:
        return [batch async for batch in loader]


@pytest.mark.parametrize("kind", [DataLoader, AsyncDataLoader])
def test_options_are_fixed(kind: Any) -> None:
    """Setting an option, also a copy's, raises and names `clone`; a subclass's attribute of that name is its own."""
    made = kind(Numbers(6))
    for each in (made, copy.copy(made), pickle.loads(pickle.dumps(made))):
        with pytest.raises(ValueError, match=r"seed is fixed when a loader is made; clone\(seed=\.\.\.\)"):
            each.seed = 3

    class Own(kind):  # type: ignore[misc]
        pass

    loader = Own(Numbers(6), batch_size=2)
    loader.device = "meta"
    assert loader.device == "meta"


def test_inside_install_a_library_may_set_any_attribute() -> None:
    """The library does not know our options; the loader uses those that it was constructed with."""
    with install():
        loader: Any = torch.utils.data.DataLoader(Numbers(6), batch_size=2)
    assert type(loader) is DataLoader
    loader.device = "meta"
    assert loader.device == "meta"
    assert_same(list(loader), collect("torch", Numbers(6), batch_size=2))
