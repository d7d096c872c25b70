from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from asyncloader import Tuning
from tests.clients.frameworks.helping import Rows, RowStream, batches_given
from tests.clients.frameworks.lightning_runs import OURS, STOCK, Recorder, WorkersSeen, fit, trainer
from tests.helpers.comparing import assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # advice for machines with more CPUs
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning"),  # Lightning 2.6 under torch 2.13
]

# -------------------------------------------------------------------------------------------- fit


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["0", "2", "2 persistent"],
)
def test_fit_sees_torchs_batches(options: dict[str, Any]) -> None:
    """Three epochs give the batches, the weights and the generator states of a run with torch's loader."""
    arguments: dict[str, Any] = {"batch_size": 8, "shuffle": True, **options}
    expected, expected_draws = fit(STOCK(Rows(36), **arguments), max_epochs=3)
    loader = OURS(Rows(36), **arguments)
    got, got_draws = fit(loader, max_epochs=3)
    assert len(got.seen["train"]) == 15
    assert_same(got.seen["train"], expected.seen["train"])
    assert_same(got.line.state_dict(), expected.line.state_dict())
    assert got_draws == expected_draws
    assert batches_given(loader) == 15


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_no_process_is_left_after_fit(persistent: bool) -> None:
    """When `fit` returns, the workers have ended, although loader, model and trainer are still held."""
    seen = WorkersSeen()
    loader = OURS(Rows(64), 8, num_workers=2, persistent_workers=persistent)
    model, held = Recorder(), trainer(max_epochs=2, callbacks=[seen])
    held.fit(model, loader)
    with seen.at_first() as workers:
        assert len(workers.fds) == 2
        assert workers.ended()
    assert len(model.seen["train"]) == 16
    assert loader._iterator is None


@pytest.mark.thorough
def test_fit_that_stops_within_an_epoch() -> None:
    """`limit_train_batches` and `max_steps` abandon iterators; the batches are torch's, and no worker stays."""
    arguments: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 2}
    options: dict[str, Any] = {"max_epochs": 5, "max_steps": 7, "limit_train_batches": 3}
    expected, expected_draws = fit(STOCK(Rows(60), **arguments), **options)
    seen = WorkersSeen()
    got, got_draws = fit(OURS(Rows(60), **arguments), callbacks=[seen], **options)
    assert len(got.seen["train"]) == 7
    assert_same(got.seen["train"], expected.seen["train"])
    assert got_draws == expected_draws
    with seen.at_first() as workers:
        assert workers.ended()


def test_error_in_a_training_step() -> None:
    """An error of the model's ends `fit` with that error; the workers end, too."""
    loader = OURS(Rows(64), 8, num_workers=2, persistent_workers=True)

    class Failing(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 2:
                raise ZeroDivisionError("in the step")

    seen = WorkersSeen()
    with pytest.raises(ZeroDivisionError, match="in the step"):
        fit(loader, max_epochs=1, callbacks=[seen, Failing()])
    with seen.at_first() as workers:
        assert len(workers.fds) == 2
        loader.close()
        assert workers.ended()


def test_unsized_stream() -> None:
    """A stream without a length, which Lightning reads one batch ahead, gives torch's batches."""
    expected, expected_draws = fit(STOCK(RowStream(40), 8, num_workers=2), max_epochs=2)
    got, got_draws = fit(OURS(RowStream(40), 8, num_workers=2), max_epochs=2)
    assert len(got.seen["train"]) == 2 * 6
    assert_same(got.seen["train"], expected.seen["train"])
    assert got_draws == expected_draws


# -------------------------------------------------------------------------------------------- overfit


def test_overfit_batches_keeps_the_loader() -> None:
    """`overfit_batches` replaces the sampler and so builds a new loader: it is ours, with its own options."""
    dataset = Rows(40)
    loader = OURS(dataset, 8, shuffle=True, num_workers=2, tuning=Tuning(ring_bytes=1 << 20), snapshot_every_n_steps=3)
    model, run = Recorder(), trainer(max_epochs=2, overfit_batches=2)
    with pytest.warns(UserWarning, match="turning off the train dataloader shuffling"):
        run.fit(model, loader)
    used: Any = run.train_dataloader
    assert used is not loader
    assert type(used) is OURS
    assert (used.dataset, used.tuning.ring_bytes, used.snapshot_every_n_steps, used.num_workers) == (
        dataset,
        1 << 20,
        3,
        2,
    )
    assert batches_given(used) == 4
    assert [len(batch["x"]) for batch in model.seen["train"]] == [8] * 4
