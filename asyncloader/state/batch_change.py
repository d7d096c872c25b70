"""Converts a state to the global batch of another loader, or explains which batch size to set. Pure.

Data path: checkpoint -> [batch_change] -> schema.

In seeded mode a sample's random numbers follow from its place in the epoch's order, not from its batch. Where that
order is computed from the seed, the position is the number of delivered samples: a loader with other batches, by
`batch_size` or by the number of ranks, goes on from it if one of its own batches begins there.
"""

from __future__ import annotations

from typing import Any


def in_batches_of(expected: dict[str, Any], state: dict[str, Any], samples: int | None) -> dict[str, Any]:
    """Return the state with its position counted in the loader's global batches; unchanged where that is impossible.

    Args:
        expected: the part of a state that must agree with the loader.
        state: a checked state.
        samples: number of samples in the epoch's order; None if unknown.
    """
    saved, size = state["batch_size"], expected["batch_size"]
    differing = [name for name, value in expected.items() if state[name] != value]
    if differing != ["batch_size"] or saved is None or size is None or saved <= 0:
        return state
    if samples is None or not _is_computed(state):
        return state
    delivered = state["step"] * saved
    if state["finished"]:
        step = 0  # the next epoch begins at its first sample
    elif delivered - saved < samples <= delivered:
        step = -(-samples // size)  # the epoch's last batch, which need not be full, was delivered
    # A batch of this loader begins at the first sample that was not delivered.
    elif delivered < samples and delivered % size == 0:
        step = delivered // size
    else:
        return state
    return {**state, "step": step, "batch_size": size}


def explain_batch_change(state: dict[str, Any], size: int, ranks: int) -> str:
    """Return the error's text for a state whose global batch is not the loader's, with the settings that would fit.

    Args:
        state: a checked state with a batch size.
        size: the loader's global batch.
        ranks: the number of ranks that share the loader's batches.
    """
    saved, before = state["batch_size"], state["world_size"]
    if ranks == 1 and before in (None, 1):
        text = f"the state was saved with batch_size={saved}, but this loader has batch_size={size}; "
        text += f"use batch_size={saved}"
    else:
        had = "" if before is None or saved % before else f" ({_on_ranks(saved // before, before)})"
        text = (
            f"the state was saved with a global batch of {saved} samples{had}, but this loader's is {size} "
            f"({_on_ranks(size // ranks, ranks)}); "
        )
        text += (
            f"use {_on_ranks(saved // ranks, ranks)}"
            if saved % ranks == 0
            else f"world_size={ranks} does not divide {saved}: resume with a number of ranks that does"
        )
    if _is_computed(state) and state["step"]:
        text += f", or a global batch that divides the {state['step'] * saved} samples that were delivered"
    return text


def _on_ranks(batch_size: int, ranks: int) -> str:
    return f"batch_size={batch_size} on {ranks} rank{'' if ranks == 1 else 's'}"


def _is_computed(state: dict[str, Any]) -> bool:
    """Whether the position is a number of samples alone: neither the sampler, nor a generator that it draws from, nor
    the dataset has a state, and batches were delivered in order.
    """
    return (
        (state["mode"], state["kind"]) == ("seeded", "map")
        and state["order"] in ("sequential", "shuffled")
        and not state["beyond"]
        and all(state[name] is None for name in ("sampler", "generators", "workers"))
    )
