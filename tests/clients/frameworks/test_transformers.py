from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import asyncloader
from tests.clients.frameworks.helping import Line, Rows, RowStream, batches_given, draws, seed_all
from tests.helpers.comparing import assert_same

pytestmark = [pytest.mark.clients, pytest.mark.usefixtures("accelerate_state")]


class Setup:
    """The stock Trainer, a Trainer of ours on top of it, and a factory of small runs of either."""

    def __init__(self) -> None:
        self.transformers: Any = import_module("transformers")
        trainer = import_module("transformers.trainer")  # it is imported when first asked for
        mixin: Any = import_module("asyncloader.integrations.transformers").AsyncTrainerMixin
        self.stock: Any = trainer.Trainer
        self.watch: Any = type("Watch", (_Watch, self.transformers.TrainerCallback), {})
        self.ours: Any = type("AsyncTrainer", (mixin, trainer.Trainer), {})

    def trainer(self, kind: Any, folder: Path, **options: Any) -> Any:
        """A trainer of this class with a new model, from given seeds."""
        seed_all()
        datasets = {name: options.pop(name) for name in ("train_dataset", "eval_dataset") if name in options}
        arguments: dict[str, Any] = {
            "output_dir": str(folder),
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "logging_steps": 1,
            "save_strategy": "no",
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 8,
            "gradient_accumulation_steps": 4,
            "learning_rate": 0.01,
            "dataloader_num_workers": 2,
            "dataloader_pin_memory": False,
            "seed": 3,
        }
        return kind(
            model=Line(),
            args=self.transformers.TrainingArguments(**arguments | options),
            callbacks=[self.watch()],
            **datasets,
        )


class _Watch:
    """Keeps the loaders of a run; it is a callback once it is combined with the framework's class."""

    def __init__(self) -> None:
        self.loaders: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.loaders["train"] = kwargs["train_dataloader"]

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.loaders["eval"] = kwargs["eval_dataloader"]


def used(trainer: Any, which: str = "train") -> Any:
    """Return the loader inside Accelerate's wrapper that the run used."""
    (watch,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, _Watch)]
    return watch.loaders[which].base_dataloader


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def weights(trainer: Any) -> dict[str, Any]:
    return dict(trainer.model.state_dict())


@pytest.fixture(scope="module")
def hf() -> Setup:
    return Setup()


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_training_is_that_of_the_stock_trainer(hf: Setup, tmp_path: Path, persistent: bool) -> None:
    """Two epochs with four batches to a step: each loss, the weights and the generators are the stock Trainer's."""
    trainer: Any = None
    runs = []
    for kind in (hf.stock, hf.ours):
        trainer = hf.trainer(
            kind, tmp_path, train_dataset=Rows(44), num_train_epochs=2, dataloader_persistent_workers=persistent
        )
        trainer.train()
        runs.append((losses(trainer), weights(trainer), draws()))
    assert len(runs[1][0]) == 2 * 6
    assert_same(runs[1], runs[0])
    assert type(used(trainer)) is asyncloader.DataLoader
    assert batches_given(used(trainer)) == 2 * 22


def test_training_on_a_stream(hf: Setup, tmp_path: Path) -> None:
    """The stream has no length, and is begun again when it ends before the steps do."""
    trainer: Any = None
    runs = []
    for kind in (hf.stock, hf.ours):
        trainer = hf.trainer(kind, tmp_path, train_dataset=RowStream(40), max_steps=8)
        trainer.train()
        runs.append((losses(trainer), weights(trainer)))
    assert len(runs[1][0]) == 8
    assert_same(runs[1], runs[0])
    assert batches_given(used(trainer)) >= 8 * 4 - 4


