from __future__ import annotations

import gc
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader.shared.share import share

LARGE = list(range(2000))


@pytest.mark.thorough
def test_reading_from_many_threads() -> None:
    """Threads that read the same items at once all read the right values."""
    shared: Any = share({"words": [f"é{i}" for i in range(2000)], "ids": {f"{i}": [i] for i in range(2000)}})
    start, wrong = threading.Barrier(8), list[Any]()

    def read(seed: int) -> None:
        start.wait()
        for i in range(seed, seed + 3000):
            found = shared["words"][i % 2000], shared["ids"][f"{i % 2000}"]
            if found != (f"é{i % 2000}", [i % 2000]):
                wrong.append(found)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(0, 2000, 250)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def segments() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:asyncloader")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_memory_goes_with_the_last_view() -> None:
    """No reference cycle keeps the segment: it is unmapped with the last of the object, its parts and their arrays."""
    gc.collect()
    gc.disable()
    try:
        before, fds = segments(), len(list(Path("/proc/self/fd").iterdir()))
        shared: Any = share({"a": np.arange(3), "t": torch.arange(3), "l": LARGE})
        kept = {"a": shared["a"], "t": shared["t"], "l": shared["l"][5:]}
        del shared
        for name in ("a", "t", "l"):
            assert segments() == before + 1
            assert len(kept[name])
            del kept[name]
        assert segments() == before
        assert len(list(Path("/proc/self/fd").iterdir())) == fds
    finally:
        gc.enable()


def test_nothing_of_the_original_is_kept() -> None:
    """The builder leaves no cycle: the original and its arrays are freed at once, shared parts with the new object."""
    gc.collect()
    gc.disable()
    try:
        array, inside = np.arange(1000), share(["a", "b"])
        alive = weakref.ref(array), weakref.ref(inside)
        shared: Any = share({"inside": inside, "x": array})
        del array, inside
        assert alive[0]() is None
        assert shared["inside"] is alive[1]()
        del shared
        assert alive[1]() is None
    finally:
        gc.enable()
