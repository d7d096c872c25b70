"""Draws cases for the differential fuzz against torch: batches of any structure, dtype, layout and collation.

A case is a number. Its samples follow from it alone, in any process: they are made where they are fetched, in a worker
of ours or of torch. The samples of a case have the same structure, and now and then a sample has another.
"""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.storage import _new_dtypes
from torch.utils.data import Dataset, default_collate, default_convert

from asyncloader.workers.ipc.leaves import DTYPES

SAMPLES = 5  # of a case, at most
BASE = torch.arange(40_000, dtype=torch.float32).view(200, 200)
"""Many samples are views of this tensor."""

# No arrays of foreign byte order: pickle, which torch's workers use, makes them native, and ours keep them.
TENSOR_DTYPES = [*[torch.float32, torch.int64, torch.float64, torch.uint8] * 3, *DTYPES]
ARRAY_DTYPES = ["f4", "f8", "i8", "u1", "?", "f2", "c8", "i2", "u4", "m8[s]", "M8[D]", "S3", "U2", "f4,i2"]


class Tagged(torch.Tensor):
    """A user's tensor type."""


class Units(np.ndarray[Any, np.dtype[Any]]):
    """An array type that refuses ``out=``."""

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            raise TypeError("no out=")
        return super().__array_function__(func, types, args, kwargs)


class Pair(NamedTuple):
    """A user's named tuple."""

    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    """A user's own class, which default collation refuses."""

    one: Any
    other: Any


Make = Callable[[random.Random], Any]
"""Makes a part of a sample; with another stream of numbers, the same part of another sample."""


# ------------------------------------------------------------------------------------------- tensors


def _filled(dtype: torch.dtype, shape: tuple[int, ...], draw: random.Random) -> torch.Tensor:
    count = int(np.prod(shape))
    whole = (torch.arange(count) + draw.randrange(100)) % 100
    if dtype is torch.bool:
        return (whole % 3 == 0).view(shape)
    if dtype.is_complex:
        return torch.complex(whole.float(), -whole.float()).to(dtype).view(shape)
    return whole.to(dtype).view(shape)


def _contiguous(dtype: torch.dtype, shape: tuple[int, ...], draw: random.Random) -> torch.Tensor:
    return _filled(dtype, shape, draw)


def _sliced(dtype: torch.dtype, shape: tuple[int, ...], draw: random.Random) -> torch.Tensor:
    step = len(shape) % 3 + 1
    return _filled(dtype, tuple(step * n + 1 for n in shape), draw)[tuple(slice(1, None, step) for _ in shape)]


def _reversed(dtype: torch.dtype, shape: tuple[int, ...], draw: random.Random) -> torch.Tensor:
    return _filled(dtype, shape[::-1], draw).permute(*reversed(range(len(shape))))


def _expanded(dtype: torch.dtype, shape: tuple[int, ...], draw: random.Random) -> torch.Tensor:
    return _filled(dtype, tuple(n if i % 2 else min(n, 1) for i, n in enumerate(shape)), draw).expand(shape)


