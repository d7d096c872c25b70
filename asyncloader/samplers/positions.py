"""The sampler of a dataset whose indices are positions of its own order: 0, 1, 2 and so on.

Data path: [positions] -> position_source -> scheduler.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

from asyncloader.errors import StateError

if TYPE_CHECKING:
    from asyncloader.ranks.exchange import RankExchange


class PlannedDataset(Protocol):
    """The part of `remote.fixed_streams.FixedStreams` that its order needs."""

    @property
    def samples(self) -> int | None:
        """Number of samples; None before `plan_streams`."""
        ...

    @property
    def lanes(self) -> int:
        """Number of steps in a row that are read from different places; step ``n + lanes`` goes on where n stopped."""
        ...

    async def plan_streams(self, batch: int, ranks: RankExchange | None = None) -> None:
        """Find out the number, for global batches of this size; together with other ranks, each of which calls this."""
        ...

    def described(self) -> dict[str, Any]:
        """Return what must be the same where a state is loaded; None for what is not known yet."""
        ...


class Positions:
    """The sampler of a planned dataset.

    Args:
        dataset: the dataset.
    """

    def __init__(self, dataset: PlannedDataset) -> None:
        self.dataset = dataset
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Number of samples. TypeError: it is not known yet."""
        samples = self.dataset.samples
        if samples is None:
            raise TypeError("the number of samples is known when the first epoch begins, which counts them")
        return samples

    async def __aiter__(self) -> AsyncIterator[int]:
        """Yield all positions; for code that reads the sampler itself."""
        for position in range(len(self)):
            yield position

    def state_dict(self) -> dict[str, Any]:
        """Return what the order depends on."""
        return self.dataset.described()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the order of a saved state is this one.

        Raises:
            StateError: it is not; the text says what differs.
        """
        here = self.dataset.described()
        if not isinstance(state, dict):
            raise StateError(f"the state is broken: that of its streams is {type(state).__name__}")
        for name, value in here.items():
            saved = state.get(name)
            if saved == value or (name == "shards" and None in (saved, value)):
                continue
            if name == "shards":
                raise StateError(
                    "the state was saved of other shards, or of shards with other numbers of samples: use the same "
                    "shards, or begin anew without the state"
                )
            raise StateError(
                f"the state was saved with {name}={saved!r:.100}, but this dataset has {name}={value!r}; use "
                f"{name}={saved!r:.100}, or begin anew without the state"
            )
