"""Samples of every type, through `default_collate` and past it: the batches are those of torch's loader."""

from __future__ import annotations

import enum
import multiprocessing
import queue
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.base.events import Action, Deliver, Finish
from asyncloader.delivery.opener import Opener
from asyncloader.delivery.stage import Pinned, PinStage, torch_pin
from asyncloader.telemetry.counters import Recorder
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.inbox import Answer
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.codec import Encoder
from asyncloader.workers.ipc.layout import PAGE
from asyncloader.workers.ipc.ring import Ring
from asyncloader.workers.ipc.template import Template
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import identity
from tests.helpers.frameworks import epoch
from tests.helpers.running import BOTH, outcomes, without_place
from tests.helpers.samples import SAMPLES, Everything, SimpleBatch, same_stride

pytestmark = [
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),  # torch warns once
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR) tensor support:UserWarning"),
]

PAIRS = [[2 * n, 2 * n + 1] for n in range(len(SAMPLES))]


# torch collates these without workers and refuses them in workers, because there it stacks into shared memory. Our
# workers collate them as well. (And arrays with negative strides, which torch refuses anywhere.)
COLLATED_BY_OUR_WORKERS = {
    "conjugate",
    "negated view",
    "parameter",
    "needs gradient",
    "quantized",
    "quantized by channel",
}


def plain(value: Any) -> Any:
    """Values that cannot be compared by their bytes, as the parts that they are made of."""
    if isinstance(value, torch.Tensor):
        if value.is_quantized:
            scheme = value.qscheme()
            channels = scheme not in (torch.per_tensor_affine, torch.per_tensor_symmetric)
            scale = value.q_per_channel_scales() if channels else value.q_scale()
            zero = value.q_per_channel_zero_points() if channels else value.q_zero_point()
            return ["quantized", value.dtype, str(scheme), value.int_repr(), scale, zero]
        if value.is_nested:
            return ["nested", value.layout, value.dtype, [part.clone() for part in value.unbind()]]
        if value.is_neg():
            return [
                "negative",
                value.resolve_neg().contiguous().clone(memory_format=torch.contiguous_format),
                value.stride(),
            ]
        return value
    if isinstance(value, torch.UntypedStorage):
        return ["storage", value.tolist()]
    if isinstance(value, enum.Enum | type | FunctionType):
        return ["by name", repr(value)]
    if isinstance(value, np.ma.MaskedArray):
        return ["masked", value.data, np.ma.getmaskarray(value)]
    if type(value) is list:
        return [plain(item) for item in value]
    return value


def _is_error(found: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], type)


def assert_arrives(name: str, got: Any, expected: Any) -> None:
    if _is_error(expected):
        assert _is_error(got), f"{name}: {got!r} in place of {expected}"
        assert got[0] is expected[0], name
        last = without_place(got[1]).splitlines()[-1]
        assert last.endswith(expected[1].splitlines()[-1]), name  # a worker's text has the type as well
        return
    assert not _is_error(got), f"{name}: {got}"
    a, b = plain(got), plain(expected)
    assert_same(a, b, name)
    assert same_stride(a, b), name


