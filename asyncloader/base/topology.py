"""Which rank this process is, of how many: as the options say, or torch.distributed.

Data path: options -> [topology] -> samplers, agreement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from asyncloader.errors import RanksDisagree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

RankGroupLike: TypeAlias = "ProcessGroup | DeviceMesh | None"


class Topology(NamedTuple):
    """This process's rank, and the number of processes that train together."""

    rank: int
    world_size: int


def check_group(given: Any) -> None:
    """Check a loader's `group`.

    Raises:
        TypeError: it is no process group and no mesh.
        ValueError: the mesh has several dimensions, or this process is not in the group.
    """
    if given is None:
        return
    group = process_group(given)
    distributed = torch.distributed
    if distributed.is_available() and group == distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "group should be one that this process is in, but torch.distributed.new_group made it of other ranks than "
            f"this one, {distributed.get_rank()}"
        )
    if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
        raise TypeError(
            f"group should be a torch.distributed process group or a DeviceMesh of one dimension, but got {given!r}"
        )


def process_group(given: Any) -> Any:
    """The process group of a loader's `group`: itself, or that of a mesh.

    Raises:
        ValueError: the mesh has several dimensions.
    """
    if not (hasattr(given, "get_group") and hasattr(given, "ndim")):
        return given
    if given.ndim != 1:
        names = given.mesh_dim_names
        raise ValueError(
            f"group should be a DeviceMesh of one dimension, but got one of {given.ndim}. Take the dimension along "
            f"which the samples differ, for example mesh[{(names or ('dp',))[0]!r}]"
        )
    return given.get_group()


def topology(spec: Any) -> Topology:
    """This process's rank and world size: as given, else torch.distributed's, else a single process."""
    given = spec._asyncloader_options
    if given.group is not None:
        group = process_group(given.group)
        return Topology(torch.distributed.get_rank(group), torch.distributed.get_world_size(group))
    if given.rank is not None:
        return Topology(given.rank, given.world_size)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Topology(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return Topology(0, 1)


def without_batch(ranks: int) -> RanksDisagree:
    """The error for a rank that has no batch because all of its samples were dropped."""
    return RanksDisagree(
        f"all samples of a batch were left out, and the other {ranks - 1} ranks have theirs: they would wait for this "
        "one at the epoch's end. See loader.skipped_samples. A function as on_error keeps ranks even (and so does "
        "on_error='refill', except for samples that kill their workers)."
    )
