"""What `seed=` makes of a loader's options: the order, this rank's part of it, and what a state must agree with.

Data path: options -> [seeded_mode] -> rank view -> scheduler. Pure, but for asking torch.distributed for the rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from asyncloader.errors import RanksDisagree
from asyncloader.generators import samplers_within
from asyncloader.rank_view import ON_UNEVEN, RankView, Share, Topology
from asyncloader.seeded_sampler import SeededSampler

__all__ = [
    "check_options",
    "default_sampler",
    "even_ranks",
    "expectations",
    "plain_sampler",
    "rank_view",
    "topology",
    "without_batch",
]

RESUME = ("exact", "replay")


def check_options(
    *,
    iterable: bool,
    seed: Any,
    generator: Any,
    rank: Any,
    world_size: Any,
    on_uneven: Any,
    resume: Any,
    snapshot_every_n_steps: Any,
    run_ahead: Any,
) -> None:
    """Check the options of seeded mode and of resuming.

    Raises:
        ValueError: one is out of range, or two exclude one another.
    """
    if seed is not None and not _is_seed(seed):
        raise ValueError(f"seed should be an integer between 0 and 2**64 - 1 or None, but got seed={seed!r}")
    if seed is not None and generator is not None:
        raise ValueError(
            f"seed={seed} and generator exclude one another: with a seed no generator is drawn from. Leave one out"
        )
    if seed is None and (rank is not None or world_size is not None):
        raise ValueError(
            f"rank={rank!r} and world_size={world_size!r} need seed=: without it the loader is torch's, which leaves "
            "sharding to the sampler (torch's DistributedSampler)"
        )
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together, but got rank={rank!r} and world_size={world_size!r}")
    if world_size is not None:
        if not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"world_size should be a positive integer, but got world_size={world_size!r}")
        if not isinstance(rank, int) or not 0 <= rank < world_size:
            raise ValueError(f"rank should be between 0 and world_size - 1 = {world_size - 1}, but got rank={rank!r}")
    if on_uneven not in ON_UNEVEN:
        raise ValueError(f"on_uneven should be one of {', '.join(ON_UNEVEN)}, but got on_uneven={on_uneven!r}")
    if iterable and on_uneven in ("pad", "repeat"):
        raise ValueError(
            f"on_uneven={on_uneven!r} needs a map dataset: samples of a stream cannot be fetched a second time. "
            "Use on_uneven='drop' or 'error'"
        )
    if resume not in RESUME:
        raise ValueError(f"resume should be 'exact' or 'replay', but got resume={resume!r}")
    every = snapshot_every_n_steps
    if every is not None and (not isinstance(every, int) or every < 0):
        raise ValueError(
            f"snapshot_every_n_steps should be a non-negative integer or None, but got snapshot_every_n_steps={every!r}"
        )
    if not isinstance(run_ahead, int) or run_ahead < 0:
        raise ValueError(f"run_ahead should be a non-negative number of batches, but got run_ahead={run_ahead!r}")


def default_sampler(dataset: Any, seed: int | None, shuffle: Any, sampler: Any, batch_sampler: Any) -> Any:
    """The sampler of seeded mode where the user gave none; None where there is one, or nothing to sample."""
    if not _is_seed(seed) or sampler is not None or batch_sampler is not None or isinstance(dataset, IterableDataset):
        return None
    assert seed is not None
    return SeededSampler(dataset, seed, shuffle=bool(shuffle))


def _is_seed(seed: Any) -> bool:
    return isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 1 << 64


def topology(spec: Any) -> Topology:
    """This process's rank among those that train together: as given, else torch.distributed's, else alone."""
    if spec._asyncloader_options.rank is not None:
        return Topology(spec._asyncloader_options.rank, spec._asyncloader_options.world_size)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Topology(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return Topology(0, 1)


def even_ranks(spec: Any, *, iterable: bool) -> int:
    """How many ranks share a map dataset's samples evenly, and wait for one another; 1 in torch mode, and for streams,
    whose ranks agree on their end.
    """
    return 1 if spec._asyncloader_options.seed is None or iterable else topology(spec).world_size


def without_batch(ranks: int) -> RanksDisagree:
    """The error for a rank all of whose samples of a batch were left out."""
    return RanksDisagree(
        f"all samples of a batch were left out, and the other {ranks - 1} ranks have theirs: they would wait for this "
        "one at the epoch's end. See loader.errors. A function as on_error keeps ranks even (and so does "
        "bad_samples='refill', except for samples that kill their workers)."
    )


def plain_sampler(spec: Any) -> Any:
    """The sampler of indices that the loader's order comes from, None where there is none.

    torch sets `loader.sampler` to one of its own where the user gave a batch sampler; inside a plain `BatchSampler` is
    the one that matters.
    """
    if type(spec.batch_sampler) is BatchSampler:
        return spec.batch_sampler.sampler
    return getattr(spec, "sampler", None)


def _replicas(sampler: Any) -> Topology | None:
    """The topology by which a sampler, or one that it reads from, shards already; None if none does."""
    for each in samplers_within(sampler):
        if isinstance(each, DistributedSampler):
            return Topology(each.rank, each.num_replicas)
        # Accelerate's BatchSamplerShard and its like; and samplers made after DistributedSampler.
        for names in (("process_index", "num_processes"), ("rank", "num_replicas"), ("rank", "world_size")):
            rank, size = (getattr(each, name, None) for name in names)
            if isinstance(rank, int) and isinstance(size, int):
                return Topology(rank, size)
    return None


def rank_view(spec: Any, index_sampler: Any) -> RankView:
    """The rank's share of the index sampler's order, for a map dataset in seeded mode.

    A sampler that shards by itself is not sharded again.
    """
    of_batches = spec.batch_sampler is not None and type(spec.batch_sampler) is not BatchSampler
    sampler = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
    own = _replicas(sampler)
    batched = type(index_sampler) is BatchSampler
    share = Share(
        batch_size=index_sampler.batch_size if batched else None,
        drop_last=bool(index_sampler.drop_last) if batched else False,
        topology=topology(spec) if own is None else Topology(0, 1),
        on_uneven=spec._asyncloader_options.on_uneven,
        of_batches=of_batches,
        replicas=1 if own is None else own.world_size,
        replica=0 if own is None else own.rank,
    )
    return RankView(sampler, share)


def expectations(spec: Any, *, iterable: bool) -> dict[str, Any]:
    """What a state names of the loader that it is of, to be compared with the one that it is loaded into."""
    size, drop_last = spec.batch_size, spec.drop_last
    if type(spec.batch_sampler) is BatchSampler:
        size, drop_last = spec.batch_sampler.batch_size, spec.batch_sampler.drop_last
    if not iterable:
        own = _replicas(plain_sampler(spec)) or _replicas(spec.batch_sampler)
        if own is None and spec._asyncloader_options.seed is not None:
            size = (size or 1) * topology(spec).world_size  # without a batch size: items that make a step
        elif own is not None and size is not None:
            size *= own.world_size
    return {
        "mode": "torch" if spec._asyncloader_options.seed is None else "seeded",
        "kind": "iterable" if iterable else "map",
        "seed": spec._asyncloader_options.seed,
        "length": None if iterable else _length(spec.dataset),
        "batch_size": size,
        "drop_last": bool(drop_last),
        "order": "stream" if iterable else _order(spec),
    }


def _order(spec: Any) -> str:
    if spec.batch_sampler is not None and type(spec.batch_sampler) is not BatchSampler:
        return "batch_sampler"
    sampler = plain_sampler(spec)
    if isinstance(sampler, SequentialSampler) or (type(sampler) is SeededSampler and not sampler.shuffle):
        return "sequential"
    if type(sampler) is SeededSampler and sampler.seed != spec._asyncloader_options.seed:
        return f"shuffled by seed {sampler.seed}"
    if isinstance(sampler, RandomSampler) or type(sampler) is SeededSampler:
        return "shuffled"
    return "sampler"


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # torch does not ask where a sampler was given: whatever it raises must not show
        return None
