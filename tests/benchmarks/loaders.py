"""Data loaders side by side: ``python -m tests.benchmarks.loaders --json FILE``.

Each loader runs in a process of its own, through all cases: batches of some size, a decoder, and a step of the consumer
on the GPU. The loop enqueues the step of a batch and asks for the next batch, as a training loop does.

====================  ==============================================================================================
``aiocuda-thread``    `aiocuda.data.DataLoader` with ``fields``, on threads
``aiocuda-process``   the same in processes
``spdl``              SPDL: N threads, and its ``transfer_tensor_h2d`` on one more
``spdl-subprocess``   SPDL with these N threads in a process of their own
``torch``             PyTorch's DataLoader: N processes, ``pin_memory``, ``non_blocking`` copies on a side stream
``serial``            no loader: decode into pinned memory, await the copy, launch the step, and so on
====================  ==============================================================================================

`loader_peers` says why the loaders of others have these forms. Report and pictures hold ours beside the faster form of
SPDL.

The rate is measured on the device: between the ends of two steps. A loop that runs ahead of the device would
otherwise be charged for it.

``--before FOLDER`` measures another checkout of aiocuda, too: our loaders of both run in turn, ``--rounds`` times.

The bound of a case is the slowest of: the steps alone, the link (copies of one pinned batch), and the decoder in N
threads or processes alone. *By hand* has decoders and link together, since they share the machine's memory: see
`by_hand`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from .loader_bounds import decode_alone, link_and_step
from .loader_cases import (
    CASES,
    SPIN,
    WORKERS,
    Case,
    Decoder,
    Indices,
    WriteField,
    batches_for,
    marks,
    sleep,
)
from .loader_peers import spdl_batches, torch_batches

if TYPE_CHECKING:
    from aiocuda import Event

    from .loader_report import LoaderReport

LOADERS = ("aiocuda-thread", "aiocuda-process", "spdl", "spdl-subprocess", "torch", "serial")


@dataclasses.dataclass
class Result:
    """Figures of a loader in one case.

    Attributes
    ----------
    rates
        Batches per second in each window.
    first_ms
        From the making of the loader to its first batch.
    cores
        CPU time of this process, divided by time.
    longest_turn_ms
        Of the event loop; None without one.
    note
        The loader's bottleneck.
    """

    rates: list[float]
    first_ms: float
    cores: float
    longest_turn_ms: float | None = None
    note: str = ""


async def ours(executor: Any, cases: Sequence[Case], seconds: float, driver: str, note: Callable[..., None]) -> None:
    import aiocuda
    from aiocuda.data import DataLoader

    from .turns import TurnMeter

    turns: TurnMeter = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    kernel = aiocuda.Kernel("spin", source=SPIN, host=sleep)
    async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:  # type: ignore[arg-type]
        await device.load(kernel)
        for case in cases:
            count = batches_for(case, seconds)
            ends = marks(count)
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
                prefetch=2 * WORKERS if case.rows == 1 else 4,  # PyTorch has 2 for each worker
            ) as loader:
                first = measured_from = 0.0
                events: list[Event] = []
                async for batch in loader:
                    if batch.number == 0:
                        first = time.perf_counter() - began
                    stream.launch(kernel, 1, 1, batch["x"], round(case.step_ms * 1e6))
                    if batch.number == ends[len(events)]:
                        if not events:
                            turns.reset()
                            measured_from, cpu = time.perf_counter(), time.process_time()
                        events.append(stream.record(timing=True))
                await stream.synchronize()
                spent, cpu = time.perf_counter() - measured_from, time.process_time() - cpu
                longest = turns.longest()
                bottleneck = loader.statistics().bottleneck()
            times = [before.elapsed_ms(after) for before, after in itertools.pairwise(events)]
            text = f"{bottleneck.name} {bottleneck.share:.2f}"
            note(case, Result(rates(ends, times), first * 1e3, cpu / spent, longest * 1e3, text))


async def serial(cases: Sequence[Case], seconds: float, driver: str, note: Callable[..., None]) -> None:
    """A loop without a loader."""
    import aiocuda

    kernel = aiocuda.Kernel("spin", source=SPIN, host=sleep)
    async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:  # type: ignore[arg-type]
        await device.load(kernel)
        for case in cases:
            count = min(batches_for(case, seconds), 2000)
            ends = marks(count)
            decoder = Decoder(case)
            host, target = await device.pinned(case.nbytes, np.uint8), stream.empty(case.nbytes, np.uint8)
            rows = np.asarray(host).reshape(case.rows, -1)
            began = time.perf_counter()
            first = 0.0
            events: list[Event] = []
            for number in range(count):
                for row in range(case.rows):
                    decoder(number * case.rows + row, rows[row])
                await stream.copy(target, host)
                first = first or time.perf_counter() - began
                stream.launch(kernel, 1, 1, target, round(case.step_ms * 1e6))
                if number == ends[len(events)]:
                    events.append(stream.record(timing=True))
            await stream.synchronize()
            times = [before.elapsed_ms(after) for before, after in itertools.pairwise(events)]
            note(case, Result(rates(ends, times), first * 1e3, 1.0))
            target.free()


def theirs(loader: str, cases: Sequence[Case], seconds: float, note: Callable[..., None]) -> None:
    import torch

    torch.zeros(1, device="cuda")
    cycles = _cycles_per_ms(torch)
    for case in cases:
        count = batches_for(case, seconds)
        ends = marks(count)
        decoder = Decoder(case)
        began = cpu = time.perf_counter()
        first = measured_from = 0.0
        events: list[Any] = []
        for number, batch in enumerate(_batches(loader, case, decoder, count)):
            if number == 0:
                first = time.perf_counter() - began
            torch.cuda._sleep(int(case.step_ms * cycles))  # the step of the batch
            if number == ends[len(events)]:
                if not events:
                    measured_from, cpu = time.perf_counter(), time.process_time()
                events.append(torch.cuda.Event(enable_timing=True))
                events[-1].record()
            del batch
        torch.cuda.synchronize()
        spent, cpu = time.perf_counter() - measured_from, time.process_time() - cpu
        times = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
        note(case, Result(rates(ends, times), first * 1e3, cpu / spent))


def rates(ends: Sequence[int], times: Sequence[float]) -> list[float]:
    """Return the batches per second of each window, from its milliseconds."""
    return [
        (after - before) / time_ms * 1e3
        for (before, after), time_ms in zip(itertools.pairwise(ends), times, strict=True)
    ]


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


def _batches(loader: str, case: Case, decoder: Decoder, count: int) -> Iterator[Any]:
    if loader == "torch":
        return torch_batches(case, decoder, count)
    return spdl_batches(case, decoder, count, in_subprocess=loader == "spdl-subprocess")


_BY_HAND = """
from tests.benchmarks.loader_bounds import by_hand
from tests.benchmarks.loader_cases import Case
print(by_hand({case!r}, {seconds!r}, {driver!r}))
"""


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
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout to compare ours with; built, too")
    parser.add_argument("--rounds", type=int, default=1, help="of each of our loaders")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        child(arguments)
        return 0
    from .loader_report import LoaderReport  # worker processes import this module, and need no aiocuda

    report = LoaderReport(arguments.json, "python -m tests.benchmarks.loaders " + " ".join(argv or sys.argv[1:]),
                          small=arguments.small, driver=arguments.driver,
                          before=arguments.before.name if arguments.before else "")  # fmt: skip
    cases = chosen(arguments)
    alone = _run_child("link", arguments, report)
    if not alone:
        return 1
    together = {line["case"]: line["rate"] for line in _run_child("by-hand", arguments, report)}
    for case in cases:
        limits = {
            "step": alone[0]["step"][case.name],
            "link": alone[0]["link"][case.name],
            "decode_thread": decode_alone(case, "thread", 0.3),
            "decode_process": decode_alone(case, "process", 0.3),
        }
        if together.get(case.name, 0.0) > 0:
            limits["by_hand"] = together[case.name]
        report.add_case(case, limits)
        print(case.name, {key: round(value) for key, value in limits.items()}, flush=True)
    for loader in arguments.loader or LOADERS:
        library = loader.partition("-")[0]
        if library in ("spdl", "torch") and not (
            arguments.driver == "cuda" and all(map(importlib.util.find_spec, ("torch", library)))
        ):
            continue
        for line in _run_in_turn(loader, arguments, report):
            print(report.add(line), flush=True)
    return 1 if report.errors else 0


def _run_in_turn(loader: str, arguments: argparse.Namespace, report: LoaderReport) -> list[dict[str, Any]]:
    """Return the lines of a loader, and those of the checkout to compare with, under the names ``before-…``."""
    ours, executor = loader.startswith("aiocuda-"), loader.partition("-")[2]
    sides: dict[str, Path | None] = {loader: None}
    if ours and arguments.before is not None:
        sides = {f"before-{executor}": arguments.before / "src", loader: None}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(arguments.rounds if ours else 1):
        for side in sorted(sides, reverse=bool(number % 2)):
            for line in _run_child(loader, arguments, report, sides[side]):
                found.setdefault((side, line["case"]), []).append({**line, "loader": side})
    lines = []
    for rounds in found.values():
        rates = [rate for line in rounds for rate in line["rates"]]
        lines.append({**rounds[-1], "rates": rates, "first_ms": median(line["first_ms"] for line in rounds)})
    return lines


def _run_child(
    name: str, arguments: argparse.Namespace, report: LoaderReport, package: Path | None = None
) -> list[dict[str, Any]]:
    path = [str(package.resolve())] if package else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.benchmarks.loaders", "--child", name, "--driver", arguments.driver,
               "--seconds", str(arguments.seconds), *(["--small"] if arguments.small else [])]  # fmt: skip
    for part in arguments.only:
        command += ["--only", part]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=arguments.limit, check=False, env=environment
        )
        output, error, failed = ended.stdout, ended.stderr, ended.returncode != 0
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        error, failed = f"did not end within {arguments.limit} s", True
    if failed:
        report.errors[name if package is None else "before"] = error[-2000:]
        print(f"{name}: {error[-1500:]}", flush=True)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    sys.exit(main())
