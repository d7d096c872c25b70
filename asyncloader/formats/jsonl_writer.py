r"""Writes JSON lines. Pure.

Data path: samples -> [jsonl_writer] -> parts -> shard.

One object a line, UTF-8, lines end with ``\n``. `jsonl` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncloader.formats.encoder import RESERVED, BadSample, RecordEncoder, dump_json


class JsonlEncoder(RecordEncoder):
    """Encodes each sample as a line: what `json.dumps` takes, without NaN and infinity, which are no JSON, and without
    keys that are the same in JSON.
    """

    def encode_sample(self, sample: Mapping[str, Any]) -> list[bytes | memoryview]:
        """Return a sample's line, like `RecordEncoder.encode_sample`."""
        fields = {name: value for name, value in sample.items() if name not in RESERVED}
        try:
            text = dump_json(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            field = next((name for name, value in fields.items() if not _is_json(value)), None)
            which = "it" if field is None else f"its field {field!r}"
            raise BadSample(f"{which} cannot be JSON: {error}") from None
        try:
            return [text.encode() + b"\n"]
        except UnicodeEncodeError:  # half a character, which JSON can hold escaped
            return [json.dumps(fields, separators=(",", ":")).encode() + b"\n"]


def _is_json(value: Any) -> bool:
    try:
        dump_json(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
