"""Commands and options of ``aiocuda``, and the exit codes.

====  =====================================================
0     success, and verified
1     a histogram is wrong, or another failure
2     usage: a wrong option or path, or a file that cannot be written
3     the requested driver is not available
4     the device has faulted
130   Ctrl-C
====  =====================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Annotated, Any, Self, TextIO, cast

import numpy as np
import typer

from .. import __version__
from ..device import Device, open_device
from ..driver import DriverName
from ..driver.cuda import find as find_reason
from ..driver.host import HostDriver
from ..errors import (
    AiocudaError,
    CompilerNotFoundError,
    DeviceFault,
    DriverNotAvailableError,
    HostDriverWarning,
    InvalidArgumentError,
    InvalidTypeError,
)
from . import _bench, _doctor
from ._demo import DemoJob, search
from ._files import File, Skipped, standard_library
from ._report import PICTURE_BATCHES, DemoReport
from ._screen import BenchTable, OutputConsole, ProgressBar, show_findings, show_info, show_report
from ._trace_command import TraceCommand, trace

__all__ = ["run"]

#: Seconds that the device may take after Ctrl-C. The command must end within 2 s.
DRAIN_SECONDS = 1.0

#: Bytes per second of a copy of the demo on the host driver. On a GPU, a copy and this kernel take about the same time.
#: As a NumPy function on one core the kernel counts 0.5 GB/s, so a model of a GPU with such kernels has such a link.
LINK = 0.4e9

app = typer.Typer(name="aiocuda", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class UsageError(Exception):
    """The command cannot be run with these arguments. The exit code is 2."""


def run(arguments: Sequence[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # characters that the terminal's encoding lacks
    command = typer.main.get_command(app)
    try:
        outcome = command.main(list(arguments), prog_name="aiocuda", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
        if show is None or code is None:  # not an error of click
            raise
        show()
        return int(code)
    return outcome if isinstance(outcome, int) else 0


def _version(asked: bool) -> None:
    if asked:
        print(f"aiocuda {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Every CUDA stream operation is an awaitable."""


DriverOption = Annotated[str, typer.Option("--driver", metavar="NAME", help="auto, cuda, host or simulated.")]


@app.command()
def demo(
    path: Annotated[
        str | None, typer.Argument(metavar="[PATH]", help="A folder or a file. Default: Python's standard library.")
    ] = None,
    driver: DriverOption = "auto",
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - is standard output.")
    ] = None,
    results: Annotated[
        str | None, typer.Option("--results", metavar="FILE.jsonl", help="Write a JSON line for each file; - as above.")
    ] = None,
    timeline: Annotated[
        str | None, typer.Option("--timeline", metavar="FILE.svg", help="Draw the overlap of the streams; - as above.")
    ] = None,
) -> int:
    """Histogram and entropy of every file, through a triple-buffered pipeline, checked and timed."""
    dashes = [json_file, results, timeline].count("-")
    if dashes > 1:
        return _failed(
            UsageError("only one of --json, --results and --timeline can be -: it has standard output to itself"), 2
        )
    console = OutputConsole(stderr=bool(dashes))

    root, without = (path, frozenset[str]()) if path is not None else standard_library()

    async def work() -> int:
        async with _demo_device(cast("DriverName", driver)) as (device, reason):
            with contextlib.ExitStack() as stack:
                outputs = _Outputs(stack, json_file, results, timeline)
                found = await search(device, root, without)
                counted = await _demo(device, *outputs.left_out(*found), outputs)
                report = dataclasses.replace(counted, root=root, fallback_reason=reason)
                outputs.json(report)
        show_report(report, console)
        return 0 if report.verified else 1

    if not os.path.lexists(root):
        return _failed(UsageError(f"there is no {root!r}"), 2)
    return _run(work)


