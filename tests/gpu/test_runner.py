"""`python -m tests.gpu` over a folder of tests: every kind of outcome is told from the others."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ALONE, ALONE_ON_A_GPU, FEW_ON_A_GPU
from tests.gpu.__main__ import files_of
from tests.gpu.running import Case, Queue
from tests.project.tree import PACKAGE, ROOT

#: The settings of pytest in the folder.
SETTINGS = """
    [pytest]
    addopts = -p no:randomly
    markers =
        alone: runs alone
        few_on_a_gpu: runs beside few others
        slow: takes long
        soak: is left out
        timeout(seconds): of pytest-timeout
"""

#: A test of each outcome. The folder `STATE` keeps what a test must know of its former runs.
OUTCOMES = """
    import faulthandler, os, signal, sys, time
    from pathlib import Path
    import pytest

    STATE = Path(__file__).with_name("state")
    STATE.mkdir(exist_ok=True)

    def first(name):
        \"\"\"True in the first run of a test.\"\"\"
        with (STATE / name).open("a") as file:
            file.write("x")
            return file.tell() == 1

    def test_passes(): pass
    def test_passes_after_the_others(): pass
    def test_fails():
        print("what it printed")
        assert 1 == 2, "always"
    def test_fails_once(): assert not first("once")
    def test_skips(): pytest.skip("no such thing here")
    @pytest.mark.xfail
    def test_is_expected_to_fail(): assert False
    def test_crashes_once():
        if first("crash"):
            os.kill(os.getpid(), signal.SIGKILL)
    @pytest.mark.alone
    def test_alone_fails_once(): assert not first("alone")
    @pytest.mark.alone
    @pytest.mark.parametrize("value", ["a b", "[x]", "é"])
    def test_alone_with_values(value): first("values")
    @pytest.mark.few_on_a_gpu
    def test_few_fails_once(): assert not first("few")
    @pytest.mark.soak
    def test_is_left_out(): assert False
"""

#: A child of the test that hangs has a lock for as long as it lives.
HANGS = """
    import subprocess, sys, threading
    from pathlib import Path

    CHILD = '''
    import fcntl, sys, time
    file = open(sys.argv[1], "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    print(flush=True)
    time.sleep(1000)
    '''

    def test_before(): pass
    def test_hangs():
        command = [sys.executable, "-c", CHILD, Path(__file__).with_name("lock")]
        subprocess.Popen(command, stdout=subprocess.PIPE).stdout.readline()
        Path(__file__).with_name("hangs").touch()
        threading.Event().wait()
    def test_after(): pass
