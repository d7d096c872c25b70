"""Finds the torch generators that samplers draw from, and saves and restores their states as text.

Data path: beside the sampler. States are kept as text (base64), which JSON and ``torch.load(weights_only=True)``
accept.
"""

from __future__ import annotations

import base64
import inspect
import struct
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from asyncloader.errors import StateError


def samplers_within(*samplers: Any) -> list[Any]:
    """These samplers, each followed by those that it reads from, outermost first, each once: some samplers refer to
    themselves, so that code that looks for ``batch_sampler.sampler`` finds them.
    """
    found: dict[int, Any] = {}
    waiting = [*reversed(samplers)]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            waiting += getattr(each, "batch_sampler", None), getattr(each, "sampler", None)
    return list(found.values())


class Drawing(NamedTuple):
    """What a loader shows to torch's iterator base while that draws its random numbers.

    Attributes:
        loader: the loader.
        generator: stands for its own generator.
        index_sampler: its index sampler, which is not made a second time.
    """

    loader: object
    generator: torch.Generator | None
    index_sampler: Any


DRAWING: ContextVar[Drawing | None] = ContextVar("asyncloader_drawing", default=None)
"""Set in the thread in which an iterator is made, for that time."""


def own_generator(sampler: Any) -> torch.Generator | None:
    """The generator of the sampler, or of the one that it reads from; None if it draws from the global one."""
    for each in samplers_within(sampler):
        own = getattr(each, "generator", None)
        if isinstance(own, torch.Generator):
            return own
    return None


def set_generators(saved: dict[str, str], own: torch.Generator | None) -> None:
    """Set the generators to saved states.

    Raises:
        StateError: there is a state for the sampler's own generator, but it has none.
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
    """Whether its iterators are generators or built-in ones: these draw nothing when made, and have no state."""
    method: Any = getattr(type(sampler), "__iter__", None)
    return inspect.isgeneratorfunction(method) or not inspect.isfunction(method)


def draws_when_iterated(sampler: Any) -> bool:
    """Whether ``iter(sampler)`` draws from the sampler's own generator, as `StatefulRandomSampler` does."""
    return isinstance(getattr(sampler, "generator", None), torch.Generator) and not iterates_plainly(sampler)


def generator_states(own: torch.Generator | None) -> dict[str, torch.Tensor]:
    """The current states of torch's global generator, and of the sampler's own one."""
    found = {"global": torch.default_generator.get_state()}
    if own is not None:
        found["own"] = own.get_state()
    return found


def drawn_from(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, str] | None:
    """The earlier states, as text, of those generators that were drawn from since; None if there are none."""
    drawn = {name: _text(state) for name, state in before.items() if not torch.equal(state, after[name])}
    return drawn or None


def generator_text(generator: torch.Generator) -> str:
    """The generator's current state, as text."""
    return _text(generator.get_state())


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


# The first fields of a CPU generator's state in torch: seed, numbers left in the block, whether it was seeded, offset
# of the next number in the block.
_GENERATOR_HEAD = struct.Struct("=QiiQ")


_GENERATOR_BYTES = 5056


_GENERATOR_BLOCK = 624


def generator_state(text: Any) -> torch.Tensor:
    """Decode the state of a CPU generator from text (base64).

    Raises:
        ValueError: it is not a valid state, or one with which torch would read beyond the state's end: torch checks the
            two numbers that give the position in the block, but not their sum.
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
