"""Verbs about graphs, on the virtual time."""

from __future__ import annotations

from .. import software
from ..software._replay import Part
from ..software._work import touched
from ..software.rules import Command, Stream
from ._core import SimulatedCore

__all__ = ["Graphs"]


class Graphs(software.Graphs, SimulatedCore):
    """`aiocuda.driver.software.Graphs`, each branch of a launch at a pace of its own.

    A launch's nodes use memory in the order of the stream that it was given to.
    """

    def _submit_part(self, on: Stream, part: Part, stream: Stream, branch: int) -> Command:
        if part.work is not None:
            number = self.order.submit(on.handle)
            for address in touched(part.work):
                wrong = self.order.use(address, on.handle, number)
                if wrong is not None:
                    self.violations.append(f"V11: {wrong}")
            self._lengths_of = -branch or on.handle  # no stream's handle is below 0
        self._note(f"submit {part.kind} in {on.handle}, branch {branch}")
        return super()._submit_part(on, part, stream, branch)
