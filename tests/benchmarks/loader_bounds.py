"""The bounds of data loaders: decoders alone, copies alone, steps alone, and decoders with copies by hand."""

from __future__ import annotations

import mmap
import multiprocessing
import threading
import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from .loader_cases import SPIN, WORKERS, Case, Decoder, sleep

__all__ = ["by_hand", "decode_alone", "link_and_step"]


def by_hand(case: Case, seconds: float, name: str) -> float:
    """Return the batches per second of decoders and uploads together, with nothing else: no order, no errors, no loop.

    Eight forked processes spin on a word for each slot of shared memory, decode whole batches into it, and set the
    word; this process spins, too, and has the device copy the slots. So this is what the machine's memory allows: a
    decoder and a link that are measured alone do not share it.
    """
    from aiocuda.driver.cuda import CudaDriver
    from aiocuda.driver.host import HostDriver

    slots = 2 * WORKERS
    page = mmap.PAGESIZE
    stride = -(-case.nbytes // page) * page
    shared = mmap.mmap(-1, page + slots * stride)
    words = np.frombuffer(shared, np.int64, slots)
    memory = np.frombuffer(shared, np.uint8, slots * stride, page).reshape(slots, stride)[:, : case.nbytes]
    decoder = Decoder(case)
    context = multiprocessing.get_context("fork")  # before there is a device

    def work(number: int) -> None:
        at = number
        while True:
            while words[at]:
                pass
            rows = memory[at].reshape(case.rows, -1)
            for row in range(case.rows):
                decoder(row, rows[row])
            words[at] = 1
            at = (at + WORKERS) % slots

    processes = [context.Process(target=work, args=(number,), daemon=True) for number in range(WORKERS)]
    for process in processes:
        process.start()
    driver = CudaDriver.get() if name == "cuda" else HostDriver()
    driver.device_open(0)
    address = memory.ctypes.data
    for slot in range(slots):
        driver.pin(address + slot * stride, case.nbytes)
    stream = driver.stream_create(0, 0)
    targets = [driver.allocate(0, case.nbytes, stream) for _ in range(4)]
    events = [driver.event_create(0, False) for _ in range(slots)]
    reading = [False] * slots
    done, began = 0, time.perf_counter()
    measured_from = began
    while time.perf_counter() - began < 1.5 * seconds:
        if not done and time.perf_counter() - began > 0.5 * seconds:
            measured_from = time.perf_counter()
            done = 1
        for slot in range(slots):
            if reading[slot]:
                if driver.event_query(events[slot]):
                    reading[slot] = False
                    words[slot] = 0
                    done += done > 0
            elif words[slot]:
                driver.upload(stream, targets[slot % 4], address + slot * stride, case.nbytes)
                driver.event_record(events[slot], stream)
                reading[slot] = True
    rate = (done - 1) / (time.perf_counter() - measured_from)
    for process in processes:
        process.kill()
    driver.stream_synchronize(stream)
    return rate


def decode_alone(case: Case, executor: str, seconds: float) -> float:
    """Return the batches per second of the decoder in `WORKERS` threads or processes, into memory of their own."""
    if executor == "thread":
        counts = [0] * WORKERS
        stop = threading.Event()
        barrier = threading.Barrier(WORKERS + 1)

        def work(number: int, decoder: Decoder) -> None:
            out = np.empty(case.sample_bytes, np.uint8)
            decoder(0, out)
            barrier.wait()
            while not stop.is_set():
                decoder(counts[number], out)
                counts[number] += 1

        decoder = Decoder(case)
        threads = [threading.Thread(target=work, args=(number, decoder)) for number in range(WORKERS)]
        for thread in threads:
            thread.start()
        barrier.wait()
        began = time.perf_counter()
        time.sleep(seconds)  # noqa: TID251 - the time of the measurement
        total, spent = sum(counts), time.perf_counter() - began
        stop.set()
        for thread in threads:
            thread.join()
        return total / spent / case.rows
    context = multiprocessing.get_context("spawn")
    with context.Pool(WORKERS) as pool:
        pool.map(_decode_for, [(case, 0.05)] * WORKERS, chunksize=1)
        return sum(pool.map(_decode_for, [(case, seconds)] * WORKERS, chunksize=1)) / case.rows


def _decode_for(work: tuple[Case, float]) -> float:
    case, seconds = work
    decoder, out, done = Decoder(case), np.empty(case.sample_bytes, np.uint8), 0
    decoder(0, out)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        decoder(done, out)
        done += 1
    return done / (time.perf_counter() - began)


async def link_and_step(cases: Sequence[Case], driver: str) -> dict[str, dict[str, float]]:
    """Return the batches per second of uploads of one pinned batch, and of steps alone, by case."""
    import aiocuda

    found: dict[int, float] = {}
    steps: dict[float, float] = {}
    kernel = aiocuda.Kernel("spin", source=SPIN, host=sleep)
    async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:  # type: ignore[arg-type]
        for nbytes in {case.nbytes for case in cases}:
            host = await device.pinned(nbytes, np.uint8)
            target = stream.empty(nbytes, np.uint8)
            await stream.copy(target, host)
            count = max(8, min(400, int(4e9 / nbytes)))
            rates = []
            for _ in range(3):
                began = time.perf_counter()
                for _ in range(count):
                    last = stream.copy(target, host)
                await last
                rates.append(count / (time.perf_counter() - began))
            found[nbytes] = median(rates)
        await device.load(kernel)
        target = stream.empty(16, np.uint8)
        stream.fill(target, 0)
        for step_ms in {case.step_ms for case in cases}:
            count = max(16, min(1000, round(200 / step_ms)))
            stream.launch(kernel, 1, 1, target, round(step_ms * 1e6))
            start = stream.record(timing=True)
            for _ in range(count):
                stream.launch(kernel, 1, 1, target, round(step_ms * 1e6))
            end = stream.record(timing=True)
            await stream.synchronize()
            steps[step_ms] = count / start.elapsed_ms(end) * 1e3
    return {
        "link": {case.name: found[case.nbytes] for case in cases},
        "step": {case.name: steps[case.step_ms] for case in cases},
    }
