"""Fixed streams in a rank of a group: the requests of `ranks_script.py` that are about them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from asyncloader import AsyncDataLoader, Mixture
from asyncloader.transports import LocalTransport
from tests.helpers.remote_folders import dataset_of, with_method
from tests.helpers.seeded_runs import Stepwise


class Recording(LocalTransport):
    """Counts the listings of a folder, and notes the shards that are opened."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.listed = 0
        self.opened: list[str] = []
        self.waits = False
        self.reached = asyncio.Event()

    async def list(self, prefix: str = "") -> AsyncGenerator[str, None]:
        self.listed += 1
        if self.waits:
            self.reached.set()
            await asyncio.Event().wait()
        async for path in super().list(prefix):
            yield path

    def pinned(self, path: str) -> Any:
        self.opened.append(path)
        return super().pinned(path)


class Fixed:
    """A rank's functions with loaders of fixed streams."""

    rank: int
    world: int
    runs: list[Stepwise]

    def fixed(self, folder: str, *, other: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
        """Read fixed streams, as `_fixed`. `other`: arguments of all ranks but the first, in place of theirs."""
        given: dict[str, Any] = {"folder": folder, **arguments, **((other or {}) if self.rank else {})}
        return self._fixed(**given)

    def _fixed(
        self,
        folder: str,
        *,
        kind: str = "sync",
        state: dict[str, Any] | None = None,
        steps: int | None = None,
        streams: int | None = 4,
        buffer: int = 0,
        cache_dir: str | None = None,
        elastic: Any = "order",
        mixed: dict[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Read an epoch of fixed streams, from a state on, or a number of its steps.

        Args:
            folder: of the shards.
            kind: of loader, as for `Stepwise`.
            state: to begin from.
            steps: after which the loader stays as it is; None: the epoch is read to its end.
            streams: of the dataset.
            buffer: shuffle buffer.
            cache_dir: of the dataset.
            elastic: of the dataset.
            mixed: arguments of a `Mixture` of the streams and as many `rows` as they say; None: streams alone.
            options: the loader's.

        Returns:
            ``batches``; ``state`` after them; ``listed``, how often shards were listed in this process, and ``opened``,
            the shards that were opened in it; or an ``error``.
        """
        store = Recording(folder)
        where: dict[str, Any] = {"transport": store} if cache_dir is None else {"cache_dir": cache_dir}
        url = "/" if cache_dir is None else f"{folder}/"
        dataset: Any = dataset_of(url, streams=streams, shuffle_buffer=buffer, elastic=elastic, **where)
        if mixed is not None:
            rows = range(mixed.pop("rows"))
            dataset = Mixture([dataset, rows], **mixed)
        run = Stepwise(kind, dataset, **with_method({"batch_size": 6 // self.world, "seed": 3, **options}))
        try:
            if state is not None:
                run.loader.load_state_dict(state)
            run.begin()
            batches = [batch.tolist() for batch in (run.rest() if steps is None else run.take(steps))]
            found = {"batches": batches, "state": run.loader.state_dict()}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        if steps is None or "error" in found:
            run.close()
        else:
            self.runs.append(run)
        return found | {"listed": store.listed, "opened": store.opened}

    def fixed_batch(self, folder: str, asked: int, step: int) -> list[int] | None:
        """Make the batch of a step of fixed streams on the rank `asked` alone."""
        if self.rank != asked:
            return None
        with Stepwise("sync", dataset_of(f"{folder}/", streams=4), batch_size=6 // self.world, seed=3) as run:
            batch: list[int] = run.loader.batch_at(step).tolist()
            return batch

    def fixed_cancelled(self, folder: str, victim: int) -> str:
        """Begin fixed streams; `victim` is cancelled while the others wait for it. Returns the error of the others."""

        async def run() -> str:
            store = Recording(folder)
            store.waits = self.rank == victim
            dataset = dataset_of("/", streams=4, transport=store)
            async with AsyncDataLoader[Any](dataset, batch_size=2, seed=3) as loader:
                try:
                    first = asyncio.ensure_future(anext(aiter(loader)))
                    if self.rank == victim:
                        await store.reached.wait()
                        first.cancel()
                    await first
                except asyncio.CancelledError:
                    return "cancelled"
                except Exception as error:
                    return f"{type(error).__name__}: {error}"
            return "read"

        return asyncio.run(run())
