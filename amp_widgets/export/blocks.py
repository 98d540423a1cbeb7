"""Data within a page: JSON that no browser runs, packed where it is long."""

from __future__ import annotations

import base64
import gzip
import html.parser
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.errors import ExportError

MOST_PLAIN = 200_000
"""Characters of JSON that are written as they are; what is longer is packed by gzip."""
_MOST_BYTES = 1 << 28


def block(name: str, value: Any) -> str:
    """A script element of data, by its id; `read_block` and ``readBlock`` in page.js read it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    if len(text) <= MOST_PLAIN:
        for character in "<>&":  # none can end the element
            text = text.replace(character, f"\\u{ord(character):04x}")
        return f'<script type="application/json" id="{name}">{text}</script>'
    packed = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    return f'<script type="application/json" id="{name}" data-packed="gzip, base64">{packed}</script>'


def read_block(page: str, name: str) -> Any:
    """What is in a block of a page.

    Raises
    ------
    ExportError
        When the page has no such block.
    """
    found = _Block(name)
    found.feed(page)
    if found.text is None:
        raise ExportError(f"there is no block {name!r} in this page, expected one that was exported by amp_widgets")
    return json.loads(gzip.decompress(base64.b64decode(found.text)) if found.packed else found.text)


def packed_array(values: npt.NDArray[Any]) -> dict[str, str]:
    """An array as plotly.js reads it, too: in the smallest type that has every value exactly, as base64, little-endian."""
    small = _smallest(np.asarray(values))
    kind = {"i": "i", "u": "u", "f": "f"}[small.dtype.kind] + str(small.dtype.itemsize)
    little = small.astype(small.dtype.newbyteorder("<"), copy=False)
    return {"dtype": kind, "bdata": base64.b64encode(np.ascontiguousarray(little).tobytes()).decode()}


def unpacked_array(packed: dict[str, str]) -> npt.NDArray[np.float64]:
    """The numbers in it."""
    return np.frombuffer(base64.b64decode(packed["bdata"]), dtype=f"<{packed['dtype']}").astype(np.float64)


def with_small_arrays(value: Any) -> Any:
    """The same JSON of a figure, its arrays in the smallest types."""
    if isinstance(value, dict):
        if value.keys() == {"dtype", "bdata"}:
            return packed_array(np.frombuffer(base64.b64decode(value["bdata"]), dtype=f"<{value['dtype']}"))
        return {key: with_small_arrays(one) for key, one in value.items()}
    return [with_small_arrays(one) for one in value] if isinstance(value, list) else value


def _smallest(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    numbers = values.astype(np.float64)
    if numbers.size and np.isfinite(numbers).all() and not (np.signbit(numbers) & (numbers == 0)).any():
        low, high = numbers.min(), numbers.max()
        for kind in ("u1", "i1", "u2", "i2", "u4", "i4"):
            limits = np.iinfo(kind)
            if limits.min <= low and high <= limits.max:
                whole = numbers.astype(kind)
                if np.array_equal(whole, numbers):
                    return whole
                break
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        single = numbers.astype(np.float32)
    if np.array_equal(single.astype(np.float64), numbers, equal_nan=True):
        return single
    return numbers


class _Block(html.parser.HTMLParser):
    def __init__(self, name: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text: str | None = None
        self.packed = False
        self._name = name
        self._inside = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        known = dict(attributes)
        self._inside = tag == "script" and known.get("id") == self._name
        if self._inside:
            self.text, self.packed = "", "data-packed" in known

    def handle_data(self, data: str) -> None:
        if self._inside and self.text is not None:
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = False
