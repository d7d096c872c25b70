from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate import DataLoaderConfiguration
from accelerate.data_loader import DataLoaderShard

import asyncloader
from asyncloader.integrations.accelerate import adopt, skip_first_batches
from tests.clients.frameworks.accelerate_runs import OURS, OWN, STOCK, accelerator, both, epochs
from tests.clients.frameworks.helping import Rows, RowStream, batches_given
from tests.helpers.comparing import assert_same

pytestmark = pytest.mark.usefixtures("accelerate_state")

# -------------------------------------------------------------------------------------------- skipping


@pytest.mark.parametrize("shuffle", [False, True])
def test_skip_first_batches_of_a_prepared_loader(shuffle: bool) -> None:
    """The rest of the epoch is that of Accelerate's own function, from a loader of ours."""
    stock, ours = both(Rows(36), batch_size=8, shuffle=shuffle, num_workers=2)
    expected, got = accelerate.skip_first_batches(stock, 2), skip_first_batches(ours, 2)
    assert type(got).__name__ == DataLoaderShard.__name__
    inside = got.base_dataloader
    assert (type(inside), inside.tuning.ring_bytes, inside.snapshot_every_n_steps) == (OURS, 1 << 20, 3)
    assert_same(epochs(got, 1), epochs(expected, 1))
    assert len(list(got)) == 3
    assert batches_given(inside) == 6
    assert len(list(ours)) == 5


class Unsized:
    """A batch sampler without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2], [3]])


@pytest.mark.parametrize("first", [1, 9])
def test_skip_first_batches_of_an_unknown_number(first: int) -> None:
    """In seeded mode, too, batches can be skipped whose number is not known, also more than there are."""
    loader = OURS(list(range(4)), batch_sampler=Unsized(), seed=0)
    skipping = skip_first_batches(loader, first)
    for _ in range(2):
        assert [batch.tolist() for batch in skipping] == [[0, 1], [2], [3]][first:]


@pytest.mark.parametrize("dispatch", [None, False], ids=["dispatcher", "shard"])
def test_skip_first_batches_of_a_stream(dispatch: Any) -> None:
    """Of a prepared stream the first batches are read and dropped."""
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    stock, ours = both(RowStream(40), config=config, batch_size=8, num_workers=2)
    expected, got = accelerate.skip_first_batches(stock, 2), skip_first_batches(ours, 2)
    assert_same(epochs(got, 1), epochs(expected, 1))
    assert batches_given(got.base_dataloader) == 6


def test_skip_first_batches_of_a_stock_loader() -> None:
    """A stock loader is left to Accelerate."""
    got = skip_first_batches(STOCK(Rows(36), 8), 3)
    assert type(got) is STOCK
    assert len(list(got)) == 2


# -------------------------------------------------------------------------------------------- adopt


def test_adopt_exchanges_a_stock_loader() -> None:
    """A prepared stock loader gets a loader of ours inside, with the defaults of our options."""
    dataset = Rows(20)
    shard: Any = accelerator().prepare(STOCK(dataset, 8, num_workers=2))
    assert adopt(shard) is shard
    inside = shard.base_dataloader
    assert (type(inside), inside.dataset, inside.tuning.ring_bytes, inside.snapshot_every_n_steps) == (
        OURS,
        dataset,
        None,
        1,
    )
    assert adopt(shard).base_dataloader is inside
    assert len(list(shard)) == 3


def test_adopt_a_plain_loader() -> None:
    """A plain stock loader becomes a loader of ours; a loader of ours stays."""
    ours = adopt(STOCK(Rows(20), 8, drop_last=True))
    assert type(ours) is OURS
    assert len(list(ours)) == 2
    assert adopt(ours) is ours


@pytest.mark.parametrize(
    "thing",
    [SimpleNamespace(base_dataloader=STOCK([1])), SimpleNamespace(), 3],
    ids=["a wrapper", "an object", "a number"],
)
def test_adopt_refuses_what_it_does_not_know(thing: Any) -> None:
    """The error names an object that is neither a loader nor a wrapper of Accelerate's."""
    with pytest.raises(TypeError, match=f"takes a loader.*but got {type(thing).__name__}"):
        adopt(thing)


class KeepsState(torch.utils.data.DataLoader[Any]):
    """A loader with a state, as Accelerate makes with ``use_stateful_dataloader=True``."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_adopt_loses_no_state() -> None:
    """A loader inside that keeps a state is not exchanged for a loader that would forget it."""
    with pytest.raises(TypeError, match="KeepsState keeps a state"):
        adopt(KeepsState(Rows(8), 4))


# -------------------------------------------------------------------------------------------- without the integration


def test_plain_prepare_gives_right_batches() -> None:
    """Without the integration Accelerate builds its own stock loader from the attributes of ours, and that works."""
    stock: Any = accelerator().prepare(STOCK(Rows(36), 8, shuffle=True, num_workers=2))
    plain: Any = accelerator().prepare(OURS(Rows(36), 8, shuffle=True, num_workers=2, **OWN))
    assert not isinstance(plain.base_dataloader, OURS)
    assert_same(epochs(plain), epochs(stock))


def test_install_makes_accelerate_make_ours() -> None:
    """Inside `install` a plain `prepare` puts our loader into the wrapper; its batches are Accelerate's."""
    stock: Any = accelerator().prepare(STOCK(Rows(36), 8, shuffle=True, num_workers=2))
    with asyncloader.install():
        installed: Any = accelerator().prepare(OURS(Rows(36), 8, shuffle=True, num_workers=2))
    assert type(installed).__name__ == DataLoaderShard.__name__
    assert type(installed.base_dataloader) is OURS
    assert_same(epochs(installed), epochs(stock))
    assert batches_given(installed.base_dataloader) == 10


def test_install_covers_skipping() -> None:
    """Inside `install` Accelerate's own `skip_first_batches` gives our loader."""
    stock: Any = accelerator().prepare(STOCK(Rows(36), 8, num_workers=2))
    with asyncloader.install():
        installed: Any = accelerator().prepare(torch.utils.data.DataLoader(Rows(36), 8, num_workers=2))
        rest: Any = accelerate.skip_first_batches(installed, 2)
        plain: Any = accelerate.skip_first_batches(OURS(Rows(36), 8), 2)
    assert (type(rest.base_dataloader), type(plain)) == (OURS, OURS)
    assert_same(epochs(rest, 1), epochs(accelerate.skip_first_batches(stock, 2), 1))
    assert len(list(plain)) == 3


# -------------------------------------------------------------------------------------------- checkpoints
