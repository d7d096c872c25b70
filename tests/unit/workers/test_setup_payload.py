from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from asyncloader.base.events import Cursor
from asyncloader.workers.fetch.setup import EpochStart, SeededSetup, WorkerSetup
from asyncloader.workers.setup_payload import Payload, explain_unpicklable


class Counted:
    """Counts how often it is pickled in this process."""

    times = 0

    def __reduce__(self) -> Any:
        type(self).times += 1
        return Counted, ()


class Data:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


def setup(dataset: Any, **changes: Any) -> WorkerSetup:
    plain = WorkerSetup(
        dataset=dataset,
        iterable=False,
        auto_collation=True,
        batch_size=2,
        collate_fn=default_collate,
        drop_last=False,
        base_seed=1,
        worker_init_fn=None,
        num_workers=2,
        concurrency=8,
        starts=[EpochStart(shared_seed=5), EpochStart(epoch=3, cursor=Cursor(2, 4, False, {"at": 4}, None), skip=1)],
        snapshot_every=1,
        seeded=SeededSetup(seed=1 << 63, replicas=2, first_stream=4, seed_collate=True),
    )
    return plain._replace(**changes)


def run_children(context: Any, target: Any, *arguments: Any, count: int = 1) -> list[int | None]:
    """Start `count` children with the same arguments, and return their exit codes."""
    children = [context.Process(target=target, args=(number, *arguments)) for number in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    codes = [child.exitcode for child in children]
    for child in children:
        child.close()
    return codes


def child_uses_everything(number: int, payload: Payload) -> None:
    """In a child: take the lock, answer through the queue, write to the shared tensor, read the plain parts."""
    data = payload.load().dataset
    assert data.array.tolist() == [0, 1, 2]
    with data.lock:
        data.shared[number] = number + 10
        data.shared[2] += 1
    data.queue.put((number, data.name))
    assert data.event.wait(60)
    assert payload.fd == -1
    for fd in payload.fds:  # taken, and closed
        try:
            os.fstat(fd)
        except OSError:
            continue
        raise AssertionError(fd)


@pytest.mark.thorough
def test_what_may_only_be_inherited_is_shared_with_every_child() -> None:
    """Locks, queues, events and tensors in shared memory are the same objects in all children, from one pickling."""
    context = torch.multiprocessing.get_context("spawn")
    shared = torch.zeros(3).share_memory_()
    lock, queue, event = context.Lock(), context.SimpleQueue(), context.Event()
    event.set()
    data = Data(lock=lock, queue=queue, event=event, shared=shared, array=np.arange(3), name="n", counted=Counted())
    Counted.times = 0
    payload = Payload.dump(setup(data))
    try:
        assert run_children(context, child_uses_everything, payload, count=2) == [0, 0]
        assert Counted.times == 1
        assert sorted(queue.get() for _ in range(2)) == [(0, "n"), (1, "n")]
        assert shared.tolist() == [10.0, 11.0, 2.0]
    finally:
        payload.close()
        queue.close()


def test_descriptors_of_what_pickling_makes_stay_open() -> None:
    """A generator's state is pickled as a tensor that nothing else holds; its memory is passed by descriptor, too."""
    payload = Payload.dump(setup([torch.Generator(), torch.Generator()]))
    try:
        assert len(set(payload.fds)) == 2
        assert all(os.fstat(fd).st_size for fd in payload.fds)
    finally:
        payload.close()


def test_descriptors_are_collected_beside_the_bytes() -> None:
    """The payload holds one descriptor of its own, and lists those that the set-up owns."""
    shared = torch.zeros(3).share_memory_()
    payload = Payload.dump(setup(shared))
    assert len(payload.fds) == 1
    assert os.fstat(payload.fd).st_size == payload.nbytes
    assert not os.get_inheritable(payload.fd)
    fd = payload.fd
    payload.close()
    payload.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_load_gives_the_setup_and_takes_the_descriptors() -> None:
    """`load` gives equal values, and closes the payload's descriptors."""
    payload = Payload.dump(setup([1, 2], batch_size=7))
    loaded = payload.load()
    assert loaded == setup([1, 2], batch_size=7)
    assert loaded.starts[1].cursor == Cursor(2, 4, False, {"at": 4}, None)
    assert isinstance(loaded.seeded, SeededSetup)
    assert payload.fd == -1


def test_failed_load_closes_its_descriptors() -> None:
    """A set-up that does not unpickle leaves no descriptor (the leak check looks)."""
    payload = Payload.dump(setup(Refusing()))
    with pytest.raises(ValueError, match="cannot be rebuilt"):
        payload.load()
    assert payload.fd == -1


class Refusing:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("cannot be rebuilt")


def test_unpicklable_setup_leaves_nothing_behind() -> None:
    """A failure leaves no state behind, and another set-up is pickled as usual."""
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        Payload.dump(setup(threading.Lock()))
    payload = Payload.dump(setup([1]))
    assert payload.load().dataset == [1]


def local_function() -> Any:
    return lambda value: value


EXPLAINED = {
    "dataset attribute": (setup(Data(ok=1, lock=threading.Lock())), "dataset.lock = <unlocked _thread.lock"),
    "deep attribute": (setup(Data(inner=Data(file=Data(f=local_function())))), "dataset.inner.file.f = <function"),
    "in containers": (setup(Data(fns={"a": [1, local_function()]})), "dataset.fns['a'][1] = <function"),
    "dataset itself": (setup(threading.Lock()), "dataset = <unlocked _thread.lock"),
    "collate_fn": (setup([1], collate_fn=local_function()), "collate_fn = <function"),
    "worker_init_fn": (setup([1], worker_init_fn=local_function()), "worker_init_fn = <function"),
}


@pytest.mark.parametrize("kind", EXPLAINED)
def test_the_unpicklable_part_is_named(kind: str) -> None:
    """The explanation names the part, down to the attribute, and shows its value."""
    given, words = EXPLAINED[kind]
    text = explain_unpicklable(given)
    assert text is not None
    assert text.startswith(words)
    assert " cannot be pickled, as all that goes to workers must be unless they are forked. " in text


def test_long_values_are_shortened() -> None:
    """The shown value is at most a line or two."""

    class Long:
        def __repr__(self) -> str:
            return "x" * 1000

        def __reduce__(self) -> Any:
            raise TypeError

    text = explain_unpicklable(setup(Data(part=Long())))
    assert text is not None
    assert len(text) < 600
    assert "xxx..." in text
