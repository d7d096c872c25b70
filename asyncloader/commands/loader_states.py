"""Finds and describes the loaders' states in a checkpoint. Pure.

Data path: checkpoint_file -> [loader_states] -> findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from asyncloader.errors import StateError
from asyncloader.state.schema import check_state
from asyncloader.verification.findings import Finding

_KEYS = ("version", "mode", "kind", "epoch", "step")
_LONGEST = 300  # characters of a place


class OtherObject:
    """Stands for an object of a pickle that is not a plain value. It keeps all that an unpickler would give to that.

    Attributes:
        parts: the values it would be made of: its arguments, elements, items, and the attributes.
    """

    def __new__(cls, *arguments: Any, **named: Any) -> Self:  # that is all an unpickler calls of some objects
        """Keep the arguments."""
        made = super().__new__(cls)
        made._elements, made._items = list[Any](), dict[Any, Any]()
        made.parts = [arguments, named, made._elements, made._items]
        return made

    parts: list[Any]
    _elements: list[Any]
    _items: dict[Any, Any]

    def append(self, value: Any) -> None:
        """Keep an element of a list or a set."""
        self._elements.append(value)

    add = append

    def __setstate__(self, state: Any) -> None:
        """Keep the attributes: of a pair, those in `__dict__`, and those in `__slots__`."""
        self.parts += state if type(state) is tuple and len(state) == 2 else (state,)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep an item of a dictionary."""
        self._items[key] = value


def find_states(checkpoint: Any) -> Iterator[tuple[str, Any]]:
    """Yield every loader's state in a checkpoint, with its place in it, such as ``"trainer.loader"``."""
    # A checkpoint may nest deeper than Python can call, and may have an object many times, or within itself: a list of
    # those to come takes the place of calls, and each object is looked through once.
    seen, coming = set[int](), [("", "", checkpoint)]
    while coming:
        place, name, value = coming.pop()
        place = _joined(place, name)
        if isinstance(value, dict) and all(key in value for key in _KEYS):
            yield place or "the file", value
            continue
        inner: list[tuple[str, str, Any]] = []
        for name, each in _inside(value):
            if isinstance(each, dict | list | tuple | set | frozenset | OtherObject) and id(each) not in seen:
                seen.add(id(each))
                inner.append((place, name, each))
        coming += reversed(inner)


def _inside(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, OtherObject):
        return (("", each) for each in value.parts)
    if isinstance(value, dict):
        return ((f"{key!s:.100}", each) for key, each in value.items())
    return ((f"[{number}]", each) for number, each in enumerate(value))


def _joined(place: str, name: str) -> str:
    joined = f"{place}{'.' if place and name and name[0] != '[' else ''}{name}"
    return joined if len(joined) <= _LONGEST else f"...{joined[-_LONGEST:]}"


def describe(place: str, given: Any) -> list[Finding]:
    """Describe a state: where the run stood, its order, and which loaders can resume it."""
    try:
        state = check_state(given)
    except StateError as error:
        return [Finding(place, "problem", str(error), "this state cannot be loaded: take an earlier one")]
    figures = {name: state[name] for name in ("epoch", "step", "finished", "seed", "batch_size", "world_size", "order")}
    return [
        Finding(place, "ok", _position(state), figures=figures),
        Finding("  order", "note", _order(state)),
        Finding("  resumes on", "note", _fits(state)),
    ]


def _position(state: Mapping[str, Any]) -> str:
    if state["finished"]:
        return f"epoch {state['epoch']} is finished; the next is epoch {state['epoch'] + 1}"
    text = f"epoch {state['epoch']}, {state['step']:,} batches delivered"
    if state["kind"] == "map" and state["batch_size"]:
        text += f", about {state['step'] * state['batch_size']:,} samples"
        text += f" of {state['length']:,}" if state["length"] is not None else ""
    if state["beyond"]:
        steps = ", ".join(map(str, state["beyond"][:10])) + (", ..." if len(state["beyond"]) > 10 else "")
        text += f"; and these later ones: {steps}"
    return text


def _order(state: Mapping[str, Any]) -> str:
    if state["kind"] == "iterable":
        order = "that of the dataset"
    else:
        order = {"sampler": "that of the user's sampler", "batch_sampler": "that of the user's batch sampler"}.get(
            state["order"], state["order"]
        )
    mode = f"seed {state['seed']}" if state["mode"] == "seeded" else "torch mode"
    return f"{order}, {mode}{_batches(state)}"


def _batches(state: Mapping[str, Any]) -> str:
    size, ranks = state["batch_size"], state["world_size"]
    if size is None:
        return ""
    if ranks is None or ranks == 1 or state["kind"] == "iterable":
        return f", batches of {size}"
    return f", global batches of {size} on {ranks} ranks"


def _fits(state: Mapping[str, Any]) -> str:
    workers = state["workers"]
    if workers is not None and not state["finished"]:
        ranks = "" if workers["world_size"] == 1 else f"rank {workers['rank']} of {workers['world_size']}, with "
        streams = workers.get("loader_streams")
        return ranks + (f"num_workers={workers['num_workers']}" if streams is None else f"loader_streams={streams}")
    if state["kind"] == "iterable":
        return "any number of workers"
    if state["order"] == "batch_sampler" and state["world_size"] not in (None, 1):
        return f"any number of workers, and {state['world_size']} ranks"
    if state["mode"] == "seeded" and state["batch_size"] is not None:
        return f"any number of workers, and of ranks that share global batches of {state['batch_size']}"
    return "any number of workers"
