"""``python -m tests.benchmarks.training --json FILE``: a training step of ResNet-50 behind loaders of JPEG files.

A batch has 128 images of 500 x 375 pixels, decoded by Pillow and resized; the step is that of ``torchvision``'s
ResNet-50 in bfloat16, channels last, with SGD. The loaders have the same decoder and as many worker processes, stay
open, and take turns of one epoch each, beside the step alone on a batch that stays on the GPU.

PyTorch's loader has the form of its documentation: processes that are kept, ``pin_memory``, ``non_blocking`` copies on
a side stream; with 2 and with 4 batches ahead for each worker, and the faster of the two counts.

The rate is measured on the device: from the end of a step, a quarter of an epoch after its first one, to that of the
last. By then, what workers have decoded ahead of the first step is consumed.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from aiocuda.data import sync_loader

from . import machine, report
from .figures import Bound
from .jpegs import SIDE, JpegSamples, WriteJpeg, write_files
from .rows import Row

#: By the number of worker processes, the limit of a row: 6 are too few for the step, 14 suffice.
BOUNDS = {6: Bound("times_torch", at_least=1.08), 14: Bound("ratio", at_least=0.97)}

torch: Any = importlib.import_module("torch")


def training_step(small: bool) -> Callable[[Any, Any], None]:
    """Return a function that enqueues a step on a batch: images of uint8, channels last, and their labels."""
    place = "cuda" if torch.cuda.is_available() else "cpu"
    if small:
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 7, 8), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
                                    torch.nn.Linear(8, 1000))  # fmt: skip
    else:
        model = importlib.import_module("torchvision").models.resnet50()
    model = model.to(place, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(images: Any, labels: Any) -> None:
        with torch.autocast(place, torch.bfloat16):
            scaled = images.permute(0, 3, 1, 2).to(torch.bfloat16) / 255  # channels last already
            loss = torch.nn.functional.cross_entropy(model(scaled), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


class Mark:
    """The end of what has been enqueued so far, on the device's clock."""

    def __init__(self) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else None
        if self._event is not None:
            self._event.record()
        self._time = time.perf_counter()

    def seconds_to(self, later: Mark) -> float:
        if self._event is None:
            return later._time - self._time
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1e3


def moved(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of PyTorch's loader on the GPU: they are copied on a side stream while a step runs."""
    if not torch.cuda.is_available():
        yield from batches
        return
    steps, copies = torch.cuda.current_stream(), torch.cuda.Stream()
    for batch in batches:
        with torch.cuda.stream(copies):
            on_device = [part.to("cuda", non_blocking=True) for part in batch]
        steps.wait_stream(copies)
        for part in on_device:
            part.record_stream(steps)
        yield on_device


def rate(batches: Iterable[Any], step: Callable[[Any, Any], None], given: argparse.Namespace) -> float:
    """Return the images per second of an epoch, without its first quarter."""
    first, before = None, given.batches // 4
    for number, (images, labels) in enumerate(batches):
        step(images, labels)
        if number == before:
            first = Mark()
    assert first is not None
    return float((given.batches - 1 - before) * given.size / first.seconds_to(Mark()))


def measured(paths: list[str], workers: int, step: Callable[[Any, Any], None], given: argparse.Namespace) -> Any:
    """Return a row for so many worker processes."""
    length, size, has_gpu = given.batches * given.size, given.size, torch.cuda.is_available()
    place = "cuda" if has_gpu else "cpu"
    fixed = (torch.zeros((size, SIDE, SIDE, 3), dtype=torch.uint8, device=place),
             torch.zeros(size, dtype=torch.int64, device=place))  # fmt: skip
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        ours: Any = stack.enter_context(
            sync_loader(
                range(length), fields=[((SIDE, SIDE, 3), np.uint8), ((), np.int64)], decode=WriteJpeg(paths),
                batch_size=size, workers=workers, executor="process", output="torch",
                driver="cuda" if has_gpu else "host",
            )
        )  # fmt: skip
        theirs = {
            ahead: torch.utils.data.DataLoader(
                JpegSamples(paths, length), batch_size=size, num_workers=workers, pin_memory=has_gpu,
                persistent_workers=True, prefetch_factor=ahead,
            )
            for ahead in (2, 4)
        }  # fmt: skip
        ways: dict[str, Callable[[], Iterable[Any]]] = {
            "aiocuda": lambda: ours,
            "torch_2": lambda: moved(theirs[2]),
            "torch_4": lambda: moved(theirs[4]),
            "step": lambda: [fixed] * given.batches,
        }
        for number in range(given.rounds + 1):
            for way in sorted(ways, reverse=bool(number % 2)):
                images_s = rate(ways[way](), step, given)
                print(f"{workers} workers, round {number}: {way} {images_s:.0f} images/s", flush=True)
                if number:  # the first epochs start the workers
                    rates.setdefault(way, []).append(images_s)
        bottleneck = ours.statistics().bottleneck()
    best = max(("torch_2", "torch_4"), key=lambda way: median(rates[way]))
    row = Row(
        name=f"training_{workers}_processes",
        title=f"training of ResNet-50 from JPEG files, {workers} worker processes",
        module="training",
        unit="images/s",
        better="higher",
        baseline="the step alone, on one batch",
        bounds=(BOUNDS.get(workers, BOUNDS[6]),),
        sizes={},
        small={},
    )
    ratios = [one / other for one, other in zip(rates["aiocuda"], rates[best], strict=True)]
    figures = {"times_torch": median(ratios), "least_times_torch": min(ratios), "most_times_torch": max(ratios)}
    figures |= {f"{way}_images_s": median(rates[way]) for way in ("torch_2", "torch_4")}
    found = {"samples": rates["aiocuda"], "baseline": rates["step"], "figures": figures}
    return {**report.row_report(row, found, {}), "notes": [f"{bottleneck.name} {bottleneck.share:.2f}"]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.training", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=list(BOUNDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=80, help="of an epoch")
    parser.add_argument("--size", type=int, default=128, help="of a batch")
    parser.add_argument("--small", action="store_true", help="a small model, to show that it works")
    given = parser.parse_args()
    head = {
        "schema": report.SCHEMA,
        **machine.tree(),
        "command": shlex.join(["python", "-m", "tests.benchmarks.training", *sys.argv[1:]]),
        "driver": "cuda" if torch.cuda.is_available() else "host",
        "small": given.small,
        "machine": machine.describe(),
        "versions": machine.versions(),
    }
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = write_files(Path(folder), 16 if given.small else 512)
        step = training_step(given.small)
        for workers in given.workers:
            rows.append(measured(paths, workers, step, given))
            print(report.line(rows[-1]), flush=True)
            if given.json is not None:
                report.write({**head, "rows": rows}, given.json)


if __name__ == "__main__":
    main()
