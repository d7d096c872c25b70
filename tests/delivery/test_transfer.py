from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from asyncloader.delivery.accelerator import PlainAccelerator
from asyncloader.delivery.transfer import DeviceTransfer
from tests.delivery.fake import PATIENCE_S, STALE, FakeEvent, FakeMachine

CPU = torch.device("cpu")


def is_stale(tensor: torch.Tensor) -> bool:
    return bool((tensor.reshape(-1).view(torch.uint8) == STALE).all())


def new(*, manual: bool = True, transform: Any = None, static: bool = False) -> tuple[FakeMachine, DeviceTransfer]:
    machine = FakeMachine(manual=manual)
    return machine, DeviceTransfer(machine.open(), transform, static=static)


def test_a_copy_is_asked_for_and_not_waited_for() -> None:
    """The batch is delivered with the event after which it holds its values, whatever happens to its source then."""
    machine, transfer = new()
    source = {"x": torch.arange(5), "name": "a"}
    ready = transfer.start(source, locked=True)
    assert is_stale(ready.batch["x"])
    assert ready.tensors == [ready.batch["x"]]
    batch = transfer.take(ready)
    (handed,) = machine.device.handed
    assert (handed.addresses, handed.event) == ([batch["x"].data_ptr()], ready.event)
    assert handed.thread is threading.current_thread()
    assert is_stale(batch["x"])
    machine.device.advance()
    assert batch["x"].tolist() == [0, 1, 2, 3, 4]
    assert batch["name"] == "a"
    assert machine.trouble == []


def test_a_source_that_changes_too_early_would_show() -> None:
    """The fake device reads as late as a real device may: else the other tests here would prove nothing."""
    machine, transfer = new()
    source = torch.arange(5)
    machine.lock(source.data_ptr(), source.nbytes)
    ready = transfer.start(source, locked=True)
    source.fill_(9)
    machine.device.advance()
    assert ready.batch.tolist() == [9] * 5


def test_memory_that_is_not_locked_is_pinned_first() -> None:
    """Then the source may change at once."""
    machine, transfer = new()
    sources = [torch.arange(5), torch.ones(2)]
    ready = transfer.start(sources, locked=False)
    for source in sources:
        source.fill_(9)
    machine.device.advance()
    assert [tensor.tolist() for tensor in ready.batch] == [[0, 1, 2, 3, 4], [1, 1]]
    assert machine.device.sources == ["pinned", "pinned"]
    assert machine.trouble == []


def test_the_transform_runs_behind_the_copies() -> None:
    """It runs in the thread of the copies, in a stream that waits for them and declares that it reads them; its
    result is delivered, with its own event, and its tensors are those handed to the consumer's stream.
    """
    machine = FakeMachine(manual=True)
    device = machine.open()
    seen: list[tuple[Any, int, threading.Thread]] = []

    def transform(batch: Any) -> Any:
        seen.append((batch["x"], device.events, threading.current_thread()))
        return {"y": batch["x"] * 2.0}

    transfer = DeviceTransfer(device, device.after_copies(transform), static=False)
    ready = transfer.start({"x": torch.arange(3)}, locked=True)
    ((moved, events, thread),) = seen
    assert (moved.tolist(), events, thread) == ([0, 1, 2], 1, threading.current_thread())
    assert device.events == 2
    assert device.computed == [([moved.data_ptr()], ready.copied)]
    batch = transfer.take(ready)
    assert batch["y"].tolist() == [0.0, 2.0, 4.0]
    assert device.handed[0].addresses == [batch["y"].data_ptr()]


class Peeking:
    """An object that refers to the CPU's memory, and cannot be moved."""

    __slots__ = ("view",)

    def __init__(self, view: torch.Tensor) -> None:
        self.view = view


