"""``aiocuda trace``: run a script, and record every device that it opens."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand

from ..device import Device
from ..errors import AiocudaError
from ..lowlevel import OPEN_DEVICES
from ..observe import COLOURS, Recording, Timeline, draw, merged, page_of, shown, trace_of
from ._report import printable

__all__ = ["TraceCommand", "trace"]

#: Files whose frames the traceback of a script leaves out: they are not part of the script.
_OWN_FRAMES: Final = frozenset({__file__, runpy.__file__, "<frozen runpy>"})


class _Output(NamedTuple):
    """A file to write, and the function that makes its text of the recordings and a title."""

    option: str
    path: Path
    text: Callable[[Sequence[Recording], str], str]


class _RefusedError(Exception):
    """The arguments of the command are wrong. The exit code is 2."""


class TraceCommand(TyperCommand):
    """The command, with a hint for options of the script that do not follow ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments that are left after parsing."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # The class of this error is click's, or that of a copy of click in typer.
            if type(error).__name__ == "NoSuchOption" and isinstance(getattr(error, "message", None), str):
                error.message += ". Options of the script follow --"  # type: ignore[attr-defined]
            raise


def trace(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python program; it runs as __main__.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="The arguments of the script, after --.")
    ] = None,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a page for a browser.")] = None,
    svg: Annotated[str | None, typer.Option("--svg", metavar="FILE", help="Draw the streams.")] = None,
    perfetto: Annotated[
        str | None, typer.Option("--perfetto", metavar="FILE", help="Write a trace for https://ui.perfetto.dev.")
    ] = None,
) -> int:
    """Run a script, and record the operations of every device that it opens."""
    try:
        outputs = _checked(script, html, svg, perfetto)
    except _RefusedError as error:
        print(f"aiocuda: {error}", file=sys.stderr)
        return 2
    tracer = ProcessTracer()
    report = _Report(tracer, outputs, f"aiocuda trace: {os.path.basename(script)}")
    atexit.register(report.write)  # before the handlers of the script, so that it is called after them
    tracer.start()
    code = _run(script, arguments or [])
    if tracer.is_recording or _others_run():
        return code  # threads of the script go on: the interpreter waits for them, then for this function
    written = report.write()
    atexit.unregister(report.write)
    return code if written or code else 1


def _checked(script: str, html: str | None, svg: str | None, perfetto: str | None) -> list[_Output]:
    """Return the files to write. Raise `_RefusedError` for what would fail only after the script has run."""
    try:
        with open(script, "rb"):
            pass
    except IsADirectoryError:
        raise _RefusedError(f"{printable(script)!r} is a folder: name the script in it") from None
    except OSError as error:
        raise _RefusedError(f"cannot read {printable(script)!r}: {error.strerror}: name a Python program") from error
    options = (("--html", html, page_of), ("--svg", svg, _picture), ("--perfetto", perfetto, _trace))
    outputs = [
        _Output(option, Path(_file_name(option, name)).absolute(), text)
        for option, name, text in options
        if name is not None
    ]
    taken: dict[str, str] = {os.path.realpath(script): "SCRIPT"}
    for each in outputs:
        other = taken.setdefault(os.path.realpath(each.path), each.option)
        if other != each.option:
            name = printable(str(each.path))
            raise _RefusedError(f"{other} and {each.option} are the same file, {name!r}: name two files")
    _check_writable(outputs)
    return outputs


def _file_name(option: str, name: str) -> str:
    if name == "-":
        raise _RefusedError(f"{option} - would write into the output of the script: name a file")
    if not name:
        raise _RefusedError(f"{option} takes the name of a file, which is empty here")
    return name


def _check_writable(outputs: Sequence[_Output]) -> None:
    """Open each file. A file that exists keeps its content until the script has run."""
    created: list[Path] = []
    for each in outputs:
        is_new = not each.path.exists()
        try:
            with open(each.path, "a", encoding="utf-8"):
                pass
        except OSError as error:
            for path in created:
                path.unlink()
            raise _RefusedError(
                f"cannot write {printable(str(each.path))!r}: {error.strerror}: {each.option} takes a file in a folder "
                "that exists, and that you may write"
            ) from error
        if is_new:
            created.append(each.path)


def _picture(recordings: Sequence[Recording], title: str) -> str:
    return draw(merged(recordings), title)


def _trace(recordings: Sequence[Recording], title: str) -> str:
    return trace_of(recordings)


