"""R8: ``aiocuda trace`` runs a script, and records its devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.cli.programs import STRICT, aiocuda, environment, started
from tests.helpers import PATIENCE
from tests.observe.test_page import Page
from tests.observe.test_trace import read

pytest.importorskip("typer")
pytest.importorskip("rich")

pytestmark = pytest.mark.slow

#: A device with one labelled fill on a stream.
WORK = """
    import asyncio, sys
    import aiocuda

    async def work(name="stream", label="request 17"):
        async with aiocuda.open_device(driver="host") as device:
            async with device.stream(name=name) as stream:
                with aiocuda.label(label):
                    await stream.fill(stream.empty(4), 1)
"""


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(WORK) + textwrap.dedent(text), encoding="utf-8")
    return path


def labels(path: Path) -> list[tuple[str, str]]:
    """The streams of the fills in a trace, and their labels."""
    found = read(path.read_text(encoding="utf-8"))
    return [(found.row(fill), fill["args"]["label"]) for fill in found.of("fill")]


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_options_are_before_or_after_the_script(tmp_path: Path, first: int) -> None:
    path = script(tmp_path, "asyncio.run(work())\nprint(sys.argv[1:])")
    files = {option: tmp_path / f"out.{option}" for option in ("html", "svg", "perfetto")}
    options = [word for option, file in files.items() for word in (f"--{option}", str(file))]
    order = [*options[: 2 * first], str(path), *options[2 * first :]]
    ran = aiocuda("trace", *order, "--", "--html", "other", "--", "-x", "é")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "['--html', 'other', '--', '-x', 'é']\n"
    assert labels(files["perfetto"]) == [("stream", "request 17")]
    (rect,) = ET.fromstring(files["svg"].read_text(encoding="utf-8")).iter("{http://www.w3.org/2000/svg}rect")
    assert (rect.attrib["data-stream"], rect.attrib["data-label"]) == ("stream", "request 17")
    page = Page(files["html"].read_text(encoding="utf-8"))
    assert page.data["title"] == "aiocuda trace: script.py, host 0 (host driver)"
    assert "request 17" in page.data["texts"]


def test_the_script_runs_as_the_main_program(tmp_path: Path) -> None:
    """It sees the same as under ``python SCRIPT``."""
    (tmp_path / "beside.py").write_text("VALUE = 5", encoding="utf-8")
    text = """
        import beside, __main__
        if __name__ == "__main__":
            print(beside.VALUE, sys.argv, sys.path[0], __main__.work is work, __file__, __spec__, __package__ or None)
            print("error", file=sys.stderr)
    """
    path = script(tmp_path, text)
    plain = subprocess.run(
        [sys.executable, *STRICT, path, "a", "b"], env=environment(), capture_output=True, text=True, check=True
    )
    ran = started("trace", path, "--", "a", "b")
    assert ran.stdout == plain.stdout
    assert ran.stderr == plain.stderr + "aiocuda: the script has opened no device: nothing was recorded\n"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("raise KeyboardInterrupt", 130, "aiocuda: interrupted\n"),
        ("work(1, 2, 3)", 1, "TypeError: work() takes from 0 to 2 positional arguments but 3 were given\n"),
    ],
)
def test_the_exit_code_is_that_of_the_script_and_the_files_are_written(
    tmp_path: Path, end: str, code: int, words: str
) -> None:
    path, file = script(tmp_path, f"asyncio.run(work())\n{end}\n"), tmp_path / "trace.json"
    ran = aiocuda("trace", path, "--perfetto", file)
    assert (ran.returncode, ran.stdout) == (code, "")
    assert ran.stderr.endswith(words)
    assert bool(ran.stderr) == bool(words)
    assert "runpy" not in ran.stderr
    assert "_trace_command" not in ran.stderr
    assert labels(file) == [("stream", "request 17")]


@pytest.mark.heavy
def test_a_script_with_a_wrong_syntax(tmp_path: Path) -> None:
    ran = aiocuda("trace", script(tmp_path, "def :\n"))
    assert ran.returncode == 1
    assert "SyntaxError: invalid syntax\n" in ran.stderr


@pytest.mark.heavy
def test_without_a_file_a_summary_goes_to_standard_error(tmp_path: Path) -> None:
    ran = aiocuda("trace", script(tmp_path, "asyncio.run(work('left'))\nasyncio.run(work('right'))\nprint('out')"))
    assert (ran.returncode, ran.stdout) == (0, "out\n")
    assert [line.split()[:2] for line in ran.stderr.splitlines()] == [
        ["device", "1:"],
        ["stream", "operations"],
        ["left", "1"],
        ["device", "2:"],
        ["stream", "operations"],
        ["right", "1"],
    ]


def test_every_device_is_recorded(tmp_path: Path) -> None:
    """Of several loops and threads, by every way to open one, closed by each way or never."""
    text = """
        import sys, threading
        import numpy as np
        from aiocuda.data import sync_loader

        async def main():
            await asyncio.gather(work("a"), work("b"))
            async with aiocuda.ManagedContext(driver="host") as context:
                async with context.device.stream(name="c") as stream:
                    await stream.fill(stream.empty(4), 1, label="l")
            device = await aiocuda.open_device(driver="host")
            stream = device.stream(name="d")
            await stream.fill(stream.empty(4), 1, label="l")
            await device.aclose()
            try:
                async with aiocuda.open_device(driver="host") as device:
                    stream = device.stream(name="e")
                    await stream.fill(stream.empty(4), 1, label="l")
                    raise ZeroDivisionError
            except ZeroDivisionError:
                pass

        asyncio.run(main())
        with sync_loader([np.zeros(4, np.float32)] * 2, driver="host", batch_size=2) as loader:
            assert len(list(loader)) == 1

        def later():
            asyncio.run(work("thread"))

        thread = threading.Thread(target=later)
        thread.start()
        if sys.version_info[:3] in ((3, 12, 0), (3, 12, 1)):  # none starts a thread after the end of the main one
            thread.join()
    """
    path, file, picture = script(tmp_path, text), tmp_path / "trace.json", tmp_path / "trace.svg"
    ran = aiocuda("trace", path, "--perfetto", file, "--svg", picture)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert sorted(stream for stream, _ in labels(file)) == ["a", "b", "c", "d", "e", "thread"]
    found = read(file.read_text(encoding="utf-8"))
    devices = [process for process in found.processes if process % 2]
    assert len(devices) == 7
    assert found.of("upload")  # of the loader
    rects = ET.fromstring(picture.read_text(encoding="utf-8")).iter("{http://www.w3.org/2000/svg}rect")
    streams = {rect.attrib["data-stream"].partition(": ") for rect in rects}
    assert {number for number, _, _ in streams} == {str(number) for number in range(1, 8)}
    assert {name for _, _, name in streams} >= {"a", "b", "c", "d", "e", "thread"}


def test_requests_of_a_service_are_recorded(tmp_path: Path) -> None:
    """The script knows nothing of the timeline."""
    text = """
        from aiocuda.serving import MicroBatcher

        async def infer(batch):
            await asyncio.sleep(0.01)
            return batch.items

        async def main():
            async with aiocuda.open_device(driver="host") as device:
                async with MicroBatcher(infer, max_batch_size=2, batch_wait_timeout_s=0, device=device) as batcher:
                    await asyncio.gather(*[batcher.submit(item) for item in range(4)])

        asyncio.run(main())
    """
    file = tmp_path / "trace.json"
    ran = aiocuda("trace", script(tmp_path, text), "--perfetto", file)
    assert (ran.returncode, ran.stderr) == (0, "")
    found = read(file.read_text(encoding="utf-8"))
    assert sorted(each["args"]["request"] for each in found.of("answered")) == [1, 2, 3, 4]
    assert [each["args"]["requests"] for each in found.of("batch")] == [2, 2]
    first = min(found.of("batch"), key=lambda batch: batch["ts"])
    ends = [each["ts"] + each["dur"] for each in found.of("queued")]
    assert min(ends) < first["ts"] + first["dur"] <= max(ends)
    assert len([flow for flow in found.flows if flow[0] == "batch"]) == 4


@pytest.mark.heavy
def test_a_device_that_the_script_leaves_open_is_recorded(tmp_path: Path) -> None:
    text = """
        async def main():
            global device, stream
            device = await aiocuda.open_device(driver="host")
            stream = device.stream(name="open")
            await stream.fill(stream.empty(4), 1, label="l")
        import warnings
        warnings.simplefilter("ignore")
        asyncio.run(main())
    """
    file = tmp_path / "trace.json"
    ran = aiocuda("trace", script(tmp_path, text), "--perfetto", file)
    assert ran.returncode == 0
    assert labels(file) == [("open", "l")]


@pytest.mark.heavy
def test_a_relative_file_and_a_script_that_changes_its_folder_and_forks(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    text = """
        import os
        asyncio.run(work())
        os.chdir("elsewhere")
        child = os.fork()
        if not child:
            sys.exit(0)
        os.waitpid(child, 0)
    """
    script(tmp_path, text)
    ran = subprocess.run(
        [sys.executable, "-m", "aiocuda", "trace", "script.py", "--perfetto", "trace.json"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert labels(tmp_path / "trace.json") == [("stream", "request 17")]
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code", "message"), [(signal.SIGINT, 130, "aiocuda: interrupted\n"), (signal.SIGTERM, 143, "")]
)
def test_a_signal_ends_the_script_and_the_files_are_written(
    tmp_path: Path, number: signal.Signals, code: int, message: str
) -> None:
    text = """
        async def main():
            async with aiocuda.open_device(driver="host") as device:
                async with device.stream(name="s") as stream:
                    await stream.fill(stream.empty(4), 1, label="l")
                    print("ready", flush=True)
                    await asyncio.Event().wait()
        asyncio.run(main())
    """
    file = tmp_path / "trace.json"
    process = subprocess.Popen(
        [sys.executable, *STRICT, "-m", "aiocuda", "trace", str(script(tmp_path, text)), "--perfetto", str(file)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (code, message)
    assert labels(file) == [("s", "l")]


@pytest.mark.heavy
def test_a_refused_run_leaves_the_script_and_the_files_alone(tmp_path: Path) -> None:
    path = script(tmp_path, "raise SystemExit('it ran')")
    kept = tmp_path / "kept.html"
    kept.write_text("before", encoding="utf-8")
    new, missing = tmp_path / "new.svg", tmp_path / "missing" / "x"
    wrong: dict[tuple[str, ...], str] = {
        ("nothing.py",): "cannot read 'nothing.py': No such file or directory: name a Python program",
        (str(tmp_path),): "is a folder: name the script in it",
        (str(path), "--html", str(missing)): "No such file or directory: --html takes a file in a folder that exists",
        (str(path), "--svg", str(new), "--html", str(tmp_path)): "Is a directory: --html takes a file",
        (str(path), "--svg", str(kept), "--html", f"{tmp_path}/./kept.html"): "--html and --svg are the same file",
        (str(path), "--perfetto", str(path)): "SCRIPT and --perfetto are the same file",
        (str(path), "--html", "-"): "--html - would write into the output of the script: name a file",
        (str(path), "--svg", ""): "--svg takes the name of a file, which is empty here",
        (str(path), "--epochs", "3"): "No such option: --epochs. Options of the script follow --",
        (): "Missing argument",
    }
    for arguments, words in wrong.items():
        ran = aiocuda("trace", *arguments)
        assert (ran.returncode, ran.stdout) == (2, ""), arguments
        assert words in ran.stderr, (arguments, ran.stderr)
        assert "it ran" not in ran.stderr
    assert kept.read_text(encoding="utf-8") == "before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept.html", "script.py"]


@pytest.mark.heavy
def test_a_file_that_cannot_be_written_at_the_end(tmp_path: Path) -> None:
    """Also when the interpreter exits, because a thread of the script goes on."""
    file = tmp_path / "out" / "trace.json"
    file.parent.mkdir()
    text = f"import shutil\nasyncio.run(work())\nshutil.rmtree({os.fspath(file.parent)!r})\n"
    ran = aiocuda("trace", script(tmp_path, text), "--perfetto", file)
    assert (ran.returncode, ran.stderr) == (1, f"aiocuda: cannot write {str(file)!r}: No such file or directory\n")


@pytest.mark.heavy
def test_labels_of_every_kind_reach_the_files(tmp_path: Path) -> None:
    text = """
        asyncio.run(work("</script>\\x1b[31m\\ud800", '"<script>alert(1)</script>\\x00\\udfff' + 100_000 * "x"))
    """
    outputs = [tmp_path / name for name in ("page.html", "picture.svg", "trace.json")]
    names = zip(("--html", "--svg", "--perfetto"), outputs, strict=True)
    ran = aiocuda("trace", script(tmp_path, text), *(str(word) for pair in names for word in pair))
    assert (ran.returncode, ran.stderr) == (0, "")
    for output in outputs:
        assert "\x1b" not in output.read_text(encoding="utf-8")
    assert len(labels(outputs[2])[0][1]) <= 1000
    ran = aiocuda("trace", script(tmp_path, text))
    assert ran.returncode == 0
    assert "\x1b" not in ran.stderr


@pytest.mark.heavy
def test_help_needs_no_script() -> None:
    shown = aiocuda("trace", "--help", COLUMNS="120", NO_COLOR="1").stdout
    assert all(word in shown for word in ("SCRIPT", "--html", "--svg", "--perfetto", "-- ARGS"))
    assert json.dumps("trace")[1:-1] in aiocuda("--help").stdout
