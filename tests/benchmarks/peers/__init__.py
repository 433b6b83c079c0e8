"""The peers, and the bare driver.

A peer does what its own documentation recommends for "notify my coroutine when this is done". Every peer runs in its
own process, with the environment that its users have, and without aiocuda.

`raw` and `raw_host` are no peers but the baselines: the same work by hand on NVIDIA's bindings, in the process of the
row, so that both are measured alternately.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Awaitable
from typing import Any, Protocol, cast


@dataclasses.dataclass(frozen=True, slots=True)
class PeerInfo:
    """A peer, described without importing it."""

    name: str
    label: str
    requires: str  #: its package
    ours: bool = False  #: our own row, on that package's event loop


PEERS: dict[str, PeerInfo] = {
    info.name: info
    for info in (
        PeerInfo("cupy_host_function", "CuPy: launch_host_func and call_soon_threadsafe", "cupy"),
        PeerInfo("torch_to_thread", "PyTorch: asyncio.to_thread(event.synchronize)", "torch"),
        PeerInfo("cupy_pool", "CuPy: cupy.empty from its memory pool", "cupy"),
        PeerInfo("torch_allocator", "PyTorch: torch.empty from its caching allocator", "torch"),
        PeerInfo("nccl4py", "NCCL: nccl4py, one communicator for each GPU", "nccl"),
        PeerInfo("aiocuda_uvloop", "aiocuda on uvloop", "uvloop", ours=True),
    )
}


class Peer(Protocol):
    """What a peer must be able to do for the rows in `peers.rows`. Zero seconds mean its smallest kernel."""

    def stream(self) -> Any: ...

    def launch(self, stream: Any, seconds: float) -> None:
        """Enqueue a kernel without any notification of its end."""

    def submit(self, stream: Any, seconds: float) -> Awaitable[object]:
        """Enqueue a kernel; what is returned is done when the kernel is."""

    def own_time(self, seconds: float) -> float:
        """Seconds that such a kernel takes on the device, by timing events."""


def missing(info: PeerInfo, gpu: bool) -> str | None:
    """Why this peer cannot run here, or None."""
    if importlib.util.find_spec(info.requires) is None:
        return f"{info.requires} is not installed"
    if not (gpu or info.ours):
        return "no GPU"
    return None


def make(info: PeerInfo) -> Peer:
    """Import the peer's library and start it."""
    module = importlib.import_module(f".{info.name}", __package__)
    return cast(Peer, module.start())
