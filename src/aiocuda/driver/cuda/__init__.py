"""The CUDA driver: `aiocuda.driver.protocol.Driver` over libcuda.

================  ====================================================================================
``abi``           the structures and constants of ``cuda.h`` that are used here
``entry``         the functions that are used: versions, argument types, and the two ways to call them
``library``       libcuda loaded and initialised; hardware queues
``probe``         why there is no CUDA here, or None
``errors``        every ``CUresult`` → an error class
``core``          what the verbs share: tables, handles, contexts, the fault latch, fork
``devices`` …     the verbs by noun: ``devices``, ``streams``, ``memory``, ``code``, ``notify``
``notifier``          a native wake-up from a stream to an event loop
``driver``        `CudaDriver`, all of them together
================  ====================================================================================

Every driver call is a direct entry point: an address from ``cuGetProcAddress``, called through `ctypes`. Each has
two forms over the same address, one that keeps the GIL and one that releases it. Releasing costs 4-5 ms beside one busy
Python thread, because that is what it takes to get the GIL back; keeping it costs 0.3-1 µs, and is safe for calls
that cannot wait. ``AIOCUDA_GIL=keep`` (the default) or ``release`` chooses the form for those calls. What may block,
and whatever names a stream that somebody else made, always releases. A process in which anybody runs *Python* host
functions must use ``release``: such a function waits for the GIL on a thread that holds the driver's lock.

cuda.core is not used to make and close things, although it could be. Its objects leave their context current on the
calling thread, its calls release the GIL whatever is chosen here, and its errors would need a second translation,
a second latch and a second guard against ``fork()``. One path for every call keeps these promises in one place.

Importing this package loads nothing: libcuda is loaded when the first device is asked for.
"""

from __future__ import annotations

from ._driver import CudaDriver
from ._probe import find

__all__ = ["CudaDriver", "find"]
