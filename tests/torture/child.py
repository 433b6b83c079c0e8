"""One phase of the torture, in a process that may hang. The parent process watches it and kills it.

``python -m tests.torture.child --others holders --seconds 60 --progress FILE``. FILE holds two 64-bit words: the number
of awaits, and 1 at the end.
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
from aiocuda.testing.kernels import SPIN
from tests.torture.others import Cuda, NoCuda, Others

STREAMS, EACH = 8, 16

#: The other libraries. "control" is the use that the documentation warns of.
OTHERS = ("holders", "functions", "control")

PROGRESS = struct.Struct("=QQ")


class Torture:
    """The tasks of aiocuda: awaits, first launches, and garbage that finalisers free."""

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
        """Await kernels and copies."""
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
        """Load and launch new kernels."""
        async with self.device.stream() as stream:
            while self.on:
                fresh = Kernel(SPIN.name, source=SPIN.source, host=SPIN.host)
                await stream.launch(fresh, 1, 1, 1000)
                self.loads += 1
                self.count()
                await asyncio.sleep(0.1)

    async def drop(self) -> None:
        """Drop buffers and operations in reference cycles."""
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
        """Run the garbage collector, and so the finalisers, on another thread."""
        while self.on:
            gc.collect()
            self.collections += 1
            time.sleep(0.05)  # noqa: TID251 - the pace of the collector


def others_of(device: Device, which: str) -> tuple[Others, list[Cuda | NoCuda]]:
    """Start the threads of the other libraries."""
    others = Others()
    keeps_gil = which != "functions"
    if device.driver.name != "cuda":
        fake = NoCuda(keeps_gil=keeps_gil)
        others.start(fake, fake.synchronize if which == "control" else fake.work, 0.0005)
        return others, [fake]
    image, symbol, *_ = device.driver.compile(0, CudaSource(SPIN.name, SPIN.source))
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
    """Run all tasks and return the figures."""
    async with aiocuda.open_device(driver=driver) as device:
        await device.load(
            Kernel(SPIN.name, source=SPIN.source, host=SPIN.host)
        )  # the other libraries load the compiled image
        if which == "control":  # it may stop before the first await
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
    sys.setswitchinterval(1e-4)  # threads switch more often
    with arguments.progress.open("r+b") as file, mmap.mmap(file.fileno(), PROGRESS.size) as progress:
        figures = asyncio.run(torture(arguments.driver, arguments.others, arguments.seconds, progress))
        PROGRESS.pack_into(progress, 0, figures["awaits"], 1)
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
