"""Asking: a pass of queries that disturbs nobody's capture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ..errors import AiocudaError, DeviceFault

if TYPE_CHECKING:
    from ._reactor import Reactor

__all__ = ["QueryGuard"]


class QueryGuard:
    """Around a pass of queries, where somebody else's capture is possible: they must not disturb it."""

    __slots__ = ("_device_state", "_inner", "_reactor", "now")

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._device_state = reactor.device_state
        self._inner = 0
        self.now = False  # between begin and end

    def __enter__(self) -> Self:
        if self._device_state.guarded and not self.now:
            try:
                self._device_state.driver.begin_queries()
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
            self._device_state.driver.end_queries()