def _odd_strides(dtype: torch.dtype, shape: tuple[int, ...], draw: random.Random) -> torch.Tensor:
    strides = tuple(7 * i + 1 for i in range(len(shape)))
    room = sum(max(0, n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    return _filled(dtype, (room + 3,), draw).as_strided(shape, strides, 3)


LAYOUTS = [_contiguous, _contiguous, _contiguous, _sliced, _reversed, _expanded, _odd_strides]


def _tensor(draw: random.Random) -> Make:
    dtype, layout = draw.choice(TENSOR_DTYPES), draw.choice(LAYOUTS)
    shape = tuple(
        draw.choice([1, 1, 2, 3, 4, 5, draw.choice([0, 40])]) for _ in range(draw.choice([0, 1, 1, 2, 2, 3, 4]))
    )
    last = len(shape) == 4 and draw.random() < 0.5
    # torch cannot unpickle subclasses of the newer dtypes, and its loader stops answering after that.
    subclass = draw.random() < 0.05 and dtype not in _new_dtypes()

    def make(draw: random.Random) -> torch.Tensor:
        made = layout(dtype, shape, draw)
        if last:
            made = made.contiguous(memory_format=torch.channels_last)
        return made.as_subclass(Tagged) if subclass else made

    return make


def _view_of_base(draw: random.Random) -> Make:
    kind = draw.randrange(5)

    def make(draw: random.Random) -> torch.Tensor:
        at = draw.randrange(150)
        views = [BASE[at], BASE[:, at], BASE[at : at + 3, ::50], BASE[at, at : at + 20], BASE[::60, ::70].t()]
        return views[kind]

    return make


def _flagged(draw: random.Random) -> Make:
    """Make tensors whose flags default collation would drop; used only without collation."""
    dtype, kind = draw.choice([torch.float32, torch.float64, torch.complex64]), draw.randrange(5)
    inner = _view_of_base(draw) if draw.random() < 0.4 else lambda draw: _filled(dtype, (3, 2), draw)

    def make(draw: random.Random) -> Any:
        tensor = inner(draw)
        if kind == 0:
            return tensor.detach().requires_grad_()
        if kind == 1:
            return torch.nn.Parameter(tensor, requires_grad=draw.random() < 0.5)
        if kind == 2:
            return tensor.as_subclass(Tagged)
        if kind == 3:  # no lazy conjugate: torch's workers lose that mark, and with it the sign
            return _filled(torch.complex64, (3,), draw)[1:].real
        return _filled(torch.float32, (3, 3), draw).to_sparse()

    return make


# ------------------------------------------------------------------------------------------- everything else


def _array(draw: random.Random) -> Make:
    dtype = np.dtype(draw.choice(ARRAY_DTYPES[: draw.choice([4, 9, len(ARRAY_DTYPES)])]))
    shape = tuple(draw.choice([0, 1, 2, 3, 3]) for _ in range(draw.choice([0, 1, 1, 2, 3])))
    kind = draw.randrange(7)

    def make(draw: random.Random) -> Any:
        count = int(np.prod(shape))
        whole = (np.arange(count) + draw.randrange(100)) % 100
        made = whole.astype(dtype).reshape(shape) if dtype.names is None else np.zeros(shape, dtype)
        if kind == 1:
            made = np.asfortranarray(made)
        elif kind == 2:
            made = made[::-1] if shape else made
        elif kind == 3:
            made.flags.writeable = False
        elif kind == 4:
            made = np.frombuffer(made.tobytes(), dtype).reshape(shape) if count else made
        elif kind == 5:
            made = made.view(Units)
        return made

    return make


SCALARS: list[Make] = [
    lambda draw: draw.randrange(1000),
    lambda draw: draw.random(),
    lambda draw: draw.random() < 0.5,
    lambda draw: draw.choice(["a", "text", ""]),
    lambda draw: draw.choice([b"bytes", b""]),
    lambda draw: draw.choice([1, 2.5]),
    lambda draw: draw.choice([1, True]),
    lambda draw: 1 << draw.choice([40, 62, 63, 64, 70]),
    lambda draw: np.float32(draw.random()),
    lambda draw: np.int16(draw.randrange(100)),
    lambda draw: draw.choice([np.bool_(0), np.bool_(1)]),
    lambda draw: torch.tensor(draw.randrange(9)),
    lambda draw: float("nan"),
]
ODD: list[Make] = [
    lambda draw: None,
    lambda draw: 1j,
    lambda draw: range(draw.randrange(3)),
    lambda draw: frozenset("ab"),
]


def _part(draw: random.Random, depth: int, *, plain: bool) -> Make:
    kind = draw.random()
    if depth and kind < 0.35:
        return _container(draw, depth, plain=plain)
    if kind < 0.6:
        return _tensor(draw)
    if kind < 0.68:
        return _view_of_base(draw)
    if kind < 0.82:
        return _array(draw)
    if kind < 0.86 and not plain:
        return _flagged(draw)
    return draw.choice(ODD) if kind > 0.985 or (kind > 0.96 and not plain) else draw.choice(SCALARS)


def _container(draw: random.Random, depth: int, *, plain: bool) -> Make:
    parts = [_part(draw, depth - 1, plain=plain) for _ in range(draw.choice([1, 2, 2, 3]))]
    kinds: list[Callable[[list[Any]], Any]] = [
        list,
        tuple,
        lambda made: {f"k{i}": each for i, each in enumerate(made)},
        lambda made: OrderedDict(enumerate(made)),
        lambda made: Pair(made[0], made[-1]),
        lambda made: defaultdict(int, {"x": made[0]}),
        lambda made: UserDict({"y": made[-1]}),
        lambda made: Record(made[0], made),
    ]
    build = draw.choice(kinds[:7] if plain else kinds)
    return lambda draw: build([make(draw) for make in parts])


# ------------------------------------------------------------------------------------------- collations


def keep(samples: list[Any]) -> Any:
    """No collation."""
    return samples


def zipped(samples: list[Any]) -> Any:
    """Return the columns of the samples, if these are lists."""
    return tuple(zip(*samples, strict=True)) if all(isinstance(each, list | tuple) for each in samples) else samples[-1]


def mixed(samples: list[Any]) -> Any:
    """Return the samples twice, and parts of them."""
    tensors = [each for each in samples if type(each) is torch.Tensor and each.layout is torch.strided]
    return {"samples": samples, "again": samples[:1], "views": [each.reshape(-1)[:2] for each in tensors]}


def stacked(samples: list[Any]) -> Any:
    """Return the default collation, and views of it."""
    batch = default_collate(samples)
    return [batch, batch[1:], batch.transpose(0, -1)] if isinstance(batch, torch.Tensor) else batch


OWN: list[Callable[[list[Any]], Any]] = [keep, zipped, mixed, stacked, default_convert]


def own(samples: list[tuple[int, Any]]) -> Any:
    """Collate as the case demands."""
    return OWN[samples[0][0] % len(OWN)]([sample for _, sample in samples])


COLLATES: dict[str, Any] = {"default": None, "own": own}


class Cases(Dataset[Any]):
    """The samples of all cases. With a collation of ours, each sample stands beside its case."""

    def __init__(self, seed: int, collate: str) -> None:
        self.seed = seed
        self.collate = collate

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, index: int) -> Any:
        case, number = divmod(index, SAMPLES)
        make = _part(random.Random(f"{self.seed}/{case}"), 3, plain=self.collate == "default")
        if number and random.Random(f"{self.seed}/{case}/odd").random() < 0.03:
            make = _part(random.Random(f"{self.seed}/{case}/{number}/odd"), 1, plain=self.collate == "default")
        sample = make(random.Random(f"{self.seed}/{case}/{number}"))
        return sample if self.collate == "default" else (case, sample)


def batch_of(case: int) -> list[int]:
    """Return the indices of a case's samples."""
    return [case * SAMPLES + number for number in range(1 + case % SAMPLES)]
