"""A worker that sends false answers: the consumer gets an error, never a crash, a hang, or a wrong batch."""

from __future__ import annotations

import pytest
import torch

from asyncloader import DataLoader, LoaderTimeout, WorkerDied
from tests.helpers.lying import LIES, WIDTH, Liar, until_error
from tests.helpers.running import BOTH, PATIENCE_S


def check(found: tuple[list[torch.Tensor], Exception], most: int) -> None:
    """At most `most` batches, all of them correct, then an error with a text."""
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
    """Batches before the false answer are correct; then an error is raised, and no resource is left behind."""
    check(until_error(kind, Liar(how), num_workers=1), 6 if how == "the same answer twice" else 5)


@pytest.mark.parametrize(
    "how", ["a slot that the ring has not", "no template", "an empty frame", "a leaf before the slot"]
)
def test_a_lie_in_the_first_answer(how: str) -> None:
    """The first answer is false; the other worker is honest. No batch is delivered before the error."""
    check(until_error("sync", Liar(how, when=0), num_workers=2), 0)


def test_same_template_as_none() -> None:
    """A first result that claims to have the template of the result before is refused."""
    check(until_error("sync", Liar("the template of before", when=0), num_workers=1), 0)


@pytest.mark.thorough
def test_same_template_as_before() -> None:
    """The control for the false answers: an honest result sent by hand is accepted; the next result never arrives."""
    batches, error = until_error("sync", Liar("the template of before", when=1), num_workers=1, timeout=1)
    assert [int(batch[0, 0]) for batch in batches] == [0, 0]  # the slot was never written
    assert isinstance(error, LoaderTimeout)


@pytest.mark.parametrize("how", ["an empty frame", "a message of no kind", "another slot of the ring"])
def test_the_next_epoch_of_persistent_workers_is_whole(how: str) -> None:
    """A broken stream is not read any further: the next epoch starts new workers."""
    dataset = Liar(how)
    with DataLoader[torch.Tensor](dataset, num_workers=2, persistent_workers=True, timeout=PATIENCE_S) as loader:
        with pytest.raises(ValueError, match="broken"):
            list(loader)
        dataset.when = -1  # only new workers see this
        assert [int(batch[0, 0]) for batch in loader] == list(range(12))
