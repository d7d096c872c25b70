"""Saves the states of a kind with the batches that come next, and gives a saved state to a new loader."""

from __future__ import annotations

import base64
import json
import random
import shutil
import tempfile
import zlib
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.states.files import make_files
from tests.states.kinds import Kind, Run
from tests.states.map_kinds import MAP_KINDS
from tests.states.stream_kinds import STREAM_KINDS

KINDS: dict[str, Kind] = MAP_KINDS | STREAM_KINDS
FOLDER = Path(__file__).parent
LATER = 5
"""The epoch that `set_epoch` chooses."""
_LONG = 1000
"""Longer texts, which are the states of torch's generators, are compressed."""

States = dict[str, dict[str, Any]]
"""By the moment at which a state was taken: the `state`; `rest`, the batches of the next iteration, all of them; and
`next`, the first batches of the iteration after it, or none.
"""


def record(kind: Kind, folder: Path) -> States:
    """Run a loader, and return its states: taken within the first epoch, after it, and within a later epoch."""
    _seed(5)
    with Run(kind.make(folder)) as run:
        kind.prepare(run.loader, folder)
        within, rest = _split(run, kind.taken)
        states = {"within": {"state": within, "rest": rest, "next": []}}
        end = _saved(run)
        second = list(run.batches())
        if kind.later:
            states["within"]["next"] = second[:2]
            states["end"] = {"state": end, "rest": second, "next": []}
        inner = getattr(run.loader, "loader", run.loader)
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(LATER)
        later, rest = _split(run, 2)
        states["later"] = {"state": later, "rest": rest, "next": list(islice(run.batches(), 2)) if kind.later else []}
        return states


def _split(run: Run, taken: int) -> tuple[Any, list[Any]]:
    batches = run.batches()
    before = list(islice(batches, taken))
    state, rest = _saved(run), list(batches)
    assert len(before) == taken, "the epoch is too short"
    assert rest, "the epoch is too short"
    return state, rest


def _saved(run: Run) -> Any:
    return values_of(text_of(run.loader.state_dict()))  # as it is now


def resumed(kind: Kind, folder: Path, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the `rest` and the `next` batches that a new loader gives after a state."""
    _seed(77)  # what comes must not depend on the global generators
    with Run(kind.make(folder)) as run:
        run.loader.load_state_dict(saved["state"])
        rest = list(run.batches())
        return {"rest": rest, "next": list(islice(run.batches(), len(saved["next"]))) if saved["next"] else []}


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def text_of(value: Any) -> str:
    """Return JSON; bytes, which the states of DataLoader2 have, are encoded."""
    return json.dumps(_packed(value))


def _packed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _packed(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_packed(each) for each in value]
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(zlib.compress(value)).decode()}
    if isinstance(value, str) and len(value) > _LONG:
        return {"text": base64.b64encode(zlib.compress(value.encode())).decode()}
    return value


def values_of(text: str) -> Any:
    """Return the values of `text_of`."""
    return json.loads(text, object_hook=_unpacked)


def _unpacked(found: dict[str, Any]) -> Any:
    if found.keys() == {"bytes"} or found.keys() == {"text"}:
        ((kind, packed),) = found.items()
        data = zlib.decompress(base64.b64decode(packed))
        return data if kind == "bytes" else data.decode()
    return found


def write(name: str) -> None:
    """Write the states of all kinds to a new folder, once each has been loaded.

    Raises:
        FileExistsError: there is such a folder.
    """
    made = FOLDER / name
    made.mkdir()
    try:
        for number, (label, kind) in enumerate(KINDS.items(), 1):
            with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory() as there:
                states = record(kind, make_files(Path(here)))
                lines = [f"{json.dumps(moment)}: {text_of(saved)}" for moment, saved in states.items()]
                text = "{\n" + ",\n".join(lines) + "\n}\n"
                make_files(Path(there))
                for moment, saved in values_of(text).items():
                    found = resumed(kind, Path(there), saved)
                    assert found | {"state": saved["state"]} == saved, f"{label}, {moment}: {found} after {saved}"
            (made / f"{label}.json").write_text(text)
            print(f"{number} of {len(KINDS)}: {label}, {len(text):,} bytes")  # noqa: T201 - a program's own words
    except BaseException:
        shutil.rmtree(made)
        raise
