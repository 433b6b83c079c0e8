"""Data loaders side by side: ``python -m tests.benchmarks.loaders --json FILE``.

Each loader runs in a process of its own, through all cases: batches of some size, a decoder, and a step of the consumer
on the GPU. The loop enqueues the step of a batch and asks for the next batch, as a training loop does.

====================  ==============================================================================================
``aiocuda-thread``    `aiocuda.data.DataLoader` with ``fields``, on threads
``aiocuda-process``   the same in processes
``spdl``              SPDL: ``pipe(decode, concurrency=N)``, then one thread that pins, copies and synchronises, as its
                      ``transfer_tensor_h2d`` does
``torch``             PyTorch's DataLoader: N processes, ``pin_memory``, ``persistent_workers``, ``non_blocking`` copies
``serial``            no loader: decode into pinned memory, await the copy, launch the step, and so on
====================  ==============================================================================================

The rate is measured on the device: between the ends of two steps, a quarter of the batches and all of them. A loop that
runs ahead of the device would otherwise be charged for it.

The bound of a case is the slowest of: the steps alone, the link (copies of one pinned batch), and the decoder in N
threads or processes alone. *By hand* has decoders and link together, since they share the machine's memory: see
`by_hand`.

The decoders:

- ``memcpy``: a sample is a whole batch, and one copy from an array decodes it;
- ``images``: 64 samples of a batch are copied one by one;
- ``resize``: 64 images of 256 x 256 are resized to 224 x 224 by NumPy, bilinear along each axis;
- ``png``: 64 images of 224 x 224 are decoded by Pillow.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import importlib.util
import io
import json
import mmap
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

__all__ = ["CASES", "Case", "main"]

KIB, MIB = 1 << 10, 1 << 20
IMAGE = (224, 224, 3)
IMAGES = 64
WORKERS = 8
LOADERS = ("aiocuda-thread", "aiocuda-process", "spdl", "torch", "serial")

SPIN = """
extern "C" __global__ void spin(const unsigned char* batch, unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds + batch[0] * 0ull);
}
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """Batches of a size, a decoder, and the milliseconds of a step."""

    decoder: str
    nbytes: int
    step_ms: float

    @property
    def rows(self) -> int:
        return 1 if self.decoder == "memcpy" else IMAGES

    @property
    def sample_bytes(self) -> int:
        return self.nbytes // self.rows

    @property
    def name(self) -> str:
        size = f"{self.nbytes / 1e6:.2g} MB" if self.nbytes >= 1e6 else f"{self.nbytes / 1e3:.2g} KB"
        return f"{self.decoder}, {size}, step {self.step_ms:g} ms"


PAYLOAD = IMAGES * IMAGE[0] * IMAGE[1] * IMAGE[2]  # 9.6 MB
CASES = [
    *(Case("memcpy", nbytes, step) for nbytes in (64 * KIB, MIB, PAYLOAD, 64 * MIB) for step in (0.2, 1.0)),
    Case("images", PAYLOAD, 0.2),
    Case("resize", PAYLOAD, 1.0),
    Case("png", PAYLOAD, 1.0),
    # Where a loader may not help: tiny batches, and a long step.
    Case("memcpy", 4 * KIB, 0.02),
    Case("memcpy", MIB, 10.0),
]


# -- decoders: the same functions for every loader ------------------------------------------------------------------


