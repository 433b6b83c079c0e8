"""Work with the record of an event after it, as one call."""

from __future__ import annotations

from collections.abc import Sequence

from ..._base._types import Dim3
from ..protocol import RecordedCall, record_after
from ._graphs import Graphs
from ._streams import Streams

__all__ = ["Recorded"]


class Recorded(Streams, Graphs):
    """The methods of `aiocuda.driver.protocol` that bind work with the record of an event after it."""

    def recorded_launch(self, stream: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int) -> RecordedCall:
        """Bind a launch with the record of an event after it."""
        return record_after(self.launcher(stream, function, grid, block, shared_bytes), self.recorder(stream))

    def recorded_upload(self, stream: int, target: int, source: int, nbytes: int) -> RecordedCall:
        """Bind an `upload` with the record of an event after it."""
        return record_after(lambda _: self.upload(stream, target, source, nbytes), self.recorder(stream))

    def recorded_download(self, stream: int, target: int, source: int, nbytes: int) -> RecordedCall:
        """Bind a `download` with the record of an event after it."""
        return record_after(lambda _: self.download(stream, target, source, nbytes), self.recorder(stream))

    def recorded_wait(self, stream: int) -> RecordedCall:
        """Bind waits for several events with the record of an event after them."""

        def wait(events: Sequence[int]) -> None:
            for event in events:
                self.stream_wait(stream, event)

        return record_after(wait, self.recorder(stream))