@app.command()
def info(
    driver: DriverOption = "auto", as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> int:
    """What there is to run on."""

    async def work() -> int:
        found = await _collect(cast("DriverName", driver))
        if as_json:
            print(json.dumps(found, indent=2))
        else:
            show_info(found, OutputConsole())
        return 0

    return _run(work)


@app.command()
def doctor(
    driver: DriverOption = "auto", as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> int:
    """Check this machine, and name the cure of each problem."""

    async def work() -> int:
        findings = await _doctor.diagnose(cast("DriverName", driver))
        if as_json:
            print(_doctor.as_json(findings))
        else:
            show_findings(findings, OutputConsole())
        return 0 if all(finding.ok for finding in findings) else 1

    return _run(work)


@app.command()
def bench(
    driver: DriverOption = "auto", as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> int:
    """Measure this machine for some 15 seconds, and show the published figures beside it."""
    console = OutputConsole(stderr=as_json, only_terminal=as_json)  # on a terminal, the table shows the progress
    table = BenchTable(console)

    async def work() -> int:
        device, reason = await _opened(cast("DriverName", driver))
        device.drain_timeout = DRAIN_SECONDS
        async with device:
            report = await _bench.bench(device, reason, table.begin, table.show)
        table.end()
        if as_json:
            print(report.as_json())
        return 0 if all(row.error is None for row in report.rows) else 1

    return _run(work)


app.command(cls=TraceCommand)(trace)


#: The properties of a device that ``aiocuda info`` shows as features.
_FEATURES = ("managed_memory", "concurrent_managed_access", "unified_addressing", "memory_pools", "copy_engines")


async def _opened(driver: DriverName) -> tuple[Device, str | None]:
    """Open a device. Return it, and the reason if the host driver is used because no GPU was found."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HostDriverWarning)
        device = await open_device(driver=driver)
    others = [each for each in caught if not issubclass(each.category, HostDriverWarning)]
    for each in others:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    fell_back = len(others) < len(caught)
    reason = await device.offload(find_reason) if fell_back else None
    return device, reason


@contextlib.asynccontextmanager
async def _demo_device(driver: DriverName) -> AsyncIterator[tuple[Device, str | None]]:
    """Open the device of the demo. It is a context manager; the second value is that of `_opened`."""
    device, reason = await _opened(driver)
    with contextlib.ExitStack() as stack:
        if device.driver.name == "host":
            await device.aclose()
            model = stack.enter_context(contextlib.closing(HostDriver(bandwidth=LINK)))
            device = await open_device(driver=model)
        device.drain_timeout = DRAIN_SECONDS
        async with device:
            yield device, reason


async def _collect(driver: DriverName = "auto") -> dict[str, Any]:
    """Return driver, devices, features and versions as a dict for JSON. Opens the first device."""
    device, reason = await _opened(driver)
    try:
        chosen, properties = device.driver, device.properties
        devices = [dataclasses.asdict(properties) | {"index": device.index}]
        for index in range(1, chosen.device_count()):
            other = await device.offload(chosen.device_open, index)
            devices.append(dataclasses.asdict(other) | {"index": index})
        versions = {"aiocuda": __version__, "python": platform.python_version(), "numpy": np.__version__}
        return {
            "driver": chosen.name,
            "devices": devices,
            "features": {
                **{name: getattr(properties, name) for name in _FEATURES},
                "kernels": "CUDA C++" if chosen.wants_image else "host implementations in NumPy",
                "notifiers": chosen.notifier_limit(device.index),
            },
            "versions": {**versions, **chosen.versions()},
            "hardware_queues": device.hardware_queues,
            "core": device.statistics().core,
            "fallback_reason": reason,
        }
    finally:
        await device.aclose()


async def _demo(device: Device, files: list[File], skipped: list[Skipped], outputs: _Outputs) -> DemoReport:
    with ProgressBar() as progress:
        report = await DemoJob(device, files, skipped, progress).run(outputs.result)
    if outputs.timeline is not None:
        batches = f"{min(report.batches, PICTURE_BATCHES)} batches of at most {report.batch_bytes / 1e6:.1f} MB"
        title = f"aiocuda demo: {batches} on {report.device} ({report.driver} driver)"
        outputs.timeline.write(report.overlap.to_svg(title))
    return report


class _Output:
    """A file that the demo writes, or standard output. It raises errors of the file system as `UsageError`.

    A context manager that closes the file. Errors may appear only then, when the last bytes are written.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_stdout = name == "-"
        try:
            self._stream: TextIO = sys.stdout if self._is_stdout else open(name, "w", encoding="utf-8")
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> UsageError:
        name = "standard output" if self._is_stdout else repr(self._name)
        return UsageError(f"cannot write {name}: {error.strerror}")

    def write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except BrokenPipeError:
            raise  # the reader has closed its pipe: `main` ends the program
        except OSError as error:
            raise self._refused(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if self._is_stdout:
                self._stream.flush()
            else:
                self._stream.close()
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._is_stdout:  # or Python reports the bytes once more at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if kind is None:  # else the first error is the one to report
                raise self._refused(error) from error


class _Outputs:
    """The files that the user has asked for.

    They are opened before the work begins, because a file that cannot be written would waste the work.
    """

    def __init__(
        self, stack: contextlib.ExitStack, report: str | None, results: str | None, timeline: str | None
    ) -> None:
        self._names = [name for name in (report, results, timeline) if name not in (None, "-")]
        self._report, self._results, self.timeline = (
            None if name is None else stack.enter_context(_Output(name)) for name in (report, results, timeline)
        )

    def left_out(self, files: list[File], skipped: list[Skipped]) -> tuple[list[File], list[Skipped]]:
        """Return the files without those that the demo writes, and the skipped files with them."""
        written = {os.path.realpath(name) for name in self._names if name is not None}
        left = [file for file in files if os.path.realpath(file.path) not in written] if written else files
        kept = {file.path for file in left}
        return left, [
            *skipped, *(Skipped(file.path, "written by this very run") for file in files if file.path not in kept)
        ]  # fmt: skip

    def result(self, line: str) -> None:
        if self._results is not None:
            self._results.write(line)

    def json(self, report: DemoReport) -> None:
        if self._report is not None:
            self._report.write(report.as_json())


def _run(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a command's coroutine and return its exit code, or the exit code for its error."""
    try:
        return asyncio.run(work())
    except (UsageError, InvalidArgumentError, InvalidTypeError) as error:
        return _failed(error, 2)
    except (DriverNotAvailableError, CompilerNotFoundError) as error:
        return _failed(error, 3)
    except (AiocudaError, ExceptionGroup) as error:
        return _failed(error, 4 if _is_fault(error) else 1)
    except KeyboardInterrupt:
        print("aiocuda: interrupted", file=sys.stderr)
        return 130


def _failed(error: Exception, code: int) -> int:
    print(f"aiocuda: {error}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(f"  {note}", file=sys.stderr)
    if isinstance(error, ExceptionGroup):
        for each in error.exceptions:
            print(f"  {type(each).__name__}: {each}", file=sys.stderr)
    return code


def _is_fault(error: Exception) -> bool:
    if isinstance(error, ExceptionGroup):
        return error.subgroup(DeviceFault) is not None
    return isinstance(error, DeviceFault)