def differences(kind: str, expected: list[Any], **options: Any) -> list[str]:
    got = outcomes(kind, Everything(), **options)
    assert len(got) == len(expected)
    found = []
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        try:
            assert_arrives([*SAMPLES][number], ours, theirs)
        except Exception as error:
            found.append(f"{[*SAMPLES][number]}: {str(error).splitlines()[0]}")
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_collated_by_default(kind: str, workers: int) -> None:
    """The result of `default_collate` for two samples of each type, or the error that it raises, is torch's."""
    options: dict[str, Any] = {"batch_sampler": PAIRS, "num_workers": workers, "timeout": 60 if workers else 0}
    expected = outcomes("torch", Everything(), **options)
    assert sum(map(_is_error, expected)) > 15
    if workers:
        here = outcomes("torch", Everything(), batch_sampler=PAIRS)
        refused = {name for name, a, b in zip(SAMPLES, expected, here, strict=True) if _is_error(a) and a[1] != b[1]}
        for number, name in enumerate(SAMPLES):
            if name in COLLATED_BY_OUR_WORKERS:
                expected[number] = here[number]
        assert refused >= COLLATED_BY_OUR_WORKERS
        expected[[*SAMPLES].index("reversed array")] = torch.tensor([[3, 2, 1, 0]] * 2)
    assert differences(kind, expected, **options) == []


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_passed_on_as_they_are(kind: str, workers: int) -> None:
    """With a `collate_fn` that returns its list every sample is delivered with its type, dtype, shape and strides."""
    expected = outcomes("torch", Everything(), batch_sampler=PAIRS, collate_fn=identity)
    options: dict[str, Any] = {"batch_sampler": PAIRS, "num_workers": workers, "timeout": 60 if workers else 0}
    assert differences(kind, expected, collate_fn=identity, **options) == []
    assert [name for name, value in zip(SAMPLES, expected, strict=True) if _is_error(value)] == []


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_converted_one_by_one(kind: str, workers: int) -> None:
    """With batch_size=None each sample goes through `default_convert`, as in torch."""
    order = [2 * n for n in range(len(SAMPLES))]
    expected = outcomes("torch", Everything(), batch_size=None, sampler=order)
    options: dict[str, Any] = {"batch_size": None, "num_workers": workers, "timeout": 60 if workers else 0}
    assert differences(kind, expected, sampler=order, **options) == []


@pytest.mark.parametrize("kind", BOTH)
def test_attributes_of_tensors_arrive(kind: str) -> None:
    """A tensor's own attributes, and the attributes of subclasses of dict and list, are kept."""
    names = [*SAMPLES]
    wanted = ["tensor with attribute", "dict subclass", "list subclass", "with pin_memory"]
    sampler = [[2 * names.index(name)] for name in wanted]
    options: dict[str, Any] = {"batch_sampler": sampler, "num_workers": 1, "collate_fn": identity}
    (tensor,), (tags,), (row,), (batch,) = outcomes(kind, Everything(), **options)
    assert tensor.tag == f"tag {sampler[0][0] % 7}"
    assert (type(tags).__name__, tags.origin) == ("Tags", "tags")
    assert (type(row).__name__, row.origin) == ("Row", "row")
    assert not batch.pinned


@pytest.mark.parametrize("kind", BOTH)
def test_gradients_are_kept(kind: str) -> None:
    """Leaves that require a gradient still require it, and are leaves."""
    names = [*SAMPLES]
    sampler = [[2 * names.index(name)] for name in ("parameter", "needs gradient")]
    options: dict[str, Any] = {"batch_sampler": sampler, "num_workers": 1, "collate_fn": identity}
    for (tensor,) in outcomes(kind, Everything(), **options):
        assert tensor.is_leaf
        tensor.sum().backward()
        assert tensor.grad.tolist() == [1.0, 1.0]


# ------------------------------------------------------------------------------------------- pinning


def test_pin_memory_of_users_classes() -> None:
    """The pinning stage calls `pin_memory()` of a user's batch, at every depth of containers where torch calls it."""
    value = [SimpleBatch([torch.ones(3)]), {"inner": (SimpleBatch("text"), "beside")}]
    ring = Ring(slots=2, slot_bytes=PAGE, credits=1)
    ring.close_fd()
    encoded = Encoder().encode(value)
    slot = ring.take()
    assert slot is not None
    encoded.write(ring._memory, slot * ring.slot_bytes)
    result = wire.Result(0, 0, slot, encoded.nbytes, 0, 1, 0.5, same=False)
    out: queue.SimpleQueue[Action] = queue.SimpleQueue()
    stage = PinStage(Opener(Statistics()), torch_pin(None), Recorder(), out.put)
    stage.put(Deliver(0, 0, Answer(result, Template(encoded.template), ring, None)))
    stage.put(Finish())
    delivered, last = out.get(timeout=60), out.get(timeout=60)
    stage.close()
    assert last == Finish()
    assert isinstance(delivered, Deliver)
    assert isinstance(delivered.outcome, Pinned)
    first, rest = delivered.outcome.batch
    assert first.pinned
    assert first.samples[0].tolist() == [1.0] * 3
    assert rest["inner"][0].pinned
    assert rest["inner"][1] == "beside"


