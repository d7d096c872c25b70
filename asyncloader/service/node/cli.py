"""Runs the command `asyncloader serve`: a node. Its command line is in `command.py`."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import signal
import ssl
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from asyncloader.base.cpus import usable_cpus
from asyncloader.base.socket_folder import MOST_PATH
from asyncloader.service.node.admission import Served
from asyncloader.service.node.metrics_endpoint import MetricsEndpoint
from asyncloader.service.node.node_log import set_up_log
from asyncloader.service.node.server import DRAIN_S, Node
from asyncloader.service.protocol.definition import load_definition
from asyncloader.service.protocol.sockets import read_address, server_tls
from asyncloader.workers.worker import serve_async

_log = logging.getLogger("asyncloader")

_LISTS = ("target", "listen", "arg", "open")


class _Mistake(ValueError):
    """The options cannot be carried out; the text says how to correct them."""


def run(given: dict[str, Any], say: Callable[[str], None]) -> None:
    """Run a node with these flags until the process is asked to end.

    Args:
        given: the flags.
        say: prints the line that says that it is ready.

    Raises:
        ValueError, OSError: the options cannot be carried out.
        Exception: whatever the definitions' modules raise, and `say`.
    """
    set_up_log(logging.INFO)
    node_options = _options(given)
    serve_async(lambda: _serve(node_options, say))


def _options(flags: dict[str, Any]) -> dict[str, Any]:
    """Merge the flags with the environment, in this order of precedence."""
    if flags.pop("config") or os.environ.get("ASYNCLOADER_CONFIG"):
        raise _Mistake("--config was removed: give flags, or set variables such as ASYNCLOADER_LISTEN")
    chosen = dict(flags)
    for name, given in flags.items():
        value = os.environ.get(f"ASYNCLOADER_{name.upper()}")
        if value and given in (None, []):
            chosen[name] = value.split(",") if name in _LISTS else value
    return chosen | {"token": os.environ.get("ASYNCLOADER_TOKEN")}


async def _serve(options: dict[str, Any], say: Callable[[str], None]) -> None:
    node = Node(_served(options), _workers(options), _token(options), _tls(options))
    listen = options["listen"] or ["127.0.0.1:7070"]
    _check_open_addresses(listen, options)
    ended, hurried = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)

    def interrupt() -> None:
        (hurried if ended.is_set() else ended).set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    metrics = MetricsEndpoint(node)
    try:
        if options["metrics"]:
            with _named(f"--metrics {options['metrics']}", "give a port that is free, at an address of this machine"):
                await metrics.listen(options["metrics"])
        # Two tasks: datasets may take minutes to be made, and a signal ends the node before.
        starting = loop.create_task(node.start())
        stopping = loop.create_task(ended.wait())
        tasks: list[asyncio.Task[Any]] = [starting, stopping]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            # Only now, because the node ends if a dataset cannot be made.
            addresses = [await _listen(node, address) for address in listen]
            metrics.ready = True
            said: dict[str, Any] = {"listening": addresses[0], "addresses": addresses, "pid": os.getpid()}
            if metrics.address:
                said["metrics"] = metrics.address
            say(json.dumps(said))
            await stopping
            metrics.ready = False  # first, so that a load balancer sends no more loaders
            _log.info("draining: no more loaders, and no more tasks; Ctrl-C ends the tasks in work, too")
            tasks += [loop.create_task(node.drain(DRAIN_S)), loop.create_task(hurried.wait())]
            await asyncio.wait(tasks[2:], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    finally:
        await metrics.close()
        await node.close()


async def _listen(node: Node, address: str) -> str:
    advice = "give a port that is free, at an address of this machine"
    if address.startswith("unix:"):
        advice = (
            f"give a path of {MOST_PATH} bytes at most, of no file, in a folder with room where this user may write"
        )
    with _named(f"--listen {address}", advice):
        return await node.listen(address)


@contextlib.contextmanager
def _named(option: str, advice: str) -> Generator[None]:
    """Context whose OSErrors name this option, and what to do: Python's own do not."""
    try:
        yield
    except OSError as error:
        raise _Mistake(f"{option}: {error.strerror or error}: {advice}") from None


def _served(options: dict[str, Any]) -> list[Served]:
    targets = options["target"]
    if not targets:
        raise _Mistake("nothing to serve: give module:definition, as in data:train")
    definitions = {target: load_definition(target) for target in targets}
    arguments = dict(_pair(text) for text in options["arg"] or [])
    opened = set(options["open"] or [])
    names = {each.name for each in definitions.values()}
    for name in opened - names:
        raise _Mistake(f"--open {name}: {', '.join(sorted(names))} is served")
    used: set[str] = set()
    served = []
    for target, definition in definitions.items():
        own = {name: value for name, value in arguments.items() if name in definition.parameters}
        used |= set(own)
        is_open = definition.name in opened
        served.append(Served(target, definition, own if is_open else definition.convert(own), is_open))
    for name in set(arguments) - used:
        raise _Mistake(f"--arg {name}: no definition that is served has a parameter of this name")
    return served


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise _Mistake(f"--arg {text}: give name=value")
    return name, value


def _workers(options: dict[str, Any]) -> int:
    given = options["workers"]
    try:
        number = usable_cpus() if given is None else int(given)
    except ValueError:
        number = 0
    if number < 1:
        raise _Mistake(f"--workers {given}: give a number of processes, at least 1")
    return number


def _token(options: dict[str, Any]) -> str | None:
    if options["token_file"]:
        token = Path(options["token_file"]).read_text().strip()
        if not token:
            raise _Mistake(f"--token-file {options['token_file']}: the file is empty")
        return token
    return options["token"] or None


def _tls(options: dict[str, Any]) -> ssl.SSLContext | None:
    if not options["tls_cert"]:
        if options["tls_key"] or options["tls_ca"]:
            raise _Mistake("--tls-key and --tls-ca need --tls-cert")
        return None
    files = {name: options[name] or None for name in ("tls_cert", "tls_key", "tls_ca")}
    given = " ".join(f"--{name.replace('_', '-')} {path}" for name, path in files.items() if path)
    with _named(given, "give PEM files that this process can read, and a key that fits the certificate"):
        return server_tls(options["tls_cert"], files["tls_key"], files["tls_ca"])


def _check_open_addresses(listen: Sequence[str], options: dict[str, Any]) -> None:
    """Check that addresses beyond this machine need a token, or certificates. Raises `_Mistake`."""
    outside = [address for address in listen if not _is_local(address)]
    if not outside:
        return
    token = _token(options)
    if token is None and not (options["tls_cert"] and options["tls_ca"]):
        raise _Mistake(
            f"--listen {outside[0]} can be reached from other machines: give --token-file, or --tls-cert and --tls-ca, "
            "or listen at 127.0.0.1"
        )
    if not options["tls_cert"]:
        _log.warning("a token without TLS protects no bytes: whoever sees the network sees the batches")


def _is_local(address: str) -> bool:
    place = read_address(address)
    if isinstance(place, str):
        return True
    host = place[0]
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