def _run(script: str, arguments: Sequence[str]) -> int:
    """Run the script as ``python SCRIPT ARGS`` does, and return its exit code."""
    sys.argv[:] = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    try:
        with _ending_on_sigterm():
            runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("aiocuda: interrupted", file=sys.stderr)
        return 130
    except BaseException as error:  # noqa: BLE001 - as the interpreter does at the end of a program
        own = _without_own_frames(error.__traceback__)
        traceback.print_exception(type(error), error.with_traceback(own), own)
        return 1
    return 0


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the script by `SystemExit`, with a shell's exit code, unless the script handles it itself."""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end) if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else None
    try:
        yield
    finally:
        if before is not None and signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, before)


def _without_own_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename in _OWN_FRAMES:
        frames = frames.tb_next
    return frames


def _others_run() -> bool:
    """Return True if threads of the script go on, for which the interpreter waits at its exit."""
    here = threading.current_thread()
    return any(each is not here and each.is_alive() and not each.daemon for each in threading.enumerate())


class ProcessTracer:
    """Records the devices that are opened from `start` to `finish`, in all loops and threads, until they are closed."""

    def __init__(self) -> None:
        self.problems: list[str] = []  #: why devices are not recorded
        self._open: dict[Device, Timeline] = {}
        self._finished: list[Recording] = []
        self._changing = threading.Lock()

    def start(self) -> None:
        """Begin with the next device that is opened."""
        OPEN_DEVICES.add_observer(self)

    @property
    def is_recording(self) -> bool:
        """True if a device is open."""
        return bool(self._open)

    async def opened(self, device: Device) -> None:
        """Begin to record a device."""
        timeline = Timeline(device)
        try:
            await timeline.__aenter__()
        except AiocudaError as error:  # the program goes on without it
            self.problems.append(f"{device.name} is not recorded: {error}")
            return
        with self._changing:
            self._open[device] = timeline

    def closing(self, device: Device) -> None:
        """End the recording of a device."""
        with self._changing:
            timeline = self._open.pop(device, None)
        if timeline is not None:
            timeline.stop()
            self._finished.append(timeline.recording())

    def finish(self) -> list[Recording]:
        """End. Return all recordings, in the order in which they began. Those of open devices end now."""
        OPEN_DEVICES.remove_observer(self)
        for device in tuple(self._open):
            self.closing(device)
        return sorted(self._finished, key=lambda each: each.host_zero)


class _Report:
    """The files and the summary of one run, which `write` writes once."""

    def __init__(self, tracer: ProcessTracer, outputs: Sequence[_Output], title: str) -> None:
        self._tracer = tracer
        self._outputs = outputs
        self._title = title
        self._is_written = False
        self._process = os.getpid()

    def write(self) -> bool:
        """Write the files, or print the summary if there are none. Return False if a file cannot be written."""
        if self._is_written or os.getpid() != self._process:  # a fork of the script exits here, too
            return True
        self._is_written = True
        recordings = self._tracer.finish()
        for problem in self._tracer.problems:
            print(f"aiocuda: {printable(problem)}", file=sys.stderr)
        if not recordings:
            print("aiocuda: the script has opened no device: nothing was recorded", file=sys.stderr)
        title = ", ".join([self._title, *dict.fromkeys(each.device for each in recordings)])
        succeeded = True
        for output in self._outputs:
            try:
                output.path.write_text(output.text(recordings, title), encoding="utf-8")
            except OSError as error:
                print(f"aiocuda: cannot write {printable(str(output.path))!r}: {error.strerror}", file=sys.stderr)
                succeeded = False
        if not self._outputs:
            for number, recording in enumerate(recordings, 1):
                print("\n".join(_summary(recording, number)), file=sys.stderr)
        return succeeded


def _summary(recording: Recording, number: int) -> list[str]:
    """Return the lines about one device: for each stream its operations, their time, and their share of all time."""
    counts: dict[str, int] = {}
    busy: dict[str, float] = {}
    begin = min((span.start_us for span in recording.spans), default=0.0)
    total = max((span.end_us for span in recording.spans), default=0.0) - begin
    for span in recording.spans:
        counts[span.stream] = counts.get(span.stream, 0) + 1
        busy[span.stream] = busy.get(span.stream, 0.0) + (span.end_us - span.start_us) * (span.kind in COLOURS)
    names = {stream: printable(shown(stream, 40)) for stream in counts}
    width = max([len("stream"), *map(len, names.values())])
    lines = [
        f"device {number}: {recording.device}, {total / 1e3:.3f} ms from the first operation to the last",
        f"  {'stream':{width}}  operations  busy ms  at work",
    ]
    for each in counts:
        share = busy[each] / total if total else 0.0
        lines.append(f"  {names[each]:{width}}  {counts[each]:10,}  {busy[each] / 1e3:7.3f}  {share:7.0%}")
    return lines
