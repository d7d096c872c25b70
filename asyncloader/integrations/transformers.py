"""The Hugging Face Trainer: it makes its loaders itself and has them prepared by Accelerate. A mixin exchanges them."""

from __future__ import annotations

from typing import Any

from asyncloader.integrations.accelerate import adopt

__all__ = ["AsyncTrainerMixin"]


class AsyncTrainerMixin:
    """Put before `Trainer`, its loaders are ours: ``class MyTrainer(AsyncTrainerMixin, Trainer): ...``.

    The Trainer's arguments (``dataloader_num_workers`` and so on) hold, and so does what Accelerate adds. When a run is
    resumed, the Trainer has Accelerate skip the batches of the epoch that it was in, through a stock loader; from the
    next epoch on it is ours again. To have that epoch too, train inside `asyncloader.install`.
    """

    def get_train_dataloader(self) -> Any:
        """The Trainer's, with our loader inside."""
        trainer: Any = super()
        return adopt(trainer.get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The Trainer's, with our loader inside."""
        trainer: Any = super()
        return adopt(trainer.get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The Trainer's, with our loader inside."""
        trainer: Any = super()
        return adopt(trainer.get_test_dataloader(test_dataset))
