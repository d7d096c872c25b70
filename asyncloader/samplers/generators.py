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


def samplers_within(*samplers: Any) -> list[Any]:
    """Return these samplers, each followed by the samplers that it reads from, outermost first, each once."""
    # By id: some samplers refer to themselves, for code that looks for ``batch_sampler.sampler``.
    found: dict[int, Any] = {}
    waiting = [*reversed(samplers)]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            waiting += getattr(each, "batch_sampler", None), getattr(each, "sampler", None)
    return list(found.values())


class Drawing(NamedTuple):
    """A loader's attributes for torch's iterator base while that draws its random numbers.

    Attributes:
        loader: the loader.
        generator: replaces its own generator.
        index_sampler: its index sampler, which is not made a second time.
    """

    loader: object
    generator: torch.Generator | None
    index_sampler: Any


DRAWING: ContextVar[Drawing | None] = ContextVar("asyncloader_drawing", default=None)
"""Set in the thread that makes an iterator, while it makes it."""


def own_generator(sampler: Any) -> torch.Generator | None:
    """Return the generator of the sampler, or of a sampler that it reads from; None if it draws from the global one."""
    for each in samplers_within(sampler):
        own = getattr(each, "generator", None)
        if isinstance(own, torch.Generator):
            return own
    return None


def set_generators(saved: dict[str, str], own: torch.Generator | None) -> None:
    """Set the generators to saved states. `own`: the sampler's own; not None if `saved` has a state of it."""
    if "own" in saved:
        assert own is not None, "the sampler's generator has gone since the state was loaded"
        own.set_state(generator_state(saved["own"]))
    if "global" in saved:
        torch.default_generator.set_state(generator_state(saved["global"]))


def iterates_plainly(sampler: Any) -> bool:
    """Return whether its iterators are generators or built-in: these draw nothing when made, and have no state."""
    method: Any = getattr(type(sampler), "__iter__", None)
    return inspect.isgeneratorfunction(method) or not inspect.isfunction(method)


def draws_when_iterated(sampler: Any) -> bool:
    """Return whether ``iter(sampler)`` draws from the sampler's own generator, as with `StatefulRandomSampler`."""
    return isinstance(getattr(sampler, "generator", None), torch.Generator) and not iterates_plainly(sampler)


def generator_states(own: torch.Generator | None) -> dict[str, torch.Tensor]:
    """Return the current states of torch's global generator, and of the sampler's own generator."""
    found = {"global": torch.default_generator.get_state()}
    if own is not None:
        found["own"] = own.get_state()
    return found


def find_drawn(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, str] | None:
    """Return the earlier states, as text, of the generators whose state has changed; None if none has changed."""
    drawn = {name: _text(state) for name, state in before.items() if not torch.equal(state, after[name])}
    return drawn or None


def generator_text(generator: torch.Generator) -> str:
    """Return the generator's current state, as text."""
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
        ValueError: the state is not valid, or torch would read beyond the state's end with it.
    """
    try:
        state = bytearray(base64.b64decode(text, validate=True))
        tensor = torch.frombuffer(state, dtype=torch.uint8)
        torch.Generator().set_state(tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"this is no state of a torch.Generator: {error}") from error
    if len(state) == _GENERATOR_BYTES:
        # torch checks each of the two numbers that give the position in the block, but not their sum.
        _, left, _, offset = _GENERATOR_HEAD.unpack_from(state)
        if left + offset > _GENERATOR_BLOCK + 1:
            raise ValueError(f"this is no state of a torch.Generator: {left} numbers left from offset {offset} on")
    return tensor
