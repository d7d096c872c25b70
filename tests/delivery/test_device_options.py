from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref
from typing import Any

import pytest
import torch

from asyncloader import AsyncDataLoader, DataLoader, DeviceOptions, DeviceUnavailable
from asyncloader.delivery import open_accelerator
from asyncloader.delivery.accelerator import PlainAccelerator
from asyncloader.delivery.loader_device import transfer_of
from asyncloader.options.objects import grouped
from tests.delivery.fake import installed
from tests.helpers.datasets import Numbers, identity

BOTH = pytest.mark.parametrize("make", [DataLoader, AsyncDataLoader], ids=["sync", "async"])


def double(batch: Any) -> Any:
    return batch * 2


@BOTH
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"device_prefetch": 0}, ValueError, "at least 1, but got device_prefetch=0"),
        ({"device_prefetch": True}, ValueError, "at least 1, but got device_prefetch=True"),
        ({"device_prefetch": 1.5}, ValueError, "at least 1, but got device_prefetch=1.5"),
        ({"device": "cpu", "device_transform": 3}, TypeError, "a function from a batch to a batch, but got int"),
        (
            {"device_transform": identity},
            ValueError,
            "device_transform is about batches on a device, and needs device=",
        ),
        ({"static_buffers": True}, ValueError, "static_buffers is about batches on a device, and needs device="),
        ({"device": "nowhere"}, ValueError, "what torch.device takes, but got device='nowhere'"),
        ({"device": 1.5}, ValueError, "what torch.device takes, but got device=1.5"),
        ({"device": "cuda:-1"}, ValueError, "what torch.device takes, but got device='cuda:-1'"),
    ],
)
def test_what_is_refused(make: Any, options: Any, error: type[Exception], text: str) -> None:
    """Each option out of range is refused when the loader is made, and the error shows its value."""
    with pytest.raises(error) as caught:
        make(Numbers(3), **grouped(options))
    assert text in str(caught.value)


def test_where_there_is_nothing_to_do() -> None:
    """Batches are made on the CPU: it needs no transfer, unless a transform or static tensors are asked for."""
    assert transfer_of(DataLoader[Any](Numbers(3))) is None
    assert transfer_of(DataLoader[Any](Numbers(3), device="cpu")) is None
    some: list[dict[str, Any]] = [{"device_transform": double}, {"static_buffers": True}]
    for options in some:
        transfer = transfer_of(DataLoader[Any](Numbers(3), device="cpu", **grouped(options)))
        assert transfer is not None
        assert isinstance(transfer.accelerator, PlainAccelerator)


def test_a_loader_has_one_transfer() -> None:
    """Every use gets the same transfer, so that static tensors stay; another loader has its own."""
    with installed() as machine:
        loader = DataLoader[Any](Numbers(3), device="cpu", device_options=DeviceOptions(static_buffers=True))
        transfer = transfer_of(loader)
        assert transfer is transfer_of(loader)
        assert len(machine.devices) == 1
        other = DataLoader[Any](Numbers(3), device="cpu", device_options=DeviceOptions(static_buffers=True))
        assert transfer_of(other) is not transfer_of(loader)


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader)), lambda loader: loader.clone()],
    ids=["copy", "deepcopy", "pickle", "clone"],
)
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_copies_of_a_loader(duplicate: Any, used: bool) -> None:
    """They have the options and a transfer of their own, whether or not the original has been iterated."""
    with installed():
        given = DeviceOptions(device_transform=double, static_buffers=True)
        loader = DataLoader[Any](Numbers(6), batch_size=2, device="cpu", device_options=given)
        expected = [batch.clone() for batch in loader] if used else None
        twin = duplicate(loader)
        assert (twin.device, twin.device_options) == ("cpu", given)
        got = [batch.clone() for batch in twin]
        expected = expected or [batch.clone() for batch in loader]
        assert len(got) == 3
        assert transfer_of(twin) is not transfer_of(loader)


def test_a_transform_may_refer_to_its_loader() -> None:
    """A trainer that holds the loader and gives it a method of its own is collected like anything else."""

    class Trainer:
        def __init__(self) -> None:
            self.loader = DataLoader[Any](
                Numbers(3), device="cpu", device_options=DeviceOptions(device_transform=self.transform)
            )

        def transform(self, batch: Any) -> Any:
            return batch

    trainer = Trainer()
    assert len(list(trainer.loader)) == 3
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None


def test_a_forked_child_opens_its_own() -> None:
    """A child cannot use a device that its parent has opened."""
    with installed() as machine:
        loader = DataLoader[Any](Numbers(3), device="cpu")
        transfer = transfer_of(loader)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if transfer_of(loader) is not transfer and len(machine.devices) == 2 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# ------------------------------------------------------------------------------------- devices that do not exist


@BOTH
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 3)], ids=str)
def test_cuda_without_cuda(make: Any, workers: int, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader can be made anywhere; when it is iterated, the error names the device and the reason. Nothing is left
    behind.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    loader = make(Numbers(3), num_workers=workers, device=device)
    assert "device: cuda" in loader.explain()
    with pytest.raises(DeviceUnavailable) as caught:
        aiter(loader) if make is AsyncDataLoader else iter(loader)
    assert (caught.value.device, "CUDA" in caught.value.reason) == (str(device), True)
    assert str(caught.value).startswith(f"device={str(device)!r} cannot be used: ")
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("name", ["mps", "xpu"])
def test_another_accelerator_that_is_not_there(name: str) -> None:
    """The error is `DeviceUnavailable`, too, and its reason quotes torch."""
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError):
        with pytest.raises(DeviceUnavailable, match=f"'{name}' cannot be used: torch .* says: "):
            next(iter(DataLoader[Any](Numbers(3), device=name)))
    else:
        assert isinstance(open_accelerator(torch.device(name)), PlainAccelerator)
