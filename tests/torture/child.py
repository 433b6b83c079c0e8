"""One phase of the torture, in a process that may hang: its parent watches from outside, and ends it.

``python -m tests.torture.child --others holders --seconds 60 --progress FILE``. FILE holds two 64-bit words: how many
awaits there were, and whether it is over.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import json
import mmap
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import aiocuda
from aiocuda import Device, Kernel
from aiocuda.driver.protocol import CudaSource
from aiocuda.testing._kernels import SPIN
from tests.torture.others import Cuda, Nobody, Others

STREAMS, EACH = 8, 16

#: Who else is in the process. "control" is what the library's documentation warns of.
OTHERS = ("holders", "functions", "control")

PROGRESS = struct.Struct("=QQ")


class Torture:
    """Our own part: awaits, first launches, and garbage that finalisers give back."""

    def __init__(self, device: Device, until: float, progress: mmap.mmap) -> None:
        self.device = device
        self.until = until
        self.progress = progress
        self.awaits = self.loads = self.dropped = self.collections = 0
        self.spin = Kernel(SPIN.name, source=SPIN.source, host=SPIN.host)

    def count(self) -> None:
        self.awaits += 1
        PROGRESS.pack_into(self.progress, 0, self.awaits, 0)

    @property
    def on(self) -> bool:
        return time.monotonic() < self.until

    async def work(self) -> None:
        """Kernels and copies, each awaited."""
        array = np.ones(256, np.float32)
        async with self.device.stream() as stream:
            buffer = await stream.upload(array)
            while self.on:
                operations: list[Any] = [stream.launch(self.spin, 1, 1, 2000) for _ in range(EACH)]
                operations += [stream.copy(buffer, array), stream.download(buffer)]
                for operation in operations:
                    await operation
                    self.count()

    async def load(self) -> None:
        """Kernels that nobody has launched before."""
        async with self.device.stream() as stream:
            while self.on:
                fresh = Kernel(SPIN.name, source=SPIN.source, host=SPIN.host)
                await stream.launch(fresh, 1, 1, 1000)
                self.loads += 1
                self.count()
                await asyncio.sleep(0.1)

    async def drop(self) -> None:
        """Buffers and operations in circles, which only the garbage collector finds."""
        async with self.device.stream() as stream:
            while self.on:
                circle: list[Any] = [stream.empty(100), self.device.pinned(100)]
                circle += [circle, stream.fill(circle[0], 1)]
                self.dropped += 1
                if self.dropped % 16 == 0:
                    await circle[-1]
                    self.count()
                del circle

    def collect(self) -> None:
        """On a thread of its own: finalisers run there."""
        while self.on:
            gc.collect()
            self.collections += 1
            time.sleep(0.05)  # noqa: TID251 - the pace of the collector


def others_of(device: Device, which: str) -> tuple[Others, list[Cuda | Nobody]]:
    """Threads of other libraries."""
    others = Others()
    keeps_gil = which != "functions"
    if device.driver.name != "cuda":
        nobody = Nobody(keeps_gil=keeps_gil)
        others.start(nobody, nobody.synchronize if which == "control" else nobody.work, 0.0005)
        return others, [nobody]
    image, symbol = device.driver.compile(0, CudaSource(SPIN.name, SPIN.source))
    libraries = [Cuda(image, symbol, keeps_gil=keeps_gil) for _ in range(2)]
    for library in libraries:
        if which == "holders":
            others.start(library, library.work, 0.0005)
            others.start(library, library.allocate, 0.02)
            others.start(library, library.load, 0.2)
        elif which == "functions":
            others.start(library, library.host_function, 0.001)
            others.start(library, library.synchronize, 0.01)
        else:
            others.start(library, library.host_function, 0)
    return others, list(libraries)


async def torture(driver: Any, which: str, seconds: float, progress: mmap.mmap) -> dict[str, Any]:
    """What it came to, if it comes to an end."""
    async with aiocuda.open_device(driver=driver) as device:
        await device.load(Kernel(SPIN.name, source=SPIN.source, host=SPIN.host))  # the others load what it has compiled
        if which == "control":  # which may stop before our first await
            PROGRESS.pack_into(progress, 0, 1, 0)
        others, libraries = await device.offload(others_of, device, which)
        began = time.monotonic()
        ours = Torture(device, began + seconds, progress)
        collector = threading.Thread(target=ours.collect, daemon=True)
        collector.start()
        async with asyncio.TaskGroup() as group:
            for _ in range(STREAMS):
                group.create_task(ours.work())
            group.create_task(ours.load())
            group.create_task(ours.drop())
        took = time.monotonic() - began
        await asyncio.to_thread(collector.join)
        await asyncio.to_thread(others.end)
        statistics = device.statistics()
    return {
        "seconds": round(took, 1),
        "awaits": ours.awaits,
        "awaits_per_second": round(ours.awaits / took),
        "first_launches": ours.loads,
        "dropped_in_circles": ours.dropped,
        "collections": ours.collections,
        "steps_of_others": others.steps,
        "errors_of_others": others.errors,
        "host_functions_of_others": sum(library.called for library in libraries),
        "lost_wakes": statistics.lost_wakes,
        "parks": statistics.parks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--others", choices=OTHERS, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--progress", type=Path, required=True)
    arguments = parser.parse_args()
    faulthandler.enable()
    sys.setswitchinterval(1e-4)  # a call that lets go of the GIL gets it back sooner, and there are more of them
    with arguments.progress.open("r+b") as file, mmap.mmap(file.fileno(), PROGRESS.size) as progress:
        told = asyncio.run(torture(arguments.driver, arguments.others, arguments.seconds, progress))
        PROGRESS.pack_into(progress, 0, told["awaits"], 1)
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
