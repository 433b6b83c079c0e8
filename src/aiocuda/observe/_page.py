"""Timelines as one HTML page. `_page.html` is its template."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import re
from collections.abc import Sequence
from typing import Any, Final

from ._drawing import COLOURS, OTHER, legend_of
from ._recording import Recording, kept
from ._rows import Rows, rows_of

__all__ = ["page_of"]

#: Characters that could end a script element, or a line of JavaScript. JSON has an escape for each.
_ESCAPES: Final = {ord(each): f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}

#: The kinds of arrows by their number in the page.
_ARROWS: Final = ("wait", "await", "batch")

#: The colours of all kinds: of operations, of the host and of requests.
_COLOURS: Final = {
    **COLOURS, "iteration": "#7a8794", "blocked": "#d0453e", "await": "#3f7fc4", "worker": "#8a6fb0",
    "driver call": "#a04a7d", "batch": "#2f7f9e", "queued": "#d9bb4e", "answered": "#4a9e8e", "failed": "#b02a5b",
    "expired": "#a8521c", "cancelled": "#8d8798",
}  # fmt: skip

_PLACES: Final = re.compile("@(TITLE|POLICY|DATA)@")


def page_of(recordings: Sequence[Recording], title: str) -> str:
    """Return a page that shows recordings. It needs no other file.

    All texts of the program are in a block of JSON, and the page puts them into the document as text. Its policy allows
    only its own script and style.
    """
    template = importlib.resources.files(__package__).joinpath("_page.html").read_text(encoding="utf-8")
    (script,) = re.findall("<script>(.*?)</script>", template, re.DOTALL)
    (style,) = re.findall("<style>(.*?)</style>", template, re.DOTALL)
    values = {
        "TITLE": html.escape(kept(title)),
        "POLICY": f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'",
        "DATA": json.dumps(_data(rows_of(recordings), kept(title)), separators=(",", ":")).translate(_ESCAPES),
    }
    return _PLACES.sub(lambda place: values[place.group(1)], template)


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _data(rows: Rows, title: str) -> dict[str, Any]:
    """Return the data of the page. Each text is there once, and the slices have its number."""
    texts: dict[str, int] = {}

    def number(text: str | None) -> int:
        return -1 if text is None else texts.setdefault(kept(text), len(texts))

    slices = [
        [
            number(each.kind), number(each.name), number(each.label), each.start_us, each.duration_us,
            each.operation, each.nbytes, *(number(str(text)) for detail in each.details for text in detail),
        ]
        for each in rows.slices
    ]  # fmt: skip
    return {
        "title": title,
        "accuracy_us": round(max((each.accuracy_us for each in rows.recordings), default=0.0), 3),
        "devices": [kept(each.device) for each in rows.recordings],
        "rows": [[number(row.name), row.recording, row.part, row.first, row.last, row.lane] for row in rows.rows],
        "slices": slices,
        "arrows": [[_ARROWS.index(each.kind), each.source, each.target] for each in rows.arrows],
        "colours": _COLOURS,
        "other": OTHER,
        "legend": [(kept(name), colour) for name, colour in legend_of({each.kind for each in rows.slices}, _COLOURS)],
        "texts": list(texts),
    }
