"""The honest loaders that hostile peers meet, in a process of their own, so that a crash is seen.

    python -m tests.stress.peer_child steady FILE PLACE...   reads the same epochs again and again until stdin ends
    python -m tests.stress.peer_child cases                  reads one epoch for each line of stdin

Each answers in lines of JSON.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import mmap
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Final

import torch

from asyncloader import AsyncDataLoader, DataLoader, Service
from asyncloader.options.objects import grouped
from asyncloader.service.client import connect, remote_channel
from tests.helpers.comparing import assert_same
from tests.service import definitions

AT_A_TIME = 8
"""Cases that are read at a time: most of them wait."""
LENGTHS: Final = {"numbers": 40, "awaited": 40, "stream": 41}
RECORD: Final = 8
"""Bytes of each loader's record in the file: when its newest batch came, in microseconds."""
_STEP_S = 0.002
_GAP_S = 1.0
"""Seconds between two batches that are worth a line."""
_ANSWER_S, _CHECK_S = 2.0, 0.35
_lock = threading.Lock()


def _say(**line: Any) -> None:
    with _lock:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def record(memory: mmap.mmap, number: int) -> float:
    """When the newest batch of this loader came."""
    return int.from_bytes(memory[number * RECORD : (number + 1) * RECORD], "little") / 1e6


def _options(name: str, workers: int, batch_size: int = 4) -> dict[str, Any]:
    options: dict[str, Any] = {"batch_size": batch_size, "seed": 5, "num_workers": workers}
    return options if name == "stream" else options | {"shuffle": True}


# ------------------------------------------------------------------------------------------------------ steady


async def _read(number: int, place: dict[str, Any], loader: Any, expected: list[Any], memory: mmap.mmap) -> None:
    last = monotonic()
    while True:
        seen = 0
        async for batch in loader:
            now = monotonic()
            if now - last > _GAP_S:
                _say(gap=now - last, at=now, loader=place["url"])
            last = now
            memory[number * RECORD : (number + 1) * RECORD] = int(now * 1e6).to_bytes(RECORD, "little")
            assert_same(batch, expected[seen])
            seen += 1
            await asyncio.sleep(_STEP_S)  # a training step
        assert seen == len(expected), (seen, len(expected))
        loader.set_epoch(0)


async def _steady(path: str, places: list[dict[str, Any]]) -> None:
    with Path(path).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:  # noqa: ASYNC230 - before anything runs
        loaders: list[Any] = []
        for number, place in enumerate(places):
            service = Service(place["url"], token=place["token"], tls_ca=place["tls_ca"])
            options: dict[str, Any] = _options("numbers", 2) | {
                "persistent_workers": number % 2 == 0,
                "max_worker_restarts": 1 << 30,
            }
            loaders.append(AsyncDataLoader[Any](definitions.numbers(), **options, workers=service))
        with DataLoader[Any](definitions.numbers(), **_options("numbers", 2)) as local:
            expected = list(local)
        _say(ready=True)
        reading = [
            asyncio.create_task(_read(number, place, loader, expected, memory))
            for number, (place, loader) in enumerate(zip(places, loaders, strict=True))
        ]
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        done, _ = await asyncio.wait([ended, *reading], return_when=asyncio.FIRST_COMPLETED)
        for task in reading:
            task.cancel()
        for task in done - {ended}:
            _say(error=_told(task.exception()))
        await asyncio.gather(*reading, return_exceptions=True)
        for loader in loaders:
            await loader.aclose()


def _told(error: BaseException | None) -> str:
    notes = getattr(error, "__notes__", ())
    return "\n".join([f"{type(error).__name__}: {error}", *notes])[-4000:]


# ------------------------------------------------------------------------------------------------------- cases


def _case(case: dict[str, Any], expected: list[Any]) -> None:
    name, began = case["name"], monotonic()
    service = Service(case["url"], wait=case["wait"])
    got: list[Any] = []
    error = ""
    try:
        options = grouped(_options(name, case["workers"]) | {"max_worker_restarts": 6, "worker_timeout": 3.0})
        if case["asynchronous"]:
            asyncio.run(_read_once(getattr(definitions, name)(), options | {"workers": service}, got))
        else:
            with DataLoader[Any](getattr(definitions, name)(), **options, workers=service) as loader:
                got += loader
    except Exception as raised:
        error = _told(raised)
    exact = True
    try:
        for batch, right in zip(got, expected, strict=not error):
            assert_same(batch, right)
    except (AssertionError, ValueError) as wrong:
        exact, error = False, error or str(wrong)[:500]
    _say(number=case["number"], exact=exact, batches=len(got), error=error, seconds=monotonic() - began)


async def _read_once(defined: Any, options: dict[str, Any], got: list[Any]) -> None:
    async with AsyncDataLoader[Any](defined, **options) as loader:
        async for batch in loader:
            got.append(batch)  # noqa: PERF401 - those that came before an error count


def _cases() -> None:
    connect._GREETING_S = 1.0
    connect.answer_of.__defaults__ = (_ANSWER_S,)
    assert hasattr(remote_channel, "_CHECK_S"), "it has another name now"
    remote_channel._CHECK_S = _CHECK_S
    expected: dict[tuple[str, int], list[Any]] = {}
    for name in LENGTHS:
        for workers in (1, 2):
            with DataLoader[Any](getattr(definitions, name)(), **_options(name, workers)) as local:
                expected[name, workers] = list(local)
    _say(ready=True)
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        for line in sys.stdin:
            case = json.loads(line)
            threads.submit(_case, case, expected[case["name"], case["workers"]])


def main(arguments: list[str]) -> None:
    """Run one of them."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    if arguments[0] == "steady":
        with suppress(KeyboardInterrupt):
            asyncio.run(_steady(arguments[1], [json.loads(place) for place in arguments[2:]]))
    else:
        _cases()


if __name__ == "__main__":
    main(sys.argv[1:])
