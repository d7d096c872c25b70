"""What samplers draw their orders from: torch's global generator, or one of their own; its state as a text, and back.

Data path: beside the sampler. A state is kept as text (base64), which JSON and ``torch.load(weights_only=True)`` take.
"""

from __future__ import annotations

import base64
import contextlib
import inspect
import struct
from collections.abc import Generator, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from asyncloader.errors import StateError

__all__ = [
    "drawing_from",
    "drawing_generator",
    "drawn_from",
    "draws_when_iterated",
    "generator_state",
    "generator_states",
    "generator_text",
    "iterates_plainly",
    "own_generator",
    "samplers_within",
    "set_generators",
]


def samplers_within(sampler: Any) -> Iterator[Any]:
    """The sampler, then those that it reads from, outermost first. Each comes once: some samplers refer to themselves,
    so that code that looks for ``batch_sampler.sampler`` finds them.
    """
    waiting, seen = [sampler], set[int]()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += getattr(each, "batch_sampler", None), getattr(each, "sampler", None)


_drawing: ContextVar[tuple[torch.Generator, object] | None] = ContextVar("asyncloader_drawing", default=None)


@contextlib.contextmanager
def drawing_from(generator: torch.Generator, loader: object) -> Generator[None]:
    """Inside, in this thread, the loader's `generator` is this one."""
    token = _drawing.set((generator, loader))
    try:
        yield
    finally:
        _drawing.reset(token)


def drawing_generator(loader: object) -> torch.Generator | None:
    """The generator that the loader has for the moment; None: its own."""
    drawing = _drawing.get()
    return None if drawing is None or drawing[1] is not loader else drawing[0]


def own_generator(sampler: Any) -> torch.Generator | None:
    """The torch generator of the sampler, or of the one that it reads from; None if that is the global one."""
    found = (getattr(each, "generator", None) for each in samplers_within(sampler))
    return next((own for own in found if isinstance(own, torch.Generator)), None)


def set_generators(saved: dict[str, str], own: torch.Generator | None) -> None:
    """Set the generators to saved states.

    Raises:
        StateError: a state is that of the sampler's own generator, and it has none.
    """
    if "own" in saved:
        if own is None:
            raise StateError(
                "the state was saved by a loader whose sampler had a generator of its own, and here it has none: pass "
                "generator= as before"
            )
        own.set_state(generator_state(saved["own"]))
    if "global" in saved:
        torch.default_generator.set_state(generator_state(saved["global"]))


def iterates_plainly(sampler: Any) -> bool:
    """Its iterators are generators, or a built-in container's: they draw nothing when made, and have no state."""
    method: Any = getattr(type(sampler), "__iter__", None)
    return inspect.isgeneratorfunction(method) or not inspect.isfunction(method)


def draws_when_iterated(sampler: Any) -> bool:
    """Whether an iterator of it, when made, draws from its own generator: `StatefulRandomSampler`, torchdata's."""
    return isinstance(getattr(sampler, "generator", None), torch.Generator) and not iterates_plainly(sampler)


def generator_states(own: torch.Generator | None) -> dict[str, torch.Tensor]:
    """The present states of torch's global generator, and of one of the sampler's own."""
    found = {"global": torch.default_generator.get_state()}
    if own is not None:
        found["own"] = own.get_state()
    return found


def drawn_from(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, str] | None:
    """Those that were drawn from, as they were before."""
    drawn = {name: _text(state) for name, state in before.items() if not torch.equal(state, after[name])}
    return drawn or None


def generator_text(generator: torch.Generator) -> str:
    """The generator's present state, as a text."""
    return _text(generator.get_state())


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


# What torch writes of a CPU generator first: its seed, numbers left in the block, whether it was seeded, the next one's
# place in the block.
_GENERATOR_HEAD = struct.Struct("=QiiQ")


_GENERATOR_BYTES = 5056


_GENERATOR_BLOCK = 624


def generator_state(text: Any) -> torch.Tensor:
    """The state of a CPU generator that this text (base64) is.

    Raises:
        ValueError: it is none; or one with which torch would read beyond its own state: it checks each of the two
            numbers that say where the generator stands in its block, but not the two together.
    """
    try:
        state = bytearray(base64.b64decode(text, validate=True))
        tensor = torch.frombuffer(state, dtype=torch.uint8)
        torch.Generator().set_state(tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"this is no state of a torch.Generator: {error}") from error
    if len(state) == _GENERATOR_BYTES:
        _, left, _, offset = _GENERATOR_HEAD.unpack_from(state)
        if left + offset > _GENERATOR_BLOCK + 1:
            raise ValueError(f"this is no state of a torch.Generator: {left} numbers left from offset {offset} on")
    return tensor
