"""`JoinSequences`: makes a window of sequences that are packed where a loader is iterated.

Data path: worker: dataset -> [windows] -> codec -> ring -> window_packer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asyncloader.packing.bin_packing import STRATEGIES, Strategy
from asyncloader.packing.collate import join_fields
from asyncloader.packing.fields import Array, cut, token_fields
from asyncloader.packing.sampler import OnTooLong, rule_of
from asyncloader.samplers.argument_checks import check_positive


class Window(NamedTuple):
    """Sequences that are packed together, joined.

    Attributes:
        fields: those with an element for each token, tensors that have the sequences one behind the other; and lists
            with a value of each sequence.
        lengths: tokens of each sequence, positive, int64.
        domains: of each sequence; None: all are of one.
        max_tokens, strategy: see `pack`.
    """

    fields: dict[str, Any]
    lengths: npt.NDArray[np.int64]
    domains: list[int | str] | None
    max_tokens: int
    strategy: Strategy


def is_consistent(window: Window) -> bool:
    """Return whether a window is as `JoinSequences` makes it. A service's node may have made it otherwise."""
    fields, lengths, domains, max_tokens, strategy = window
    if not isinstance(lengths, np.ndarray) or lengths.dtype != np.int64 or lengths.ndim != 1:
        return False
    count = len(lengths)
    if not isinstance(fields, dict) or type(max_tokens) is not int or max_tokens < 1 or strategy not in STRATEGIES:
        return False
    if domains is not None and not (
        isinstance(domains, list) and len(domains) == count and all(isinstance(each, int | str) for each in domains)
    ):
        return False
    # Python's integers: the sum of hostile lengths may not fit into 64 bits.
    total = sum(lengths.tolist())
    if count and (int(lengths.min()) < 1 or not any(isinstance(each, torch.Tensor) for each in fields.values())):
        return False
    return all(
        each.ndim > 0 and len(each) == total
        if isinstance(each, torch.Tensor)
        else type(each) is list and len(each) == count
        for each in fields.values()
    )


class JoinSequences:
    """A `collate_fn` for loaders whose batches `PackedLoader` packs: a batch is a window of sequences.

    Sequences are as `PackSequences` takes them. Those without tokens are left out.

    Args:
        max_tokens: most tokens of a row.
        strategy: as of `PackingSampler`. Default ``"best_fit"``.
        domain: a function from a sample to its domain, an integer or a string: a row has sequences of one domain only.
            Default: all are of one.
        on_too_long: for a sequence of more than `max_tokens` tokens, as of `PackingSampler`.

    Raises:
        TypeError: a sequence has no field of tokens; or a domain is no integer and no string.
        ValueError: an argument is out of range; a sequence is too long; or its fields differ in length, or from those
            of other sequences.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        strategy: Strategy = "best_fit",
        domain: Callable[[Any], int | str] | None = None,
        on_too_long: OnTooLong | None = None,
    ) -> None:
        self.max_tokens = check_positive("max_tokens", max_tokens)
        self.strategy: Strategy = strategy
        self.domain = domain
        self.on_too_long = rule_of(on_too_long, strategy)

    def __call__(self, samples: Sequence[Any]) -> Window:
        """Return the window of these samples, one or more."""
        kept: list[Any] = []
        fields: list[dict[str, Array]] = []
        lengths: list[int] = []
        for number, sample in enumerate(samples):
            own, sequence = token_fields(sample), sample
            length = len(next(iter(own.values())))
            if length > self.max_tokens and self.on_too_long != "split":
                if self.on_too_long == "error":
                    raise ValueError(_too_long(number, sample, own, length, self.max_tokens))
                length = 0 if self.on_too_long == "skip" else self.max_tokens
                sequence = cut(sample, 0, length)
                own = token_fields(sequence)
            if length:
                kept.append(sequence)
                fields.append(own)
                lengths.append(length)
        domains = None if self.domain is None else [_checked(self.domain(sequence)) for sequence in kept]
        joined = join_fields(kept, fields) if kept else {}
        return Window(joined, np.array(lengths, np.int64), domains, self.max_tokens, self.strategy)


def _too_long(number: int, sample: Any, fields: Mapping[str, Any], length: int, max_tokens: int) -> str:
    others = (
        {name: value for name, value in sample.items() if name not in fields} if isinstance(sample, Mapping) else {}
    )
    named = f" ({others!r:.200})" if others else ""
    return (
        f"sequence {number} of the batch{named} has {length} tokens, which is more than max_tokens={max_tokens}. Raise "
        'max_tokens, or choose on_too_long="truncate", "split" or "skip"'
    )


def _checked(domain: Any) -> int | str:
    if isinstance(domain, np.integer):
        return int(domain)
    if not isinstance(domain, int | str):
        raise TypeError(f"a domain should be an integer or a string, but got {domain!r:.100}")
    return domain
