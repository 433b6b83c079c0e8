"""NCCL by nccl4py: the communicators of all GPUs in one process, and their end awaited in a thread, as for PyTorch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import nccl.core as nccl
import torch


class Nccl4py:
    def __init__(self, devices: int = 2) -> None:
        self._communicators = nccl.Communicator.init_all(devices)
        self._streams = [torch.cuda.Stream(device) for device in range(devices)]

    def all_reduce(self, nbytes: int) -> Callable[[], Awaitable[object]]:
        """Return a function that starts an all-reduce of float32 in place, and returns what to await."""
        tensors = [torch.ones(nbytes // 4, device=stream.device) for stream in self._streams]
        for stream in self._streams:
            torch.cuda.synchronize(stream.device)

        def reduce() -> Awaitable[object]:
            with nccl.group():
                for communicator, tensor, stream in zip(self._communicators, tensors, self._streams, strict=True):
                    communicator.allreduce(tensor, tensor, nccl.SUM, stream=stream.cuda_stream)
            return asyncio.to_thread(self._synchronize)

        return reduce

    def _synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()


def start() -> Nccl4py:
    return Nccl4py()
