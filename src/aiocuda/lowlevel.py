"""Low-level names: with public names, the only way from pools, pipelines, loaders and integrations into the core.

``aiocuda`` itself has what programs need. This module has what the packages above the core need beside it, and what
authors of integrations may use: docs/reference/lowlevel.md describes each name. Everything else below this module can
change, or be replaced, without notice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from ._core import CLOSED, Chain, State, StreamOperation
from ._core import Ring as Queue
from ._core._form import form as form_of_core
from .completion._foreign_work import handle_of
from .completion._jobs import Jobs
from .completion._progress import StreamLoad, check_awaited, enqueue_mark, when_accepted, when_passed
from .device._event import record_event
from .device._open import has_gpu
from .device._open_devices import OPEN_DEVICES
from .device._resources import DeviceResources, resources_of
from .device.streams._foreign_streams import ForeignStreams
from .device.streams._hook import StreamHook
from .device.streams._joins import follow, join, prepare_join, wait_for
from .device.streams._steps import end_step, flushed
from .device.streams._stream import Stream, StreamView, launch_converted, open_stream, owned, submit_call
from .device.streams._submissions import check_submittable
from .memory._accesses import Accesses
from .memory._block import Block
from .memory._buffer import block_of
from .memory._pinned import pinned_block_of
from .memory.interchange._bounds import bounds_on_device
from .memory.interchange._host_arrays import as_source, as_target

__all__ = [
    "CLOSED", "OPEN_DEVICES", "Accesses", "Block", "Chain", "DeviceResources", "ForeignStreams", "Jobs", "Queue",
    "State", "StreamHook", "StreamLoad", "StreamOperation", "StreamView", "as_source", "as_target", "block_of",
    "bounds_on_device", "check_awaited", "check_submittable", "end_step", "enqueue_mark", "flushed",
    "follow", "form_of_core", "handle_of", "has_gpu", "join", "launch_converted", "open_stream", "owned",
    "pinned_block_of", "prepare_join", "queue_of", "record_event", "resources_of", "submit_call",
    "wait_for", "when_accepted", "when_passed",
]  # fmt: skip

#: Returns the queue of a stream. A call from C: hot functions begin with it.
queue_of: Callable[[Stream], Queue] = operator.attrgetter("_queue")