@pytest.mark.parametrize("rest", [None, "text", (1, [2.5, {"a": b"b"}])])
def test_what_was_copied_is_not_held_through_the_transform(rest: Any) -> None:
    """The source is free at the event of the copies; the consumer waits for the transform's event."""
    machine, transfer = new(transform=lambda batch: batch)
    ready = transfer.start({"x": torch.arange(3), "rest": rest}, locked=True)
    machine.device.advance()
    assert isinstance(ready.copied, FakeEvent)
    assert isinstance(ready.event, FakeEvent)
    assert (ready.copied.done.is_set(), ready.event.done.is_set()) == (True, False)


@pytest.mark.parametrize("kind", [lambda view: view.numpy(), Peeking, memoryview])
def test_what_the_transform_may_still_read_is_held(kind: Any) -> None:
    """Such a part of the batch was not copied: the transform may copy it later, in its own stream."""
    _, transfer = new(transform=lambda batch: batch)
    ready = transfer.start(
        [torch.arange(3), kind(torch.arange(4).numpy() if kind is memoryview else torch.arange(4))], locked=True
    )
    assert ready.copied is ready.event


def test_after_an_error_of_the_transform_the_source_is_not_read_any_more() -> None:
    """The caller drops the source: the copies that were begun are waited for."""

    def refuse(batch: Any) -> Any:
        raise KeyError("no label")

    machine, transfer = new(transform=refuse)
    failed: list[BaseException] = []

    def move() -> None:
        try:
            transfer.start(torch.arange(3), locked=True)
        except KeyError as error:
            failed.append(error)

    thread = threading.Thread(target=move)
    thread.start()
    event = machine.device.waits.get(timeout=PATIENCE_S)
    machine.device.advance()
    assert failed == []
    machine.device.advance()
    thread.join()
    assert event.done.is_set()
    assert str(failed[0]) == "'no label'"
    assert (machine.device.events, machine.device.reached) == (2, 2)


def test_two_threads_take_turns() -> None:
    """Two iterators of one loader, for example: a device is asked for one batch at a time."""
    machine, transfer = new(manual=False)
    begin = threading.Barrier(4)
    wrong: list[Any] = []

    def work(number: int) -> None:
        begin.wait()
        for step in range(50):
            batch = transfer.take(
                transfer.start([torch.full((8,), number * 100 + step) for _ in range(3)], locked=step % 2 > 0)
            )
            wrong.extend(tensor for tensor in batch if tensor.tolist() != [number * 100 + step] * 8)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert machine.trouble == []
    assert machine.device.events == 200


def test_static_batches_are_filled_when_they_are_taken() -> None:
    """They are filled in the consumer's stream, behind its work on the batch before, not when the copy is asked for."""
    machine, transfer = new(static=True)
    first = transfer.start(torch.arange(3), locked=True)
    machine.device.advance()
    batch = transfer.take(first)
    second = transfer.start(torch.arange(3) + 10, locked=True)
    machine.device.advance()
    assert batch.tolist() == [0, 1, 2]
    assert transfer.take(second) is batch
    assert batch.tolist() == [10, 11, 12]


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_each_part_of_a_sparse_tensor_is_handed_over() -> None:
    """`record_stream` accepts dense tensors only."""
    machine, transfer = new(manual=False)
    ready = transfer.start(
        {"a": torch.eye(3).to_sparse(), "b": torch.eye(4).to_sparse_csr(), "c": torch.ones(2)}, locked=True
    )
    batch = transfer.take(ready)
    (handed,) = machine.device.handed
    assert len(handed.addresses) == 2 + 3 + 1
    assert batch["a"]._values().data_ptr() in handed.addresses
    assert batch["b"].crow_indices().data_ptr() in handed.addresses


def test_a_plain_device_gets_plain_copies() -> None:
    """It has no locks and no events; on the CPU itself a batch keeps its own tensors."""
    transfer = DeviceTransfer(PlainAccelerator(CPU), None, static=False)
    source = [torch.arange(3), "a"]
    ready = transfer.start(source, locked=False)
    assert ready.event is None
    assert transfer.take(ready)[0] is source[0]
    assert transfer.accelerator.lock is None
