"""Random programs that use a data loader, in virtual time on the simulated device.

``python -m tests.data.simulation [--seeds N] [--first S]``: exit 1 and a line ``seed S: L2 …`` at the first violation.

====  ==========================================================================================================
L1    a kernel of the consumer, however late it runs and on whichever stream, reads its own batch
L2    a kept batch, and one that another library holds, is never overwritten
L3    the batches have the samples of the order, each once, in order, without those that are skipped
L4    counts: skipped, padded, kept
L5    nothing is left: memory, slots, violations of the device's rules
L6    a program that stops after any batch and resumes, also with another world size, delivers the rest
====  ==========================================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

import aiocuda
from aiocuda import Device, DeviceBuffer, Kernel, Stream
from aiocuda.data import Batch, DataLoader, Shuffle
from aiocuda.testing import SimulatedDriver
from tests.random_programs import Violation, check, command, run_in_virtual_time

__all__ = ["run"]

WIDTH = 4


class BadSample(Exception):  # noqa: N818 - raised on purpose
    pass


def decode(sample: int, out: Any) -> None:
    if sample < 0:
        raise BadSample
    out["x"][...] = sample
    out["y"][...] = 3 * sample


def decoded(sample: int) -> dict[str, Any]:
    if sample < 0:
        raise BadSample
    return {"x": np.full(WIDTH, sample, np.int64), "y": np.int64(3 * sample)}


class Program:
    """One random program."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"aiocuda loader {seed}")
        self.seed = seed
        chance = self.chance
        self.samples = [
            -1 - number if chance.random() < 0.1 else number for number in range(chance.choice([0, 1, 7, 20, 41]))
        ]
        self.skips = chance.random() < 0.5 or min(self.samples, default=0) < 0
        self.kind = chance.choice(["map", "map", "iterable", "async"])
        self.seen: list[tuple[tuple[int, ...], np.ndarray[Any, Any]]] = []  # what kernels have read
        self.shuffle: Shuffle | None = None
        if chance.random() < 0.6:
            self.shuffle = Shuffle(chance.randrange(100), None if self.kind == "map" else chance.randint(1, 9))
        self.options: dict[str, Any] = {
            "batch_size": chance.choice([1, 2, 3, 5]),
            "drop_last": chance.random() < 0.3,
            "workers": chance.randint(0, 4),
            "ordered": chance.random() < 0.7,
            "prefetch": chance.randint(1, 4),
            "shuffle": self.shuffle,
            "on_error": "skip",
        }
        if chance.random() < 0.6:
            self.options |= {"fields": {"x": ((WIDTH,), np.int64), "y": ((), np.int64)}, "decode": decode}
        else:
            self.options |= {"decode": decoded}
        self.world = chance.choice([1, 1, 2, 3])
        self.rank = chance.randrange(self.world)

    def source(self) -> Any:
        if self.kind == "map":
            return self.samples
        if self.kind == "iterable":
            return iter(self.samples)

        async def samples() -> AsyncIterator[int]:
            for sample in self.samples:
                if self.chance.random() < 0.3:
                    await asyncio.sleep(self.chance.random() * 1e-3)
                yield sample

        return samples()

    def loader(self, device: Device, rank: int, world: int, **changed: Any) -> DataLoader:
        return DataLoader(device, self.source(), shard=(rank, world), **self.options | changed)

    # -- the consumer --------------------------------------------------------------------------------------------

    def kernel(self) -> Kernel:
        """A kernel that notes, when it runs, what it reads."""

        def read(x: Any, y: Any, number: int) -> None:
            self.seen.append((tuple(int(one) for one in expected[number]), np.array(x)))
            check("L1", [int(row[0]) for row in x] == list(expected[number]), f"kernel {number} read {x[:, 0]}")
            check("L1", (np.asarray(y) == 3 * x[:, 0]).all(), f"kernel {number} read fields of different samples")
            check("L1", (x == x[:, :1]).all(), f"kernel {number} read a half-written sample")

        expected = self.expected = {}
        source = 'extern "C" __global__ void read(const long long* x, const long long* y, int number) {}'
        return Kernel("read", source=source, host=read, host_seconds=self.chance.choice([1e-6, 1e-4, 5e-3]))

    async def consume(self, device: Device, loader: DataLoader, most: int | None = None) -> list[tuple[int, ...]]:
        """Run an epoch, or ``most`` batches of it; return the samples of each batch."""
        chance = self.chance
        streams = [device.stream(name=f"consumer {number}") for number in range(2)]
        kernel = self.kernel()
        one = batch = None
        delivered: list[tuple[int, ...]] = []
        kept: list[tuple[Batch, tuple[int, ...]]] = []
        held: list[tuple[Any, Batch, tuple[int, ...]]] = []
        held_before = 0
        launched = 0
        async for batch in loader:
            # More, if the traceback of a bad sample holds a capsule: workers run inside of calls here.
            check("L4", loader.statistics().kept >= held_before, "kept batches are miscounted")
            samples = tuple(self.samples[index] for index in batch.indices)
            delivered.append(samples)
            check(
                "L3", len(batch["x"]) == len(samples) == len(batch["y"]), "a batch has another length than its indices"
            )
            stream = chance.choice([*streams, batch.stream])
            for _ in range(chance.randint(0, 2)):
                self.expected[launched] = samples
                where: Stream | DeviceBuffer = chance.choice([*streams, stream])
                assert isinstance(where, Stream)
                where.launch(kernel, 1, 1, batch["x"], batch["y"], launched)
                launched += 1
            action = chance.random()
            if action < 0.15:
                kept.append((batch.keep(), samples))
            elif action < 0.3 and (batch["x"].nbytes and batch["y"].nbytes):
                # Another library holds the batch, and uses it on the stream that it names.
                with contextlib.suppress(BufferError):  # work on it is still on the host
                    handle = device.driver.stream_handle(_handle(stream)) or 1
                    held.append((batch["x"].__dlpack__(stream=handle), batch, samples))
            elif action < 0.45:
                # Work that aiocuda does not know: a copy by address.
                await self.by_address(device, stream, batch, samples)
            if chance.random() < 0.3:
                await asyncio.sleep(chance.choice([1e-6, 1e-4, 2e-3]))
            while held and chance.random() < 0.4:
                one, of_one = held.pop(chance.randrange(len(held)))[1:]
                await self.check_kept(stream, one, of_one)
                one = None
            held_before += any(each is batch for _, each, _ in held)
            if most is not None and len(delivered) == most:
                break
        for one, samples in kept:
            await self.check_kept(streams[0], one, samples)
            one.free()
        for _, one, samples in held:
            await self.check_kept(streams[0], one, samples)
        kept.clear()
        held.clear()
        one = batch = None
        for stream in streams:
            await stream.synchronize()
            await stream.aclose()
        return delivered

    async def check_kept(self, stream: Stream, batch: Batch, samples: Sequence[int]) -> None:
        read = (await stream.download(batch["x"]))[:, 0].tolist()
        check("L2", read == list(samples), f"a batch that is kept has {read} and not {list(samples)}")

    async def by_address(self, device: Device, stream: Stream, batch: Batch, samples: Sequence[int]) -> None:
        """Enqueue a copy of the batch by its address, as another library does, and name its stream."""
        driver, handle = device.driver, _handle(stream)
        nbytes = batch["x"].nbytes
        if not nbytes:
            return
        result = device.pinned((len(samples), WIDTH), np.int64)
        await result
        driver.download(handle, result.address, batch["x"].address, nbytes)
        batch.used_on(stream)
        done = stream.record()

        def compare(_: Any) -> None:
            read = np.asarray(result)[:, 0].tolist()
            if read != list(samples):
                self.failures.append(f"L1 a copy on a named stream read {read} and not {list(samples)}")

        done.add_done_callback(compare)

    failures: list[str]
    expected: dict[int, tuple[int, ...]]

    # -- what must come ------------------------------------------------------------------------------------------

    def order(self, epoch: int) -> list[int]:
        """The samples of an epoch in the global order, by the loader's own shuffling with a world of one."""
        return self._orders[epoch]

    _orders: dict[int, list[int]]

    async def main(self) -> None:
        self.failures = []
        self._orders = {}
        driver = SimulatedDriver(self.seed, bandwidth=self.chance.choice([1e5, 1e8]))
        async with aiocuda.open_device(driver=driver, policy="efficient") as device:
            async with DataLoader(
                device, self.source(), decode=lambda sample: np.int64(abs(sample)), shuffle=self.shuffle
            ) as plain:
                order = [int(self.samples[batch.indices[0]]) async for batch in plain]
            check("L3", sorted(order) == sorted(self.samples), "the order is no permutation of the samples")
            await self.whole_epoch(device, order)
            await self.resumed(device, order)
            gc.collect()
            await device.memory.trim()
            check(
                "L5", device.memory.statistics().live_bytes == 0, f"{device.memory.statistics().live_bytes} bytes left"
            )
        check("L5", not driver.violations, f"{driver.violations[:1]}")
        if self.failures:
            raise Violation(self.failures[0])
        driver.close()

    def batches(self, order: Sequence[int], rank: int, world: int) -> list[tuple[int, ...]]:
        """The batches of a rank: written without arithmetic on positions."""
        size = self.options["batch_size"]
        steps = [order[begin : begin + size * world] for begin in range(0, len(order), size * world)]
        found = []
        for step in steps:
            if self.options["drop_last"] and len(step) < size * world:
                continue
            rounds = [step[begin : begin + world] for begin in range(0, len(step), world)]
            own = []
            for one in rounds:
                missing = rank - len(one)
                own.append(one[rank] if rank < len(one) else order[missing % len(order)])
            found.append(tuple(own))
        return found

    def good(self, batches: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Without the samples that are skipped, and without empty batches."""
        return [left for batch in batches if (left := tuple(sample for sample in batch if sample >= 0))]

    async def whole_epoch(self, device: Device, order: Sequence[int]) -> None:
        planned = self.batches(order, self.rank, self.world)
        async with self.loader(device, self.rank, self.world) as loader:
            delivered = await self.consume(device, loader)
            statistics = loader.statistics()
        expected = self.good(planned)
        if self.options["ordered"]:
            check("L3", delivered == expected, f"delivered {delivered}, expected {expected}")
        check("L3", sorted(delivered) == sorted(expected), f"delivered {delivered}, expected {expected}")
        bad = sum(sample < 0 for batch in planned for sample in batch)
        check("L4", statistics.skipped == bad, f"{statistics.skipped} skipped, and {bad} were bad")
        check("L4", statistics.samples == sum(map(len, expected)), "samples are miscounted")

    async def resumed(self, device: Device, order: Sequence[int]) -> None:
        """Stop all ranks after some batches, and go on with another world size."""
        size, world = self.options["batch_size"], self.world
        count = len(self.batches(order, 0, world))
        done = self.chance.randint(0, count)
        states, first = [], []
        for rank in range(world):
            async with self.loader(device, rank, world) as loader:
                taken = 0
                iterator = aiter(loader)
                while taken < done:
                    batch = await anext(iterator, None)
                    if batch is None:
                        break
                    first += [self.samples[index] for index in batch.indices]
                    taken += 1
                    await asyncio.sleep(self.chance.choice([0, 1e-4]))
                states.append(loader.state_dict())
        if len({str(state) for state in states}) > 1:
            return  # an empty batch, or another order of delivery, at different places of the ranks
        state = DataLoader.merge_state_dicts(states)
        new_world = world if state["ahead"] else self.chance.randint(1, 3)
        drops = self.options["drop_last"]
        if drops and (new_world != world):
            return  # the end that is dropped differs
        rest: list[int] = []
        counts = set()
        for rank in range(new_world):
            async with self.loader(device, rank, new_world) as loader:
                loader.load_state_dict(state)
                counts.add(0)
                async for batch in loader.epoch(state["epoch"]):
                    rest += [self.samples[index] for index in batch.indices]
                padded = loader.statistics().padded
                check("L4", padded <= 1, f"{padded} padded")
        del size
        if state["epoch"]:
            return  # the epoch was complete
        whole = {sample for batch in self.good([self.batches(order, rank, world)[at] for rank in range(world)
                 for at in range(count)]) for sample in batch}  # fmt: skip
        check("L6", {*first, *rest} == whole, f"first {sorted(first)}, then {sorted(rest)}, of {sorted(whole)}")
        repeated = len(first) + len(rest) - len(whole)
        check("L6", repeated <= world + new_world - 2 if not drops else repeated == 0, f"{repeated} samples twice")


def _handle(stream: Stream) -> int:
    return stream._queue.handle


def run(seed: int) -> None:
    """Run a program. `Violation` if it breaks a rule."""
    run_in_virtual_time(Program(seed).main(), "L0")


if __name__ == "__main__":
    sys.exit(command(run, "tests.data.simulation", __doc__))
