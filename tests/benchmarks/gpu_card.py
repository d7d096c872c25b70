"""The device that is measured: streams, clocks, and what to call it. The CPU stands in for a card in tests."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from asyncloader.delivery import open_accelerator
from asyncloader.delivery.accelerator import Accelerator, PlainAccelerator


class Card:
    """One device.

    Args:
        name: as torch takes it.
    """

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.cuda = self.device.type == "cuda"
        if name == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())

    def synchronize(self) -> None:
        """Wait for all work given to it."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def side_stream(self) -> Callable[[], AbstractContextManager[None]]:
        """A new stream, as a function whose result makes it the current stream."""
        if not self.cuda:
            return nullcontext
        stream = torch.cuda.Stream(self.device)
        return lambda: torch.cuda.stream(stream)

    def accelerator(self) -> Accelerator:
        """The accelerator that the loader would use for it."""
        return open_accelerator(self.device) or PlainAccelerator(self.device)

    def mark(self) -> Mark:
        """A point in the current stream's work, now."""
        return Mark(self)


class Mark:
    """A point in time: of the device where that has a clock."""

    def __init__(self, card: Card) -> None:
        self._event: torch.cuda.Event | None = None
        self._clock = 0.0
        if card.cuda:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._clock = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has reached it."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Mark) -> float:
        """Seconds between the two; both must have been reached."""
        if self._event is None or earlier._event is None:
            return self._clock - earlier._clock
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def describe() -> dict[str, str]:
    """The card, its driver, CUDA and torch, for the page, with a text in place of anything that is unknown."""
    found = {"torch": torch.__version__, "CUDA": str(torch.version.cuda)}
    if torch.cuda.is_available():
        found["card"] = torch.cuda.get_device_name()
    found["driver"] = _driver()
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown: nvidia-smi does not answer"
    return said[0] if said else "unknown"