"""


def wait_for_the_end_of_the_child(folder: Path) -> None:
    with (folder / "lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def write(folder: Path, **files: str) -> None:
    (folder / "pytest.ini").write_text(textwrap.dedent(SETTINGS))
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))


def command(folder: Path, *arguments: str) -> list[str]:
    options = ["--without-gpu", "-m", "not soak", "--processes", "2", "--json", str(folder / "results.json")]
    return [sys.executable, "-m", "tests.gpu", *options, *arguments, str(folder)]


def run(folder: Path, *arguments: str, status: int) -> tuple[dict[str, Any], str]:
    """Return the content of the JSON file and the output."""
    ended = subprocess.run(
        command(folder, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    return json.loads((folder / "results.json").read_text()), ended.stdout


def outcomes(found: dict[str, Any], test: str) -> list[tuple[str, str]]:
    return [(attempt["part"], attempt["outcome"]) for attempt in found["tests"][test]]


@pytest.mark.heavy
@pytest.mark.slow
def test_outcomes_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, test_outcomes=OUTCOMES, test_absent="import pytest; pytest.importorskip('absent_library')")
    found, output = run(tmp_path, status=1)
    name = "test_outcomes.py::test_"
    assert found["complete"]
    assert found["fails"] == [f"{name}fails"]
    assert sorted(found["fails only beside others"]) == [
        *(f"{name}crashes_once", f"{name}fails_once", f"{name}few_fails_once")
    ]
    assert found["fails only sometimes, alone"] == [f"{name}alone_fails_once"]
    assert found["skipped"] == {
        f"{name}skips": "Skipped: no such thing here",
        "test_absent.py": "Skipped: could not import 'absent_library': No module named 'absent_library'",
    }
    assert outcomes(found, f"{name}passes_after_the_others") == [("beside others", "passed")]
    assert outcomes(found, f"{name}is_expected_to_fail") == [("beside others", "xfailed")]
    assert outcomes(found, f"{name}crashes_once") == [("beside others", "failed"), ("again, alone", "passed")]
    assert outcomes(found, f"{name}fails") == [("beside others", "failed"), ("again, alone", "failed")]
    assert outcomes(found, f"{name}few_fails_once") == [("beside few others", "failed"), ("again, alone", "passed")]
    assert f"{name}is_left_out" not in found["tests"]
    assert (tmp_path / "state" / "values").read_text() == "xxx"
    assert found["not run"] == []
    assert found["parts"]["alone"]["passed"] == 3
    killed, failed = found["tests"][f"{name}crashes_once"][0], found["tests"][f"{name}fails"][1]
    assert killed["reason"] == "the process ended by SIGKILL"
    assert failed["reason"] == "AssertionError: always"
    assert "what it printed" in failed["text"]
    assert "AssertionError: always" in output
    assert "  1 × Skipped: no such thing here" in output


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize(("options", "status"), [((), 0), (("--strict",), 1)])
def test_exit_code_of_tests_that_fail_only_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], status: int
) -> None:
    monkeypatch.setenv("PYTEST_DEBUG_TEMPROOT", str(tmp_path))
    once = "from pathlib import Path\ndef test_once(tmp_path):\n    " + (
        "path = Path(__file__).with_name('ran')\n    ran = path.exists()\n    path.touch()\n    assert ran"
    )
    write(tmp_path, test_one=once)
    found, _ = run(tmp_path, *options, status=status)
    assert found["fails only beside others"] == ["test_one.py::test_once"]
    assert not list(tmp_path.glob("pytest-of-*"))  # where pytest removes the folders of other runs


@pytest.mark.heavy
@pytest.mark.slow
def test_hang_is_ended_with_its_children_and_the_rest_runs(tmp_path: Path) -> None:
    write(tmp_path, test_hangs=HANGS)
    found, _ = run(tmp_path, "--seconds", "10", status=1)
    assert found["fails"] == ["test_hangs.py::test_hangs"]
    assert outcomes(found, "test_hangs.py::test_after") == [("beside others", "passed")]
    hung = found["tests"]["test_hangs.py::test_hangs"][0]
    assert hung["reason"] == "the test took too long, and its process was killed"
    assert "in test_hangs" in hung["text"]  # the stack
    wait_for_the_end_of_the_child(tmp_path)


@pytest.mark.heavy
@pytest.mark.slow
def test_file_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    write(tmp_path, test_broken="import absent_library", test_fine="def test_passes(): pass")
    found, output = run(tmp_path, status=1)
    assert found["fails"] == ["test_broken.py"]
    assert outcomes(found, "test_fine.py::test_passes") == [("beside others", "passed")]
    assert "No module named 'absent_library'" in output


@pytest.mark.heavy
@pytest.mark.slow
def test_crash_after_the_last_test_is_a_failure(tmp_path: Path) -> None:
    crash = "import atexit, os\ndef test_one(): pass\ndef test_two(): atexit.register(os.abort)"
    write(tmp_path, test_crash=crash)
    found, _ = run(tmp_path, status=1)
    assert found["fails"] == ["test_crash.py::test_two"]
    assert found["tests"]["test_crash.py::test_two"][0]["reason"] == "after the last test, the process ended by SIGABRT"


@pytest.mark.heavy
@pytest.mark.slow
def test_hang_after_the_last_test_is_shown(tmp_path: Path) -> None:
    hang = "import atexit, threading\ndef wait_for_ever(): threading.Event().wait()\n"
    write(tmp_path, test_hang=f"{hang}def test_one(): atexit.register(wait_for_ever)")
    found, _ = run(tmp_path, "--seconds", "5", status=1)
    hung = found["tests"]["test_hang.py::test_one"][0]
    assert hung["reason"] == "after the last test, the test took too long, and its process was killed"
    assert "in wait_for_ever" in hung["text"]  # the stack


@pytest.mark.heavy
@pytest.mark.slow
def test_results_until_the_run_is_ended_are_kept(tmp_path: Path) -> None:
    """As where a machine is taken away."""
    write(tmp_path, test_hangs=HANGS, test_fine="import pytest\n@pytest.mark.slow\ndef test_passes(): pass")
    running = subprocess.Popen(command(tmp_path, "--processes", "1"), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "hangs").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)  # noqa: TID251 - between two checks of a condition with a deadline
        running.send_signal(signal.SIGTERM)
        output, _ = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 1
    assert "INCOMPLETE" in output
    assert not json.loads((tmp_path / "results.json").read_text())["complete"]
    wait_for_the_end_of_the_child(tmp_path)


@pytest.mark.slow
def test_missing_gpu_is_an_error() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "-m", "not soak", "--processes", "1", "tests/gpu/test_runner.py"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "ERROR: a GPU is required" in ended.stdout


@pytest.mark.parametrize("name", sorted({*ALONE, *ALONE_ON_A_GPU, *FEW_ON_A_GPU}))
def test_listed_tests_exist(name: str) -> None:
    file, *classes, function = name.partition("[")[0].split("::") if "::" in name else (name, "")
    assert (ROOT / file).exists()
    suite = (PACKAGE / "testing" / "conformance").glob("*.py") if classes else ()
    assert any(f"def {function}" in each.read_text(encoding="utf-8") for each in (ROOT / file, *suite))


CASE = Case("test_a.py::test", "/test_a.py::test", alone=False, few=False, slow=False, limit=None)


def cases(file: str, count: int, *, slow: bool = False) -> list[Case]:
    return [dataclasses.replace(CASE, id=f"{file}::{number}", slow=slow) for number in range(count)]


def test_queue_starts_with_slow_tests_and_hands_out_less_and_less() -> None:
    everything = [*cases("small", 5), *cases("large", 1000), *cases("slow", 90, slow=True)]
    queue = Queue(everything, 4)
    taken = []
    while chunk := queue.take():
        taken.append(chunk)
    assert Counter(case.id for chunk in taken for case in chunk) == Counter(case.id for case in everything)
    assert [case.file for chunk in taken for case in chunk] == ["slow"] * 90 + ["large"] * 1000 + ["small"] * 5
    work = [sum(case.work for case in chunk) for chunk in taken]
    assert max(work) <= sum(work) / 4
    assert work[0] > 2 * work[-1]
    assert len(taken) < 16  # each costs the start of a process


def test_files_are_those_of_the_folders(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("test_a.py", "inner/test_b.py", "inner/helper.py"):
        (tmp_path / name).touch()
    found = files_of([tmp_path, tmp_path / "test_a.py"])
    assert sorted(file.name for file in found) == ["test_a.py", "test_b.py"]
