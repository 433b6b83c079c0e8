"""Trace: spans of time in the format of Chrome's tracing, which Perfetto opens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from ._picture import Span

__all__ = ["trace"]


def trace(spans: Sequence[Span], title: str) -> str:
    """JSON, a thread for each stream; ``ts`` and ``dur`` are microseconds.

    What a thread does must nest. A stream's operations follow each other, but for the half microsecond that a timing
    event resolves: so none lasts beyond the next one's begin.
    """
    rows = {name: number for number, name in enumerate(dict.fromkeys(span.stream for span in spans), 1)}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    for name, row in rows.items():
        events.append({"ph": "M", "pid": 1, "tid": row, "name": "thread_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": 1, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}})
        own = sorted((span for span in spans if span.stream == name), key=lambda span: (span.start_us, span.end_us))
        for span, after in itertools.zip_longest(own, own[1:]):
            end = span.end_us if after is None else min(span.end_us, after.start_us)
            event = {"ph": "X", "pid": 1, "tid": row, "name": span.kernel or span.kind, "cat": span.kind}
            events.append({**event, "ts": span.start_us, "dur": end - span.start_us})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
