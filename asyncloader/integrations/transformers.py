"""The Hugging Face Trainer: a mixin that replaces the loaders that it makes and prepares with Accelerate."""

from __future__ import annotations

from typing import Any

from asyncloader.integrations.accelerate import adopt


class AsyncTrainerMixin:
    """The first base of a `Trainer` class, whose loaders it makes ours: ``class MyTrainer(AsyncTrainerMixin,
    Trainer)``.

    The Trainer's arguments (``dataloader_num_workers`` and so on) and Accelerate's additions stay in effect. When a run
    is resumed, the Trainer lets Accelerate skip batches of the current epoch through a stock loader; from the next
    epoch on the loader is ours again. To have our loader in that epoch, too, train inside `asyncloader.install`.
    """

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's loader, with ours inside."""
        trainer: Any = super()
        return adopt(trainer.get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the Trainer's loader, with ours inside."""
        trainer: Any = super()
        return adopt(trainer.get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the Trainer's loader, with ours inside."""
        trainer: Any = super()
        return adopt(trainer.get_test_dataloader(test_dataset))
