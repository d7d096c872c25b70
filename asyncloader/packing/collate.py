"""`PackSequences`: makes a batch of packed rows. Also cuts and joins the fields of sequences, for the other modules.

Data path: worker: dataset -> [collate] -> codec -> ring.

A sequence is an array of tokens, or a mapping of fields: arrays with an element for each token, and anything else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Array: TypeAlias = torch.Tensor | npt.NDArray[Any]

TOKENS = "tokens"
"""The field's name if a sequence is not a mapping."""


def per_token(value: Any) -> Array | None:
    """Return a field's values as an array with an element for each token; None if it is something else.

    Tensors and arrays with an axis, and lists and tuples of numbers, have an element for each token.
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        return value if value.ndim else None
    if isinstance(value, list | tuple):
        try:
            array = np.asarray(value) if len(value) else np.zeros(0, np.int64)
        except ValueError:  # a list of lists of different lengths
            return None
        return array if array.dtype.kind in "biuf" and array.ndim else None
    return None


def token_fields(sequence: Any) -> dict[str, Array]:
    """Return the fields of a sequence that have an element for each token, by name.

    Raises:
        TypeError: it has no such field.
        ValueError: two of them have different numbers of elements.
    """
    named: Mapping[Any, Any] = sequence if isinstance(sequence, Mapping) else {TOKENS: sequence}
    fields = {name: array for name, value in named.items() if (array := per_token(value)) is not None}
    if not fields:
        raise TypeError(
            "a sequence should be a tensor, an array or a list of tokens, or a mapping with such fields, but it is "
            f"{type(sequence).__name__}: {sequence!r:.100}"
        )
    sizes = {name: len(array) for name, array in fields.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the fields of a sequence should have an element for each token, but they have {sizes}: leave out the "
            "fields that do not"
        )
    return fields


def cut(sequence: Any, start: int, stop: int) -> Any:
    """Return the tokens `start` to `stop` of a sequence: a sequence of the same kind.

    Raises:
        TypeError, ValueError: as `token_fields`; or the sequence has fewer than `stop` tokens.
    """
    fields = token_fields(sequence)
    size = len(next(iter(fields.values())))
    if stop > size:
        raise ValueError(f"the sequence has {size} tokens, but the plan has {stop} or more: give the lengths of now")
    parts = {name: array[start:stop] for name, array in fields.items()}
    return {**sequence, **parts} if isinstance(sequence, Mapping) else parts[TOKENS]


def join(arrays: Sequence[Array]) -> torch.Tensor:
    """Return the elements of one or more arrays, one behind the other, in memory of their own. Where types differ,
    torch's promotion of types decides. Tensors stay on their device.

    Raises:
        ValueError: torch does not join these types.
    """
    types = {array.dtype for array in arrays}
    if len(types) == 1 and all(isinstance(array, np.ndarray) for array in arrays):
        return torch.from_numpy(np.concatenate(arrays))
    tensors = [
        # A copy: torch warns of arrays that are read-only, and refuses those of the other byte order.
        torch.from_numpy(np.array(array, array.dtype.newbyteorder("="))) if isinstance(array, np.ndarray) else array
        for array in arrays
    ]
    kinds = sorted({str(tensor.dtype) for tensor in tensors})
    try:
        return torch.cat(tensors)
    except RuntimeError as error:
        if len(kinds) == 1:
            raise
        named = " and ".join(kinds)
        raise ValueError(f"values of the types {named} cannot be joined: give all sequences one type") from error


@cache
def holds(kind: torch.dtype, value: float) -> bool:
    """Return whether a type has a value; of floating point, whether it is in its range."""
    try:
        kept = torch.full((), value, dtype=kind, device="cpu").item()
    except (RuntimeError, OverflowError):
        return False
    return kind.is_floating_point or kind.is_complex or kept == value


_MADE = ("position_ids", "cu_seqlens", "max_seqlen")
_PADDING = {"labels": -100}
_CPU = torch.device("cpu")


class Sequences(list[Any]):
    """The sequences of a row."""


class PackSequences:
    """A `collate_fn` that joins the sequences of a batch of rows, as attention over variable lengths takes them.

    A row is a list of sequences. A sequence is a tensor, an array or a list of tokens; or a mapping of such fields
    (`tokens`, `labels`, a mask of the loss), each with an element for each token along its first axis. Types stay:
    ``uint16`` gives ``torch.uint16``. Where types meet, torch's promotion decides. Other fields of a mapping (a name, a
    number) become a list with the value of each sequence. Sequences without tokens are left out.

    A batch is a dictionary of

    - the fields, joined: tensors of shape ``(tokens, ...)``, with `pad_to` ``(rows, pad_to, ...)``. The field is
      ``"tokens"`` if sequences are not mappings;
    - ``position_ids``: int64, ``(tokens,)`` or ``(rows, pad_to)``: 0, 1, 2, ... for each sequence;
    - ``cu_seqlens``: int32, ``(sequences + 1,)``: 0, and the end of each sequence, counted over all rows;
    - ``max_seqlen``: int, tokens of the longest sequence.

    Args:
        pad_to: pad rows to this number of tokens. A row's padding counts as one more sequence in `position_ids`,
            `cu_seqlens` and `max_seqlen`, so that attention is defined everywhere. Default: no padding, and the rows of
            a batch lie one behind the other.
        pad_values: value of the padding in each field. Default: -100 in ``"labels"``, 0 elsewhere. Unsigned labels that
            are padded with -100 become int64, whether or not their row is full.

    Raises:
        TypeError: a sequence has no field of tokens.
        ValueError: fields differ in length, or sequences in their fields; or a row has more than `pad_to` tokens, or
            the batch 2**31 or more. `pad_values` are given without `pad_to`, or for a field that sequences do not have
            for each token, or its type cannot hold the value. torch does not join the types that meet.
    """

    def __init__(self, *, pad_to: int | None = None, pad_values: Mapping[str, float] | None = None) -> None:
        if pad_to is not None and pad_to < 1:
            raise ValueError(f"pad_to should be positive, but got pad_to={pad_to}")
        if pad_values and pad_to is None:
            raise ValueError(f"pad_values={dict(pad_values)} needs pad_to, without which nothing is padded")
        self.pad_to = pad_to
        self.pad_values = {**_PADDING, **(pad_values or {})}
        self._named = {*(pad_values or ())}

    def __call__(self, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Return the batch of these rows, one or more; or of a single row, as ``batch_size=None`` gives it."""
        rows = [rows] if isinstance(rows, Sequences) else rows
        batch, lengths = join_fields(list(chain.from_iterable(rows)))
        row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        return self.arrange(batch, lengths, row_of, len(rows))

    def arrange(
        self, batch: dict[str, Any], lengths: npt.NDArray[np.int64], row_of: npt.NDArray[np.int64], rows: int
    ) -> dict[str, Any]:
        """Return the batch of joined sequences, of these lengths, in this number of rows. Pads the tensors in `batch`.

        Raises:
            ValueError: as the constructor says.
        """
        device = next((value.device for value in batch.values() if isinstance(value, torch.Tensor)), _CPU)
        if self.pad_to is None:
            return batch | layout(lengths, device)
        sizes = np.bincount(row_of, lengths, rows).astype(np.int64)
        if sizes.max() > self.pad_to:
            raise ValueError(
                f"row {np.argmax(sizes)} of the batch has {sizes.max()} tokens, which is more than pad_to={self.pad_to}"
            )
        ends = np.cumsum(np.bincount(row_of, minlength=rows))
        made = layout(np.insert(lengths, ends, self.pad_to - sizes), device)
        made["position_ids"] = made["position_ids"].reshape(rows, self.pad_to)
        fields = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        if unknown := self._named - fields.keys():
            raise ValueError(
                f"pad_values has {min(unknown)!r}, but the fields of the sequences that have an element for each token "
                f"are {sorted(fields)}"
            )
        for name, value in fields.items():
            kind, padding = value.dtype, self.pad_values.get(name, 0)
            if padding == _PADDING.get(name) and not kind.is_signed and kind != torch.uint64:
                kind = torch.int64
            if not holds(kind, padding):
                raise ValueError(
                    f"the padding of {name!r} is {padding!r}, which its type, {kind}, cannot hold: give another value "
                    "for it in pad_values, or make the field of another type"
                )
            padded = value.new_full((rows, self.pad_to, *value.shape[1:]), padding, dtype=kind)
            # Row by row: torch cannot index all of the types that it can copy.
            for row, part in zip(padded, value.split(sizes.tolist()), strict=True):
                row[: len(part)] = part
            batch[name] = padded
        return batch | made


