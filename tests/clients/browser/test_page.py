"""The page of a loader in a browser: it loads without errors, follows the run, and can be used by keyboard.

make test-browser        needs Chromium: apt-get install chromium
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from asyncloader import DataLoader
from tests.helpers.datasets import Numbers
from tests.helpers.running import environment

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

pytestmark = [
    pytest.mark.clients,
    pytest.mark.network,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes of this user may be watched at the same time."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens an address, and checks in the end that the browser had nothing to complain about."""
    complaints: list[str] = []
    contexts = []

    def call(url: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    yield call
    for context in contexts:
        context.close()
    assert not complaints


def has_text(page: Any, selector: str, words: str) -> None:
    """Wait until an element has this text."""
    playwright.expect(page.locator(selector)).to_contain_text(words, timeout=20_000)


def test_it_follows_a_run(open_page: Open) -> None:
    """It shows a loader that was not iterated, its workers, its next epoch, and its end, without being loaded again."""
    with DataLoader[Any](Numbers(4000), batch_size=4, num_workers=2, seed=1) as loader:
        page = open_page(loader.dashboard().url)
        has_text(page, "#name", "DataLoader of Numbers")
        has_text(page, "#place", "not iterated yet")
        batches = iter(loader)
        for _ in range(10):
            next(batches)
        has_text(page, "#place", "epoch 0, 10 of 1000 batches")
        has_text(page, "#workers tbody tr:nth-child(2)", "pid ")
        has_text(page, "#stages tbody", "the dataset is read")
        for _ in batches:
            pass
        has_text(page, "#place", "epoch 0, finished")
        has_text(page, "#workers caption", "None run now")
        for _, _ in zip(range(5), loader, strict=False):
            pass
        has_text(page, "#place", "epoch 1")
        has_text(page, "#totals", "1,005")
    has_text(page, "#state", "closed")
    has_text(page, "#totals", "1,005")


SPOKEN = """(() => {
  const node = document.querySelector("[aria-live]"), watch = new MutationObserver(() => {});
  watch.observe(node, {childList: true, characterData: true, subtree: true});
  return [["startup", 41], ["fetch", 41], ["fetch", 42], ["compute", 42], ["consumer", 4]].map(([bound, share]) => {
    const text = `The consumer waited ${share} % of the time.`;
    show({...last, verdict: {...last.verdict, bound, text, ok: bound === "consumer"}});
    return watch.takeRecords().length ? node.textContent : null;
  });
})()"""
"""Shows verdicts one after the other. Returns for each the text that a screen reader reads out, or null."""


def test_it_is_used_by_keyboard_and_screen_reader(open_page: Open) -> None:
    """The button and the tables are reached by Tab, pausing keeps the figures, and roles and names are there. A
    verdict is read out when it changes, and not when only its figures do.
    """
    with DataLoader[Any](Numbers(400), batch_size=4, num_workers=1) as loader:
        page = open_page(loader.dashboard().url)
        has_text(page, "#place", "not iterated yet")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "pause"
        page.keyboard.press("Space")
        assert page.locator("#pause").get_attribute("aria-pressed") == "true"
        for _ in loader:
            pass
        page.evaluate(
            """new Promise((done) =>
              events.addEventListener("message", () => { if (last.totals.batches === 100) done(); }))"""
        )
        has_text(page, "#place", "not iterated yet")
        page.keyboard.press("Enter")
        has_text(page, "#place", "epoch 0, finished")
        _, *spoken = page.evaluate(SPOKEN)
        assert spoken == [
            "! input-bound: fetch",
            None,
            "! input-bound: compute",
            "✓ nothing to change",
        ]
        for name in ("Waiting, by stage", "Workers", "Times of stages"):
            page.keyboard.press("Tab")
            focused = page.get_by_role("group", name=name)
            assert page.evaluate("document.activeElement.getAttribute('aria-labelledby')") == (
                focused.get_attribute("aria-labelledby")
            )
        assert page.locator("[aria-live]").count() == 1
        assert page.get_by_role("main").count() == 1
        assert page.locator("table thead th:not([scope=col])").count() == 0
        assert page.get_by_role("row", name="fetch").count() >= 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(scheme: str, open_page: Open) -> None:
    """Texts have a contrast of 4.5 at least with the page behind them, in both color schemes."""
    with DataLoader[Any](Numbers(400), batch_size=4, num_workers=1) as loader:
        for _ in loader:
            pass
        page = open_page(loader.dashboard().url, color_scheme=scheme)
        has_text(page, "#place", "finished")
        worst = page.evaluate(
            """() => {
              const light = (color) => {
                const part = (x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
                const [r, g, b] = color.match(/[0-9.]+/g).map((x) => part(x / 255));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
              };
              const back = (node) => {
                const color = getComputedStyle(node).backgroundColor;
                return color.endsWith(", 0)") && node.parentElement ? back(node.parentElement) : color;
              };
              return Math.min(...[...document.querySelectorAll("h1,h2,p,span,b,th,td,caption,button")]
                .filter((node) => node.textContent.trim()).map((node) => {
                  const [a, b] = [light(getComputedStyle(node).color), light(back(node))];
                  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
                }));
            }"""
        )
        assert worst >= 4.5


PROGRAM = """
import sys
from asyncloader import DataLoader
if __name__ == "__main__":
    with DataLoader(range(8), batch_size=2) as loader:
        print(loader.dashboard(int(sys.argv[1])), flush=True)
        sys.stdin.read()
"""


@contextmanager
def program(folder: Path, port: int) -> Generator[tuple[subprocess.Popen[str], str]]:
    """Run a program that serves its loader's page at this port. Gives the process, and the page's address."""
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), str(port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def test_a_program_that_is_killed_and_started_again(browser: Any, tmp_path: Path) -> None:
    """The page says that it has no connection, and, once another run answers at the port, that its address is old. The
    new run's address works.
    """
    context = browser.new_context()
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    with program(tmp_path, 0) as (process, url):
        page.goto(url)
        has_text(page, "#place", "not iterated yet")
        process.kill()
        has_text(page, "#state", "no connection: trying again")
    with program(tmp_path, urlsplit(url).port or 0) as (_, new):
        has_text(page, "#state", "the address is an old one")
        page.goto(new)
        has_text(page, "#state", "idle")
    context.close()
    assert not errors