# ------------------------------------------------------------------------------------------- shared memory


class Flagged(Dataset[Any]):
    """A dataset that reads a flag in shared memory, and counts its fetches in another tensor."""

    field = -1

    def __init__(self) -> None:
        self.flag = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.fetches = torch.zeros(4, dtype=torch.int64).share_memory_()
        self.plain = torch.zeros(1, dtype=torch.int64)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        self.fetches[info.id] += 1
        return int(self.flag), self.flag.is_shared(), int(self.plain), self.field


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "method"),
    [
        (torch.utils.data.DataLoader, "fork"),
        (DataLoader, "fork"),
        (DataLoader, "spawn"),
        (AsyncDataLoader, "fork"),
        (AsyncDataLoader, "spawn"),
    ],
)
def test_shared_flags_stay_shared(make: Any, method: str) -> None:
    """Persistent workers see values that the main process writes between epochs, and it sees theirs, but they see no
    assigned attribute; as in torch (HF datasets' `_epoch`).
    """
    dataset = Flagged()
    loader = make(dataset, num_workers=2, persistent_workers=True, multiprocessing_context=method, collate_fn=identity)
    for number in range(3):
        dataset.flag.fill_(number)
        dataset.plain.fill_(number)  # not shared when forked; a spawned worker's pickle moves it to shared memory
        assert [batch[0] for batch in epoch(loader)] == [(number, True, 0 if method == "fork" else number, -1)] * 6
        assert dataset.fetches.tolist() == [3 * (number + 1)] * 2 + [0, 0]
        dataset.field = number
    del loader


class WithPrimitives(Dataset[Any]):
    """Holds objects that only a starting process may be given: a lock, an event, a queue; and a shared model."""

    def __init__(self, method: str) -> None:
        context = multiprocessing.get_context(method)
        self.begun = context.Event()
        self.lock = context.Lock()
        self.queue: Any = context.SimpleQueue()
        self.model = torch.nn.Linear(1, 1)
        self.model.share_memory()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            self.begun.set()
        self.queue.put(index)
        return float(self.model.weight.detach()[0, 0])


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_synchronization_objects_travel(method: str) -> None:
    """A dataset may hold multiprocessing's locks, events and queues, and a shared model, forked or pickled."""
    dataset = WithPrimitives(method)
    loader = DataLoader[Any](
        dataset, num_workers=2, persistent_workers=True, multiprocessing_context=method, collate_fn=identity
    )
    for number in range(2):
        with torch.no_grad():
            dataset.model.weight.fill_(number + 0.5)
        assert [batch[0] for batch in loader] == [number + 0.5] * 4
        assert dataset.begun.is_set()
        assert sorted(dataset.queue.get() for _ in range(4)) == [0, 1, 2, 3]
    loader.close()
    dataset.queue.close()


class SharedSamples(Dataset[Any]):
    """Gives tensors that lie in shared memory already."""

    def __init__(self) -> None:
        self.data = torch.arange(12.0).reshape(4, 3).share_memory_()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


@pytest.mark.parametrize("kind", BOTH)
def test_samples_in_shared_memory_are_copied(kind: str) -> None:
    """Rows of a shared tensor are collated into a new batch: writing to the batch does not change the dataset."""
    dataset = SharedSamples()
    for batch in outcomes(kind, dataset, num_workers=1, batch_size=2):
        batch.fill_(-1.0)
    assert torch.equal(dataset.data, torch.arange(12.0).reshape(4, 3))