def join_fields(sequences: Sequence[Any]) -> tuple[dict[str, Any], npt.NDArray[np.int64]]:
    """Return the joined fields of the sequences that have tokens (of the first, if none has), and lists of their other
    values; and the number of tokens of each sequence.

    Raises:
        TypeError: a sequence has no field of tokens.
        ValueError: fields differ in length; or the sequences do not have the same fields, or one that packing makes.
    """
    found = [token_fields(sequence) for sequence in sequences]
    lengths = np.array([len(next(iter(each.values()))) for each in found], np.int64)
    filled: list[int] = np.flatnonzero(lengths).tolist() or [0]
    sequences, fields = [sequences[number] for number in filled], [found[number] for number in filled]
    names, first = fields[0].keys(), _names(sequences[0])
    for number, (sequence, each) in enumerate(zip(sequences, fields, strict=True)):
        if each.keys() != names or _names(sequence) != first:
            raise ValueError(
                f"all sequences of a batch should have the same fields, but sequence {number} of it has "
                f"{described(_names(sequence), each)}, and the first {described(first, names)}: leave the others out, "
                "by decode= for example"
            )
    batch: dict[str, Any] = {}
    if isinstance(sequences[0], Mapping):
        made = set(_MADE) & sequences[0].keys()
        if made:
            raise ValueError(f"a sequence has the field {min(made)!r}, which packing makes: rename it, or leave it out")
        others = [name for name in sequences[0] if name not in names]
        batch = {name: [sequence[name] for sequence in sequences] for name in others}
    return batch | {name: join([each[name] for each in fields]) for name in names}, lengths


def described(names: Iterable[Any], per_token: Collection[Any]) -> list[str]:
    """Return the names of fields; with a note, if they have no element for each token."""
    return sorted(f"{name}" if name in per_token else f"{name} (one value)" for name in names)


def _names(sequence: Any) -> AbstractSet[Any]:
    return sequence.keys() if isinstance(sequence, Mapping) else {TOKENS}


def layout(lengths: npt.NDArray[np.int64], device: torch.device) -> dict[str, Any]:
    """Return `position_ids`, `cu_seqlens` and `max_seqlen` of sequences of these lengths, of which 0 count as none.

    Raises:
        ValueError: there are 2**31 tokens or more.
    """
    lengths = lengths[lengths > 0]
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    if ends[-1] >= 1 << 31:
        raise ValueError(f"a batch has {ends[-1]} tokens, but cu_seqlens is int32")
    return {
        "position_ids": torch.from_numpy(np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)).to(device),
        "cu_seqlens": torch.from_numpy(ends.astype(np.int32)).to(device),
        "max_seqlen": int(lengths.max(initial=0)),
    }
