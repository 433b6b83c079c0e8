"""Imported: the lanes of streams that somebody else made, or knows by CUDA's own handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..completion.lane import Lane
from ..completion.shared import SharedLane
from ..errors import InvalidTypeError, WrongLoopError
from . import closing

if TYPE_CHECKING:
    from ..device import Device
    from ..site import Site

__all__ = ["handle_of", "import_lane", "lane_of"]


def handle_of(thing: object) -> int:
    """The handle that an integer is, or that an object with ``__cuda_stream__`` has."""
    told = getattr(thing, "__cuda_stream__", None)
    if told is not None:
        answer = told() if callable(told) else told  # a property, in what was written before the protocol was
        if not (isinstance(answer, tuple) and len(answer) == 2 and answer[0] == 0):
            raise InvalidTypeError(f"__cuda_stream__ of {thing!r} is (0, handle) in the version known here: {answer!r}")
        thing = answer[1]
    if isinstance(thing, bool) or not isinstance(thing, int):
        raise InvalidTypeError(
            f"a stream's handle is an integer, or an object with __cuda_stream__ has it, not {thing!r}; PyTorch's is "
            "torch_stream.cuda_stream, CuPy's cupy_stream.ptr"
        )
    return thing


def import_lane(device: Device, site: Site, handle: int) -> Lane:
    """A lane of its own for somebody's stream. It goes once nobody holds its face and nothing is unfinished."""
    closing.forget_dropped(device, site)
    device.driver.stream_import(device.index, handle)
    lane = SharedLane(site.reactor, handle, f"imported-{handle:#x}", imported=True)
    site.lanes[lane] = None
    return lane


def lane_of(device: Device, handle: int) -> Lane:
    """The lane of a stream that others name by CUDA's handle: ours if we made it, else one that is imported.

    Raises
    ------
    WrongLoopError
        It is a stream of ours, of another loop.
    """
    here = device._sites.here()
    has_handle = device.driver.stream_has_handle
    for site in device._sites:
        for lane in tuple(site.lanes):
            if lane.ended or (lane.imported and site is not here):
                continue
            if not (lane.imported or device.asynchronous):
                continue  # the default stream is nobody's: it is imported
            if lane.handle == handle if lane.imported else has_handle(lane.handle, handle):
                if site is not here:
                    raise WrongLoopError(f"{lane.name} belongs to another event loop: name a stream of this one")
                return lane
    return import_lane(device, here, handle)
