"""The leaves of nested containers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

__all__ = ["leaves"]

T = TypeVar("T")


def leaves(value: Any, kind: type[T]) -> Iterator[T]:
    """Yield the objects of one type in nested mappings, lists, tuples, sets and dataclasses, in any order.

    An object is visited once, so that containers may contain themselves.
    """
    if isinstance(value, kind):
        yield value
        return
    seen: set[int] = set()
    found = [value]
    while found:
        value = found.pop()
        if isinstance(value, kind):
            yield value
            continue
        if isinstance(value, Mapping):
            parts: Any = value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        else:
            continue
        if id(value) not in seen:
            seen.add(id(value))
            found.extend(parts)