class Decoder:
    """Decodes sample ``index`` of a case into an array of bytes. A process makes the large source data again."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._data: list[Any] = self._make()

    def __getstate__(self) -> Any:
        return {"case": self.case, "_data": self._data if self.case.decoder in ("resize", "png") else None}

    def __setstate__(self, state: Any) -> None:
        self.case = state["case"]
        self._data = self._make() if state["_data"] is None else state["_data"]

    def __call__(self, index: int, out: Any) -> None:
        data = self._data[index % len(self._data)]
        if self.case.decoder == "resize":
            out[...] = resized(data, IMAGE[0], IMAGE[1]).reshape(-1)
        elif self.case.decoder == "png":
            from PIL import Image  # type: ignore[import-not-found,unused-ignore]

            out[...] = np.asarray(Image.open(io.BytesIO(data))).reshape(-1)
        else:
            np.copyto(out, data)

    def _make(self) -> list[Any]:
        bits = np.random.default_rng(0)
        if self.case.decoder == "resize":
            return [bits.integers(0, 255, (256, 256, 3), np.uint8) for _ in range(16)]
        if self.case.decoder == "png":
            from PIL import Image

            smooth = np.add.outer(np.arange(224), np.arange(224))[:, :, None] // 2 + np.zeros(3, int)
            made = []
            for number in range(16):
                file = io.BytesIO()
                noise = bits.integers(0, 8, IMAGE)
                Image.fromarray(((smooth + noise + number) % 256).astype(np.uint8)).save(file, "png")
                made.append(file.getvalue())
            return made
        count = 2 if self.case.sample_bytes > 16 * MIB else 8
        return [np.full(self.case.sample_bytes, number, np.uint8) for number in range(count)]


def resized(image: Any, height: int, width: int) -> Any:
    """Return the image, resized by linear interpolation along each axis."""
    for axis, size in ((0, height), (1, width)):
        at = np.linspace(0, image.shape[axis] - 1, size, dtype=np.float32)
        low = at.astype(np.intp)
        high = np.minimum(low + 1, image.shape[axis] - 1)
        share = (at - low).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        image = image.take(low, axis) * (1 - share) + image.take(high, axis) * share
    return image.astype(np.uint8)


class Indices:
    """A source whose samples are their indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class WriteField:
    """``decode(sample, out)`` of our loader."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def __call__(self, sample: int, out: Any) -> None:
        self.decoder(sample, out["x"])


class TorchSamples:
    """A dataset of PyTorch: it returns a tensor for each sample."""

    def __init__(self, length: int, decoder: Decoder) -> None:
        self.length, self.decoder = length, decoder

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        import torch

        tensor = torch.empty(self.decoder.case.sample_bytes, dtype=torch.uint8)
        self.decoder(index, tensor.numpy())
        return tensor


# -- one loader ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """What a loader did in one case."""

    batches_per_s: float
    first_ms: float
    cores: float
    longest_turn_ms: float | None = None
    note: str = ""


def batches_for(case: Case, seconds: float) -> int:
    """Return how many batches a loader may take about that long for, at the best: some must be left."""
    decode = {"resize": 0.4e-3, "png": 0.2e-3}.get(case.decoder, 0.0) * case.rows  # of eight workers
    return max(24, int(seconds / max(case.step_ms * 1e-3, case.nbytes / 50e9, decode)))


def _sleep(batch: Any, nanoseconds: int) -> None:
    time.sleep(nanoseconds * 1e-9)  # noqa: TID251 - the step, on the host driver


async def ours(executor: Any, cases: Sequence[Case], seconds: float, driver: str, note: Callable[..., None]) -> None:
    import aiocuda
    from aiocuda.data import DataLoader

    from .turns import TurnMeter

    turns: TurnMeter = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    kernel = aiocuda.Kernel("spin", source=SPIN, host=_sleep)
    async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:  # type: ignore[arg-type]
        await device.load(kernel)
        for case in cases:
            count = batches_for(case, seconds)
            decoder = WriteField(Decoder(case))
            gc.collect()
            gc.freeze()  # as the other rows: the objects of the start are not collected in the measured time
            began, cpu = time.perf_counter(), time.process_time()
            async with DataLoader(
                device,
                Indices(count * case.rows),
                fields={"x": ((case.sample_bytes,), np.uint8)},
                decode=decoder,
                batch_size=case.rows,
                workers=WORKERS,
                executor=executor,
                prefetch=WORKERS + 2 if case.rows == 1 else 4,
            ) as loader:
                first = measured_from = 0.0
                async for batch in loader:
                    if batch.number == 0:
                        first = time.perf_counter() - began
                    stream.launch(kernel, 1, 1, batch["x"], round(case.step_ms * 1e6))
                    if batch.number == count // 4:
                        turns.reset()
                        measured_from, cpu = time.perf_counter(), time.process_time()
                        start = stream.record(timing=True)
                last = stream.record(timing=True)
                await stream.synchronize()
                ended = time.perf_counter()
                longest = turns.longest()
                bottleneck = loader.statistics().bottleneck()
            note(case, Result(
                (count - 1 - count // 4) / start.elapsed_ms(last) * 1e3, first * 1e3,
                (time.process_time() - cpu) / (ended - measured_from), longest * 1e3,
                f"{bottleneck.name} {bottleneck.share:.2f}",
            ))  # fmt: skip


async def serial(cases: Sequence[Case], seconds: float, driver: str, note: Callable[..., None]) -> None:
    """A loop without a loader."""
    import aiocuda

    kernel = aiocuda.Kernel("spin", source=SPIN, host=_sleep)
    async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:  # type: ignore[arg-type]
        await device.load(kernel)
        for case in cases:
            count = max(24, min(batches_for(case, seconds), 2000 // case.rows))
            decoder = Decoder(case)
            host, target = await device.pinned(case.nbytes, np.uint8), stream.empty(case.nbytes, np.uint8)
            rows = np.asarray(host).reshape(case.rows, -1)
            began = time.perf_counter()
            first = 0.0
            for number in range(count):
                for row in range(case.rows):
                    decoder(number * case.rows + row, rows[row])
                await stream.copy(target, host)
                first = first or time.perf_counter() - began
                stream.launch(kernel, 1, 1, target, round(case.step_ms * 1e6))
                if number == count // 4:
                    start = stream.record(timing=True)
            last = stream.record(timing=True)
            await stream.synchronize()
            note(case, Result((count - 1 - count // 4) / start.elapsed_ms(last) * 1e3, first * 1e3, 1.0))
            target.free()


def theirs(loader: str, cases: Sequence[Case], seconds: float, note: Callable[..., None]) -> None:
    import torch

    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    cycles = _cycles_per_ms(torch)
    for case in cases:
        count = batches_for(case, seconds)
        decoder = Decoder(case)
        began = cpu = time.perf_counter()
        first = measured_from = 0.0
        start, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for number, batch in enumerate(_batches(loader, case, decoder, count, torch, device)):
            if number == 0:
                first = time.perf_counter() - began
            torch.cuda._sleep(int(case.step_ms * cycles))  # the step of the batch
            if number == count // 4:
                start.record()
                measured_from, cpu = time.perf_counter(), time.process_time()
            del batch
        last.record()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        note(case, Result((count - 1 - count // 4) / start.elapsed_time(last) * 1e3, first * 1e3,
                          (time.process_time() - cpu) / (ended - measured_from)))  # fmt: skip


def _cycles_per_ms(torch: Any) -> float:
    """Return the clock cycles of `torch.cuda._sleep` that take a millisecond, on a GPU that is at work."""
    rates = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        end.synchronize()
        rates.append(20_000_000 / start.elapsed_time(end))
    return float(median(rates))


def _batches(loader: str, case: Case, decoder: Decoder, count: int, torch: Any, device: Any) -> Iterator[Any]:
    samples = TorchSamples(count * case.rows, decoder)
    if loader == "torch":
        made = torch.utils.data.DataLoader(
            samples, batch_size=case.rows, num_workers=WORKERS, pin_memory=True, persistent_workers=True
        )
        for batch in made:
            yield batch.to(device, non_blocking=True)
        return
    from spdl.pipeline import PipelineBuilder  # type: ignore[import-not-found]

    stream = torch.cuda.Stream()
    kept: list[Any] = []

    def transfer(batch: Any) -> Any:
        with torch.cuda.stream(stream):
            moved = batch.pin_memory().to(device, non_blocking=True)
        stream.synchronize()
        kept.append(moved)
        del kept[:-4]
        return moved

    builder = PipelineBuilder().add_source(range(count * case.rows))
    builder = builder.pipe(samples.__getitem__, concurrency=WORKERS, output_order="input")
    if case.rows > 1:
        builder = builder.aggregate(case.rows).pipe(torch.stack)
    pipeline = builder.pipe(transfer).add_sink(3).build(num_threads=WORKERS + 2)
    with pipeline.auto_stop():
        yield from pipeline


# -- bounds ----------------------------------------------------------------------------------------------------------


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


_BY_HAND = """
from tests.benchmarks.loaders import Case, by_hand
print(by_hand({case!r}, {seconds!r}, {driver!r}))
"""


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
    kernel = aiocuda.Kernel("spin", source=SPIN, host=_sleep)
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


# -- the command -----------------------------------------------------------------------------------------------------


def child(arguments: argparse.Namespace) -> None:
    """Run one loader through the cases; write a line for each."""
    cases = chosen(arguments)

    def note(case: Case, result: Result) -> None:
        line = {"loader": arguments.child, "case": case.name, **dataclasses.asdict(result)}
        print(json.dumps(line), flush=True)

    if arguments.child.startswith("aiocuda"):
        from .turns import metered_loop

        loop, _ = metered_loop()
        executor = arguments.child.removeprefix("aiocuda-")
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(ours(executor, cases, arguments.seconds, arguments.driver, note))
    elif arguments.child == "link":
        print(json.dumps(asyncio.run(link_and_step(cases, arguments.driver))))
    elif arguments.child == "by-hand":
        for case in cases:  # each in a process without a device
            command = [
                sys.executable,
                "-c",
                _BY_HAND.format(case=case, seconds=min(0.4, arguments.seconds), driver=arguments.driver),
            ]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            print(json.dumps({"case": case.name, "rate": float(ended.stdout or "nan")}), flush=True)
    elif arguments.child == "serial":
        asyncio.run(serial(cases, arguments.seconds, arguments.driver, note))
    else:
        theirs(arguments.child, cases, arguments.seconds, note)


def chosen(arguments: argparse.Namespace) -> list[Case]:
    cases = [case for case in CASES if not arguments.only or any(part in case.name for part in arguments.only)]
    if arguments.small:
        plain = [case for case in cases if case.decoder in ("memcpy", "images")]
        cases = [dataclasses.replace(case, nbytes=case.rows * 768) for case in plain]
    return cases


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.loaders", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--driver", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0, help="about, for a case at its bound")
    parser.add_argument("--only", action="append", default=[], help="cases whose name contains this")
    parser.add_argument("--loader", action="append", default=[], choices=LOADERS)
    parser.add_argument("--small", action="store_true", help="tiny batches, to show that it works")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for one loader")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        child(arguments)
        return 0
    report: dict[str, Any] = {"schema": 1, "command": sys.argv[1:] if argv is None else list(argv), "rows": []}
    cases = chosen(arguments)
    link_rates = _run_child("link", arguments, report)
    if not link_rates:
        return 1
    rates = link_rates[0]
    together = {line["case"]: line["rate"] for line in _run_child("by-hand", arguments, report)}
    bounds: dict[str, dict[str, float]] = {}
    for case in cases:
        bounds[case.name] = {
            "step": rates["step"][case.name],
            "link": rates["link"][case.name],
            "decode_thread": decode_alone(case, "thread", 0.3),
            "decode_process": decode_alone(case, "process", 0.3),
        }
        if case.name in together:
            bounds[case.name]["by_hand"] = together[case.name]
        print(case.name, {key: round(value) for key, value in bounds[case.name].items()}, flush=True)
    report["bounds"] = bounds
    for loader in arguments.loader or LOADERS:
        if loader in ("spdl", "torch") and not (
            arguments.driver == "cuda" and all(map(importlib.util.find_spec, ("torch", loader)))
        ):
            continue
        for line in _run_child(loader, arguments, report):
            limits = dict(bounds[line["case"]])
            decode = limits["decode_process" if loader in ("aiocuda-process", "torch") else "decode_thread"]
            line["of_bound"] = line["batches_per_s"] / min(limits["step"], limits["link"], decode)
            by_hand_rate = limits.get("by_hand", 0.0)
            line["of_by_hand"] = line["batches_per_s"] / min(limits["step"], by_hand_rate) if by_hand_rate > 0 else None
            report["rows"].append(line)
            longest = line["longest_turn_ms"] or 0.0
            print(f"{loader:16} {line['case']:32} {line['batches_per_s']:8.0f}/s {line['of_bound']:5.2f} "
                  f"({line['of_by_hand'] or 0.0:.2f} by hand) "
                  f"first {line['first_ms']:6.0f} ms, {line['cores']:.1f} cores, turn {longest:.1f} ms"
                  f" {line['note']}", flush=True)  # fmt: skip
            _write(arguments.json, report)
    _write(arguments.json, report)
    return 1 if "errors" in report else 0


def _run_child(name: str, arguments: argparse.Namespace, report: dict[str, Any]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.benchmarks.loaders", "--child", name, "--driver", arguments.driver,
               "--seconds", str(arguments.seconds), *(["--small"] if arguments.small else [])]  # fmt: skip
    for part in arguments.only:
        command += ["--only", part]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=arguments.limit, check=False)
        output, error, failed = ended.stdout, ended.stderr, ended.returncode != 0
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        error, failed = f"did not end within {arguments.limit} s", True
    if failed:
        report.setdefault("errors", {})[name] = error[-2000:]
        print(f"{name}: {error[-1500:]}", flush=True)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def _write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
