"""Several processes: how `adopt` shares a seeded loader's batches among them, and one state that fits them all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from torch.utils.data import BatchSampler, SequentialSampler

from asyncloader.integrations.accelerate import adopt
from tests.clients.frameworks.accelerate_runs import OURS, prepared
from tests.clients.frameworks.helping import Rows
from tests.helpers.comparing import assert_same
from tests.helpers.running import run_script

pytestmark = pytest.mark.usefixtures("accelerate_state")

ROWS, BATCH = 29, 4


def test_two_processes_share_a_seeded_epoch() -> None:
    """A process's share is that of the loader with rank and world size: joined, the batches are a single process's."""
    whole = list(OURS(Rows(32), 8, shuffle=True, seed=5))
    for split in (False, True):
        shares = [list(_in_process(rank, Rows(32), 8 if split else 4, split=split)) for rank in range(2)]
        joined = [{name: torch.cat([a[name], b[name]]) for name in a} for a, b in zip(*shares, strict=True)]
        assert_same(joined, whole)


def test_a_state_of_one_process_loads_into_two() -> None:
    """With the global batch kept, a seeded run continues with another number of processes, to the bit; and back."""
    shard = prepared(OURS(Rows(32), 8, shuffle=True, seed=5))
    iterator = iter(shard)
    next(iterator)
    state = shard.state_dict()
    shares = [_in_process(rank, Rows(32), 4) for rank in range(2)]
    for share in shares:
        share.load_state_dict(state)
    both = [iter(share) for share in shares]
    first, second = next(both[0]), next(both[1])
    assert_same({name: torch.cat([first[name], second[name]]) for name in first}, next(iterator))
    assert shares[0].state_dict() == shares[1].state_dict()
    again = prepared(OURS(Rows(32), 8, shuffle=True, seed=5))
    again.load_state_dict(shares[1].state_dict())
    assert_same(list(again), list(iterator))


def test_nothing_is_left_out_where_accelerate_evens_batches() -> None:
    """29 rows, two processes, ``on_uneven="drop"``: the last batches are filled up as Accelerate's would be."""
    seen = [_in_process(rank, torch.arange(ROWS), BATCH) for rank in range(2)]
    assert {loader.on_uneven for loader in seen} == {"pad"}
    assert [loader.batch_sampler.num_processes for loader in seen] == [2, 2]
    batches = [list(loader) for loader in seen]
    assert [[len(batch) for batch in share] for share in batches] == [[BATCH] * 4] * 2
    assert {int(i) for share in batches for batch in share for i in batch} == set(range(ROWS))
    assert _in_process(0, torch.arange(ROWS), BATCH, on_uneven="repeat").on_uneven == "repeat"


def test_users_batch_sampler_stays_accelerates() -> None:
    """A batch sampler of the user's own, and ``even_batches=False``, are shared out by Accelerate's shard, once."""
    for even in (True, False):
        batches = [[0, 1], [2, 3], [4, 5], [6, 7]]
        sampler: Any = Listed(batches) if even else BatchSampler(SequentialSampler(range(8)), 2, False)
        shard = BatchSamplerShard(sampler, 2, 1, even_batches=even)
        wrapper: Any = DataLoaderShard(torch.arange(8), batch_sampler=shard)
        adopt(wrapper, OURS(torch.arange(8), 2, seed=1))
        assert wrapper.base_dataloader.batch_sampler is shard
        assert [batch.tolist() for batch in wrapper] == batches[1::2]


class Listed(BatchSampler):
    """A batch sampler of given batches, of equal sizes."""

    def __init__(self, batches: list[list[int]]) -> None:
        super().__init__(range(8), len(batches[0]), False)
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def _in_process(process: int, dataset: Any, batch_size: int, *, split: bool = False, **own: Any) -> Any:
    """Return the loader that `adopt` makes for this process of two, as `prepare` would wrap it there."""
    mine = OURS(dataset, batch_size, shuffle=True, seed=5, **own)
    shard = BatchSamplerShard(mine.batch_sampler, 2, process, split_batches=split)
    wrapper = DataLoaderShard(dataset, batch_sampler=shard)
    return adopt(wrapper, mine).base_dataloader


def test_another_rank_is_refused() -> None:
    """A loader whose rank is not Accelerate's is refused, and the error has both."""
    with pytest.raises(ValueError, match="rank=1 and world_size=2, but Accelerate's are 0 and 2"):
        _in_process(0, Rows(8), 4, rank=1, world_size=2)


SCRIPT = """
    import sys
    import warnings
    import torch
    from accelerate import Accelerator, DataLoaderConfiguration, debug_launcher

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(8))

    def make(accelerator, kind):
        from asyncloader import DataLoader
        from asyncloader.integrations.accelerate import prepare
        options = {"seed": 5}
        if kind == "seedable":
            options = {}
        if kind == "generator":
            options = {"generator": torch.Generator().manual_seed(accelerator.process_index)}
        return prepare(accelerator, DataLoader(torch.arange(21), 4, shuffle=True, **options))

    def main():
        from asyncloader import DataLoader
        from asyncloader.integrations.accelerate import adopt, prepare
        for kind in ("seeded", "generator", "seedable"):
            config = DataLoaderConfiguration(use_seedable_sampler=kind == "seedable", data_seed=3)
            accelerator = Accelerator(cpu=True, dataloader_config=config)
            assert accelerator.num_processes == 2
            loader = make(accelerator, kind)
            first = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
            assert sorted(sum(first, [])) == list(range(21)), first
            second = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
            accelerator.free_memory()
            loader = make(accelerator, kind)
            iterator = iter(loader)
            next(iterator)
            accelerator.save_state(sys.argv[1] + kind)
            accelerator.wait_for_everyone()
            del iterator
            accelerator.free_memory()
            loader = make(accelerator, kind)
            accelerator.load_state(sys.argv[1] + kind)
            got = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
            assert got == first[1:], (kind, got, first)
            got = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
            assert got == second, (kind, got, second)
            accelerator.free_memory()
        dispatched = prepare(accelerator, DataLoader(Stream(), 2, seed=1))
        expected = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
        assert [batch.tolist() for batch in dispatched] == expected[accelerator.process_index]
        assert not dispatched.use_stateful_dataloader
        dispatched.use_stateful_dataloader = True
        try:
            adopt(dispatched)
        except ValueError as error:
            assert "2 processes get their batches from the first one" in str(error), error
        else:
            raise AssertionError("not refused")
        accelerator.free_memory()
        accelerator.end_training()

    if __name__ == "__main__":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # multiprocessing and gloo have opinions on forking
            debug_launcher(main, num_processes=2)
        print("done")
"""


@pytest.mark.thorough
def test_two_processes_save_and_resume(tmp_path: Path) -> None:
    """Two processes save one state, and resume from it: rows, their order and the next epoch are those of a whole
    run. A stream, which one process reads for both, is shared out right, but no state of it is kept.
    """
    done = run_script(tmp_path, SCRIPT.replace("sys.argv[1]", repr(str(tmp_path / "state"))))
    assert done.stdout.strip().endswith("done"), done.stderr
