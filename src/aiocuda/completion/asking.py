"""Asking: a pass of queries that disturbs nobody's capture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ..errors import AiocudaError, DeviceFault

if TYPE_CHECKING:
    from .reactor import Reactor

__all__ = ["Asking"]


class Asking:
    """Around a pass of queries, where somebody else's capture is possible: they must not disturb it."""

    __slots__ = ("_hub", "_inner", "_reactor", "now")

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._hub = reactor.hub
        self._inner = 0
        self.now = False  # between begin and end

    def __enter__(self) -> Self:
        if self._hub.guarded and not self.now:
            try:
                self._hub.driver.begin_queries()
                self.now = True
            except DeviceFault:
                pass  # latched: the first query of the pass tells
            except AiocudaError as error:
                self._reactor.complain(error)  # then this pass asks nothing
        self._inner += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self._inner -= 1
        if self.now and not self._inner:
            self.now = False
            self._hub.driver.end_queries()
