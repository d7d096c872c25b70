"""Takes the pictures of "Watch a run" and of "Find out why training waits": loaders' pages, and a view in a terminal.

python docs/watch_pictures.py     writes docs/_static/watch-*.png, watch-top.svg and waits-*.png; needs Chromium,
                                  playwright, rich
"""

from __future__ import annotations

import importlib
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader

FOLDER = Path(__file__).parent / "_static"
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
_SHOWN_S = 20.0  # of the run, before the pictures


class SlowDisk(Dataset[torch.Tensor]):
    """Images of a disk that takes 2 ms for each; for some time, every third second, 8 ms."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.008 if int(time.time()) % 3 == 0 else 0.002)
        return torch.full((3, 64, 64), float(index % 255)).sqrt()


class Watched:
    """A loader whose batches are read in a thread, with its page open in a browser, once for each color scheme."""

    def __init__(self, loader: DataLoader[Any], step_s: float, *schemes: str, height: int) -> None:
        self.board = loader.dashboard()
        self._begun, self._over = threading.Event(), threading.Event()
        self._training = threading.Thread(target=self._train, args=(loader, step_s), daemon=True)
        self._training.start()
        self._begun.wait()  # workers that are forked later would hold the driver's pipes open
        sync_playwright: Any = importlib.import_module(
            "playwright.sync_api"
        ).sync_playwright  # not in the linters' extra
        self._driver = sync_playwright().start()
        self._browser = self._driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        self.pages: dict[str, Any] = {}
        for scheme in schemes:
            size: Any = {"width": 1200, "height": height}
            self.pages[scheme] = self._browser.new_context(color_scheme=scheme, viewport=size).new_page()
            self.pages[scheme].goto(self.board.url)

    def _train(self, loader: DataLoader[Any], step_s: float) -> None:
        while True:
            for _ in loader:
                self._begun.set()
                time.sleep(step_s)
                if self._over.is_set():
                    return

    def close(self) -> None:
        """Close the browser, and end the training."""
        self._browser.close()
        self._driver.stop()
        self._over.set()
        self._training.join()


def watch_a_run() -> None:
    """Take the pictures of "Watch a run"."""
    from rich.console import Console
    from rich.text import Text

    from asyncloader.commands.top import describe, view
    from asyncloader.live.client import open_sockets, receive_all

    with DataLoader[Any](SlowDisk(), batch_size=16, num_workers=2, seed=1, shuffle=True) as loader:
        run = Watched(loader, 0.004, "light", "dark", height=1000)
        time.sleep(_SHOWN_S)
        for scheme, page in run.pages.items():
            page.screenshot(path=FOLDER / f"watch-page-{scheme}.png")
        (opened,) = open_sockets(Path(run.board.socket))
        for _ in range(2):
            receive_all([opened], 5)
        opened.close()
        console = Console(record=True, width=120, file=Path("/dev/null").open("w"))  # noqa: SIM115
        console.print(Text.from_ansi(view(describe([opened.latest or {}]), 120, 60)))
        (FOLDER / "watch-top.svg").write_text(console.export_svg(title="asyncloader top"))
        run.close()


def why_training_waits() -> None:
    """Take the pictures of "Find out why training waits", of the classes that the page has."""
    page = (Path(__file__).parent / "tutorials" / "find-out-why-training-waits.md").read_text()
    names: dict[str, Any] = {"__name__": "tutorial"}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(block, names)  # noqa: S102 - of our own page; what is under its guard does not run
    for name, picture in (("Recordings", "waits-page"), ("ShortReads", "waits-page-after")):
        # As on the page. Persistent workers also for the same reason as in `Watched`.
        options: dict[str, Any] = {"batch_size": 8, "num_workers": 2, "seed": 1, "persistent_workers": True}
        with DataLoader[Any](names[name](), **options) as loader:
            run = Watched(loader, 0.010, "light", height=1400)
            time.sleep(_SHOWN_S)
            run.pages["light"].screenshot(path=FOLDER / f"{picture}.png")
            run.close()


def main() -> None:
    """Take the pictures."""
    watch_a_run()
    why_training_waits()


if __name__ == "__main__":
    main()
