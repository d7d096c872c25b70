"""Sequential, async and threaded fetching give the same batches, the same errors and the same records."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from asyncloader.base.events import SkippedSample
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.sample_errors import ErrorPolicy, NoSamples
from asyncloader.workers.fetch.seeding import sample_rng
from tests.drawn import scaled
from tests.unit.workers.fetch.raising import SEEDED, fetch, places, reader

LENGTH = 60


class Samples(Dataset[Any]):
    """Indices with a random number of their own; some raise."""

    def __init__(self, bad: frozenset[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return LENGTH

    def sample(self, index: int) -> Any:
        drawn = sample_rng().random.random()
        if index in self.bad:
            raise ValueError(f"bad {index}")
        return index, drawn


class Plain(Samples):
    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class Awaited(Samples):
    async def __getitem__(self, index: int) -> Any:
        for _ in range((index * 7) % 4):
            await asyncio.sleep(0)
        return self.sample(index)


class Decode:
    """Adds a random number; some samples do not decode."""

    def __init__(self, bad: frozenset[int]) -> None:
        self.bad = bad

    def __call__(self, sample: Any) -> Any:
        if sample[0] in self.bad:
            raise KeyError(f"undecodable {sample[0]}")
        return *sample, sample_rng().random.random()


async def outcomes(one: DatasetReader, batches: Sequence[Any]) -> list[Any]:
    """Return the outcome of each batch; an asynchronous reader fetches all at a time."""

    async def outcome(index: Any) -> Any:
        bad: list[SkippedSample] = []
        try:
            made: Any = await fetch(one, index, bad)
        except NoSamples:
            made = "no samples"
        except Exception as error:
            # Which of several bad samples raises first depends on timing.
            made = "error" if isinstance(error, (ValueError, KeyError)) else error
            assert any("while fetching sample index" in note for note in error.__notes__)  # noqa: PT017
            bad = []
        return made, places(bad)

    try:
        if one.asynchronous:
            return list(await asyncio.gather(*map(outcome, batches)))
        return [await outcome(index) for index in batches]
    finally:
        one.close()


POLICIES = [None, ErrorPolicy("skip"), ErrorPolicy("skip", True, LENGTH, 3), ErrorPolicy(lambda index, error: (index,))]


@settings(deadline=None, max_examples=scaled(60))
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    bad=st.frozensets(st.integers(0, 35), max_size=6),
    undecodable=st.frozensets(st.integers(0, 35), max_size=3),
    decodes=st.booleans(),
    decode_threads=st.integers(0, 3),
    threads=st.integers(1, 5),
    concurrency=st.integers(1, 9),
    policy=st.sampled_from(POLICIES),
    replicas=st.integers(1, 3),
)
def test_all_ways_agree(
    sizes: list[int],
    bad: frozenset[int],
    undecodable: frozenset[int],
    decodes: bool,
    decode_threads: int,
    threads: int,
    concurrency: int,
    policy: ErrorPolicy | None,
    replicas: int,
) -> None:
    """They agree in seeded mode, with and without `decode`, under each policy for samples that raise."""
    batches, first = [], 0
    for size in sizes:
        batches.append((first * replicas, list(range(first, first + size))))
        first += size
    options: dict[str, Any] = {
        "policy": policy,
        "seeded": SEEDED._replace(replicas=replicas),
        "decode": Decode(undecodable) if decodes else None,
        "decode_threads": decode_threads,
        "concurrency": concurrency,
    }
    plain = asyncio.run(outcomes(reader(Plain(bad), **options), batches))
    assert asyncio.run(outcomes(reader(Awaited(bad), **options), batches)) == plain
    assert asyncio.run(outcomes(reader(Plain(bad), fetch_threads=threads, **options), batches)) == plain
