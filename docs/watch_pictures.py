"""Takes the pictures of the how-to page "Watch a run": a loader's page, and its view in a terminal.

python docs/watch_pictures.py     writes docs/_static/watch-*.png and watch-top.svg; needs Chromium, playwright, rich
"""

from __future__ import annotations

import importlib
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


def _read(loader: DataLoader[Any], begun: threading.Event, over: threading.Event) -> None:
    for _ in loader:
        begun.set()
        time.sleep(0.004)  # the training step
        if over.is_set():
            return


def main() -> None:
    """Take the pictures."""
    from rich.console import Console

    from asyncloader.commands.top import view
    from asyncloader.live.client import open_sockets, receive_all

    sync_playwright: Any = importlib.import_module("playwright.sync_api").sync_playwright  # not in the linters' extra
    begun, over = threading.Event(), threading.Event()
    with DataLoader[Any](SlowDisk(), batch_size=16, num_workers=2, seed=1, shuffle=True) as loader:
        board = loader.dashboard()
        training = threading.Thread(target=_read, args=(loader, begun, over), daemon=True)
        training.start()
        begun.wait()  # workers that are forked later would hold the driver's pipes open
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
            pages: dict[str, Any] = {}
            for scheme in ("light", "dark"):
                size: Any = {"width": 1200, "height": 1000}
                pages[scheme] = browser.new_context(color_scheme=scheme, viewport=size).new_page()
                pages[scheme].goto(board.url)
            time.sleep(_SHOWN_S)
            for scheme, page in pages.items():
                page.screenshot(path=FOLDER / f"watch-page-{scheme}.png")
            browser.close()
        (opened,) = open_sockets(Path(board.socket))
        for _ in range(2):
            receive_all([opened], 5)
        opened.close()
        console = Console(record=True, width=120, file=Path("/dev/null").open("w"))  # noqa: SIM115
        console.print(view([opened.latest or {}]))
        (FOLDER / "watch-top.svg").write_text(console.export_svg(title="asyncloader top"))
        over.set()
        training.join()


if __name__ == "__main__":
    main()
