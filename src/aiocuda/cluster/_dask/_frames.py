"""The form of a packet in which Dask sends its buffers without copies."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from ..._processes._messages import PROTOCOL
from .._messages import Packet

__all__ = ["Frames", "frames_of", "packet_of"]

#: The pickled message, and the bytes of its large buffers. Not a `Packet` or a `pickle.PickleBuffer`: a scheduler and
#: its workers agree on protocol 4 of pickle, which has no buffers. A memory view needs no pickle.
Frames = Sequence[bytes | memoryview]


def frames_of(packet: Packet) -> Frames:
    """Return a packet as frames."""
    views = (view if isinstance(view, memoryview) else view.raw() for view in packet.buffers)
    return [pickle.dumps(packet.message, PROTOCOL), *views]


def packet_of(frames: Frames) -> Packet:
    """Return the packet of frames. Its buffers are those of the frames."""
    message, *buffers = frames
    return Packet(pickle.loads(message), [memoryview(buffer) for buffer in buffers])
