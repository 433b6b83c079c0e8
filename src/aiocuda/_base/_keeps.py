"""keeps: properties that are never assigned, with the cure."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

__all__ = ["keeps"]

C = TypeVar("C", bound=type[Any])


def keeps(**cures: str) -> Callable[[C], C]:
    """Return a class decorator: assigning to one of these properties raises an AttributeError with the cure.

    Each property returns the attribute with an underscore before its name. It is read without a call in Python.
    """

    def decorate(cls: C) -> C:
        for name, cure in cures.items():
            refuse = functools.partial(_refuse_value, name, cure)
            setattr(cls, name, property(operator.attrgetter(f"_{name}"), refuse, doc=vars(cls)[name].__doc__))
        return cls

    return decorate


def _refuse_value(name: str, cure: str, thing: object, value: object) -> NoReturn:
    raise AttributeError(f"{thing!r} keeps its {name}: {cure}", name=name, obj=thing)
