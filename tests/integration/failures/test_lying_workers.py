"""A worker whose answers lie: the consumer gets an error, never a crash, a hang, or a batch that is something else."""

from __future__ import annotations

import pytest
import torch

from asyncloader import DataLoader, LoaderTimeout, WorkerDied
from tests.helpers.lying import LIES, WIDTH, Liar, until_error
from tests.helpers.running import BOTH, PATIENCE_S


def check(found: tuple[list[torch.Tensor], Exception], most: int) -> None:
    """At most so many batches, all of them correct, then an error with a text."""
    batches, error = found
    assert len(batches) <= most
    for number, batch in enumerate(batches[:5]):
        assert batch.shape == (1, WIDTH)
        assert batch.unique().tolist() == [number]
    assert not isinstance(error, LoaderTimeout | AssertionError), error
    assert len(str(error)) > 5
    assert "broken" in str(error) or not isinstance(error, WorkerDied), "the lie itself must be told of"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("how", [how for how in LIES if how != "the template of before"])
def test_a_lie_is_an_error_for_the_consumer(kind: str, how: str) -> None:
    """Batches before it are correct; then an error is raised, and no resource is left behind."""
    check(until_error(kind, Liar(how), num_workers=1), 6 if how == "the same answer twice" else 5)


@pytest.mark.parametrize(
    "how", ["a slot that the ring has not", "no template", "an empty frame", "a leaf before the slot"]
)
def test_a_lie_in_the_first_answer(how: str) -> None:
    """The same before there was any answer; the other worker is honest."""
    check(until_error("sync", Liar(how, when=0), num_workers=2), 0)


def test_same_template_as_none() -> None:
    """A first result that says "the same template as before" is refused, though there was none before."""
    check(until_error("sync", Liar("the template of before", when=0), num_workers=1), 0)


@pytest.mark.thorough
def test_same_template_as_before() -> None:
    """What the lies are compared with: a result by hand that is honest is taken; the next one is waited for in vain."""
    batches, error = until_error("sync", Liar("the template of before", when=1), num_workers=1, timeout=1)
    assert [int(batch[0, 0]) for batch in batches] == [0, 0]  # a slot that nobody wrote to
    assert isinstance(error, LoaderTimeout)


@pytest.mark.parametrize("how", ["an empty frame", "a message of no kind", "another slot of the ring"])
def test_the_next_epoch_of_persistent_workers_is_whole(how: str) -> None:
    """A broken stream is not read on from: the next epoch begins with workers of which nothing is known to be wrong."""
    dataset = Liar(how)
    with DataLoader[torch.Tensor](dataset, num_workers=2, persistent_workers=True, timeout=PATIENCE_S) as loader:
        with pytest.raises(ValueError, match="broken"):
            list(loader)
        dataset.when = -1  # seen by new workers only
        assert [int(batch[0, 0]) for batch in loader] == list(range(12))
