"""The CUDA driver: `aiocuda.driver.protocol.Driver` over libcuda.

``src/aiocuda/driver/README.md`` lists the modules.

Every call of the NVIDIA driver goes to an address from ``cuGetProcAddress``, through `ctypes`. Each function has two
forms for the same address: one keeps the GIL, the other releases it. With one busy Python thread, releasing costs
4-5 ms, the time to get the GIL back. Keeping it costs 0.3-1 µs, and is safe for calls that cannot wait.
``AIOCUDA_GIL=keep`` (the default) or ``release`` selects the form of those calls. Calls that may block, and calls that
name another library's stream, always release the GIL. A process that runs *Python* host functions must use
``release``: such a function waits for the GIL on a thread that holds a lock of the NVIDIA driver.

cuda.core is not used to create and close objects. Its objects leave their context current on the calling thread, its
calls always release the GIL, and its errors would need a second translation, a second latch and a second protection
against ``fork()``.

Importing this package does not load libcuda. The first use of a device does.
"""

from __future__ import annotations

from ._cache import CacheState, ProgramCache
from ._compiler import compile_cuda
from ._driver import CudaDriver
from ._library import MINIMUM_VERSION, MOST_QUEUES, QUEUES, queues_for, version_text
from ._probe import find

__all__ = [
    "MINIMUM_VERSION",
    "MOST_QUEUES",
    "QUEUES",
    "CacheState",
    "CudaDriver",
    "ProgramCache",
    "compile_cuda",
    "find",
    "queues_for",
    "version_text",
]
