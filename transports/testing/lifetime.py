"""Conformance tests of a transport's lifetime: concurrency, cancellation, closing and pickling.

Data path: none; see `asyncloader.transports.testing`.
"""

from __future__ import annotations

import asyncio
import pickle
from contextlib import aclosing
from typing import Any

import pytest

from asyncloader.transports.errors import TransportClosed, TransportError
from asyncloader.transports.testing.subject import CONTENT, Call, TransportSubject, call_each, check_bytes, drain


class LifetimeConformance(TransportSubject):
    """Tests what a transport does besides reading."""

    async def test_concurrent_reads_do_not_mix(self) -> None:
        """Hundreds of reads in flight each get their own object."""
        async with self.make() as transport:
            for number in range(20):
                self.put(transport, str(number), str(number).encode() * 100)
            numbers = [number % 20 for number in range(200)]
            read = await asyncio.gather(*(transport.read(str(number)) for number in numbers))
            assert read == [str(number).encode() * 100 for number in numbers]

    @call_each
    async def test_cancelled_call_leaves_the_transport_usable(self, call: Call) -> None:
        """A call that is cancelled at its first wait raises CancelledError; other calls are not affected."""
        async with self.make() as transport:
            self.put(transport, "a", CONTENT[:256])

            async def run() -> Any:
                return await call(transport, "a")

            expected = await run()
            tasks = [asyncio.create_task(run()) for _ in range(50)]
            await asyncio.sleep(0)  # each task runs to its first wait
            # Empty if the transport has answered all of them without a wait.
            cancelled = [task for task in tasks[::2] if task.cancel()]
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            for task, outcome in zip(tasks, outcomes, strict=True):
                if task in cancelled:
                    assert isinstance(outcome, asyncio.CancelledError)
                else:
                    assert outcome == expected
            assert await run() == expected

    @call_each
    async def test_calls_after_close(self, call: Call) -> None:
        """A call after `aclose` raises TransportClosed."""
        transport = self.make()
        self.put(transport, "a", b"12345")
        async with transport:
            await call(transport, "a")
        with pytest.raises(TransportClosed, match="closed"):
            await call(transport, "a")
        with pytest.raises(TransportClosed, match="closed"):
            await drain(transport.list())

    async def test_close_is_idempotent(self) -> None:
        """A transport can be closed unused, twice in a row, and by several tasks at once."""
        unused = self.make()
        await unused.aclose()
        used = self.make()
        self.put(used, "a", b"1")
        await used.read("a")
        await asyncio.gather(used.aclose(), used.aclose())
        await used.aclose()
        with pytest.raises(TransportClosed):
            await unused.size("a")

    async def test_calls_in_progress_when_it_closes(self) -> None:
        """A read ends as usual or raises TransportClosed. It neither hangs nor looks cancelled."""
        transport = self.make()
        self.put(transport, "a", CONTENT)
        tasks = [asyncio.create_task(transport.read("a")) for _ in range(100)]
        await asyncio.sleep(0)
        await transport.aclose()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, bytes):
                check_bytes(outcome, CONTENT)
            else:
                assert isinstance(outcome, TransportClosed)

    async def test_stream_in_progress_when_it_closes(self) -> None:
        """A stream raises TransportClosed, instead of ending as if the object ended there."""
        transport = self.make()
        self.put(transport, "a", CONTENT)
        async with aclosing(transport.stream("a", chunk_size=64)) as chunks:
            assert await anext(chunks)
            await transport.aclose()
            with pytest.raises(TransportClosed):
                await drain(chunks)

    async def test_close_by_a_cancelled_task(self) -> None:
        """After a cancelled `aclose`, a second call waits until the transport is closed."""
        transport = self.make()
        self.put(transport, "a", CONTENT)
        reading = [asyncio.create_task(transport.read("a")) for _ in range(20)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(transport.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        await transport.aclose()
        await asyncio.gather(*reading, return_exceptions=True)
        with pytest.raises(TransportClosed):
            await transport.read("a")

    async def test_it_pickles_as_its_configuration(self) -> None:
        """A copy of a transport in use reads the same objects; closing the copy leaves the original open."""
        async with self.make() as transport:
            self.put(transport, "a", CONTENT)
            await transport.read("a")
            copy = pickle.loads(pickle.dumps(transport))
            assert type(copy) is type(transport)
            async with copy:
                check_bytes(await copy.read("a"), CONTENT)
            check_bytes(await transport.read("a"), CONTENT)

    async def test_errors_pickle(self) -> None:
        """An error travels from a worker with its type, text and path."""
        async with self.make() as transport:
            with pytest.raises(TransportError) as caught:
                await transport.read("missing")
            copy = pickle.loads(pickle.dumps(caught.value))
            assert type(copy) is type(caught.value)
            assert (str(copy), copy.path) == (str(caught.value), "missing")

    async def test_repr_names_class_and_state(self) -> None:
        """The representation of a transport names its class, and says whether it is open."""
        transport = self.make()
        text = repr(transport)
        assert type(transport).__name__ in text
        assert "open" in text