@pytest.mark.parametrize("stream", [False, True], ids=["map", "stream"])
def test_training_on_a_table(hf: Setup, tmp_path: Path, stream: bool) -> None:
    """Hugging Face's own datasets, with a column that the model does not take, over three epochs."""
    import_module("tqdm").tqdm.monitor_interval = 0  # or a table's hidden progress bar starts a thread
    columns = {"x": [[i / 9, i / 5, 0.5] for i in range(32)], "labels": [[i / 32] for i in range(32)], "id": range(32)}
    inside: Any = None
    runs = []
    for kind in (hf.stock, hf.ours):
        dataset = import_module("datasets").Dataset.from_dict(columns).with_format("torch")
        if stream:
            dataset = dataset.to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=8)
        trainer = hf.trainer(kind, tmp_path, train_dataset=dataset, max_steps=3 * 4, dataloader_persistent_workers=True)
        trainer.train()
        runs.append((losses(trainer), weights(trainer)))
        inside = used(trainer)
    assert_same(runs[1], runs[0])
    assert batches_given(inside) >= 12 * 4


def test_evaluation_and_prediction(hf: Setup, tmp_path: Path) -> None:
    """Evaluation within a run, `evaluate` and `predict`: losses and predictions are the stock Trainer's."""
    trainer: Any = None
    runs = []
    for kind in (hf.stock, hf.ours):
        trainer = hf.trainer(
            kind, tmp_path, train_dataset=Rows(16), eval_dataset=Rows(21), num_train_epochs=2, eval_strategy="epoch"
        )
        trainer.train()
        within = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
        seed_all()
        prediction = trainer.predict(Rows(13))
        runs.append((within, trainer.evaluate()["eval_loss"], prediction.predictions, prediction.label_ids))
    assert len(runs[1][0]) == 2
    assert runs[1][2].shape == (13, 1)
    assert_same(runs[1], runs[0])
    assert batches_given(used(trainer, "eval")) == 3


def test_evaluation_with_persistent_workers(hf: Setup, tmp_path: Path) -> None:
    """The Trainer keeps an evaluation loader with persistent workers; it is ours, and each evaluation uses it again."""
    trainer = hf.trainer(
        hf.ours,
        tmp_path,
        train_dataset=Rows(16),
        eval_dataset=Rows(16),
        num_train_epochs=3,
        eval_strategy="epoch",
        dataloader_persistent_workers=True,
    )
    trainer.train()
    assert batches_given(used(trainer, "eval")) == 3 * 2


def test_trainer_inside_install(hf: Setup, tmp_path: Path) -> None:
    """Inside `install` the stock Trainer uses our loader, with the same losses."""
    trainer: Any = None
    runs = []
    for context in (nullcontext, asyncloader.install):
        with context():
            trainer = hf.trainer(
                hf.stock,
                tmp_path,
                train_dataset=Rows(44),
                eval_dataset=Rows(16),
                eval_strategy="epoch",
                num_train_epochs=2,
            )
            trainer.train()
        runs.append((losses(trainer), weights(trainer), draws()))
    assert_same(runs[1], runs[0])
    assert type(used(trainer)) is asyncloader.DataLoader
    assert (batches_given(used(trainer)), batches_given(used(trainer, "eval"))) == (44, 2)


@pytest.mark.parametrize("way", ["mixin", "install"])
def test_resume_within_an_epoch(hf: Setup, tmp_path: Path, way: str) -> None:
    """Resumed from a checkpoint within an epoch, the Trainer has the losses of a resumed stock Trainer."""
    options: dict[str, Any] = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 4}
    trainer: Any = None
    runs = []
    for ours in (False, True):
        kind = hf.ours if ours and way == "mixin" else hf.stock
        folder = tmp_path / str(ours)
        with asyncloader.install() if ours and way == "install" else nullcontext():
            whole = hf.trainer(kind, folder, train_dataset=Rows(44), **options)
            whole.train()
            trainer = hf.trainer(kind, folder, train_dataset=Rows(44), **options)
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        runs.append((losses(trainer), weights(trainer)))
    assert len(runs[1][0]) == 12
    assert_same(runs[1], runs[0])
    if way == "install":
        assert type(used(trainer)) is asyncloader.DataLoader
    else:  # the rest of the first epoch came from Accelerate's stock loader, the second epoch from ours
        assert batches_given(used(trainer)) == 22
