"""Each check of ``aiocuda doctor``, and the problems that it finds."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import multiprocessing.spawn
import os
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("rich")

from aiocuda._core import build
from aiocuda._core._form import Form
from aiocuda.cli._doctor import CHECKS, _finding, _settings_checks, diagnose
from aiocuda.cli._doctor._driver_checks import (
    REQUIRED,
    REQUIRED_FOR_CUDA,
    check_driver,
    check_nvrtc,
    check_queues,
    check_versions,
)
from aiocuda.cli._doctor._finding import Finding, Problem, Result
from aiocuda.cli._doctor._machine import Machine
from aiocuda.cli._doctor._settings_checks import (
    VARIABLES,
    check_cache,
    check_core,
    check_environment,
    check_event_loop,
)
from aiocuda.cli._doctor._time_checks import check_gil, check_timers
from aiocuda.driver.cuda import ProgramCache
from aiocuda.errors import InvalidArgumentError
from tests.project.tree import ROOT

MACHINE = Machine("host", None)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of aiocuda, and a cache of the test."""
    for name in [name for name in os.environ if name.startswith(("AIOCUDA_", "CUDA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AIOCUDA_CACHE_DIR", str(tmp_path / "cache"))


def found_by(check: Callable[[Machine], Awaitable[Result]], machine: Machine = MACHINE) -> Finding:
    async def run() -> Finding:
        return Finding.of("name", await check(machine))

    return asyncio.run(run())


# -- the core ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", ["host", "cuda"])
def test_core_that_is_older_than_its_source_is_named(used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = Form("python", "the compiled core is older than its source", ())
    monkeypatch.setattr(_settings_checks, "form_of_core", lambda: stale)
    monkeypatch.setattr(build, "why_not_compiled", lambda: None)
    finding = found_by(check_core, Machine("auto", None, used=used))
    assert "the compiled core is older than its source: python -m aiocuda._core.build" in finding.detail
    assert finding.ok is (used == "host")


def test_reason_why_the_core_is_not_compiled_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_settings_checks, "form_of_core", lambda: Form("python", "the core is not compiled", ()))
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    finding = found_by(check_core, Machine("auto", None, used="host"))
    assert f"the core is not compiled: {build.why_not_compiled()}" in finding.detail


def test_core_in_python_that_was_asked_for_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_settings_checks, "form_of_core", lambda: Form("python", None, ()))
    finding = found_by(check_core, Machine("cuda", None, used="cuda"))
    assert (finding.ok, finding.detail) == (True, "the core is in Python")


# -- the kernel cache --------------------------------------------------------------------------------------------------

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="on Windows nothing is cached")


@pytest.fixture
def cache() -> ProgramCache:
    cache = ProgramCache.default()
    assert cache is not None
    assert cache.put("first", b"kernel")
    return cache


@POSIX
def test_a_sound_cache(cache: ProgramCache) -> None:
    finding = found_by(check_cache)
    assert finding.ok
    assert finding.detail == f"{cache.directory} (mode 0700) has 1 kernels, 0.0 MB"


@POSIX
def test_a_cache_that_does_not_exist_is_no_problem() -> None:
    finding = found_by(check_cache)
    assert finding.ok
    assert "does not exist yet" in finding.detail


@POSIX
def test_a_cache_that_others_may_write(cache: ProgramCache) -> None:
    os.chmod(cache.directory, 0o777)
    finding = found_by(check_cache)
    assert not finding.ok
    assert "others may write it (mode 0777)" in finding.detail
    assert f"chmod 700 {cache.directory}" in finding.cure


@POSIX
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a directory away")
def test_a_cache_of_another_user(cache: ProgramCache) -> None:
    os.chown(cache.directory, 65534, 65534)
    finding = found_by(check_cache)
    assert not finding.ok
    assert "user 65534 owns it" in finding.detail
    assert "AIOCUDA_CACHE_DIR" in finding.cure


@POSIX
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root can write every directory")
def test_a_cache_that_cannot_be_written(cache: ProgramCache) -> None:
    os.chmod(cache.directory, 0o500)
    finding = found_by(check_cache)
    assert not finding.ok
    assert "cannot be written" in finding.detail
    assert "chmod u+rwx" in finding.cure


@POSIX
def test_ignored_entries_of_the_cache(cache: ProgramCache) -> None:
    folder = Path(cache.directory)
    (folder / "changed").write_bytes((folder / "first").read_bytes() + b"more")
    (folder / "link").symlink_to("first")
    finding = found_by(check_cache)
    assert not finding.ok
    assert "2 entries are ignored: changed (its content is not what was stored), link (" in finding.detail
    assert "has 1 kernels" in finding.detail
    assert finding.cure.startswith(f"rm -r {cache.directory}")
    assert (folder / "changed").exists()


@POSIX
@pytest.mark.parametrize(
    ("below", "words"), [("", "is not used: Not a directory"), ("sub", "is not used: Not a directory")]
)
def test_a_file_in_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, below: str, words: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("AIOCUDA_CACHE_DIR", str(tmp_path / "file" / below))
    finding = found_by(check_cache)
    assert not finding.ok
    assert "is not used: Not a directory" in finding.detail
    assert finding.cure.startswith("set AIOCUDA_CACHE_DIR")


@POSIX
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="this system has no folder in which nobody can write")
def test_a_cache_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_CACHE_DIR", "/proc/self/fdinfo/cache")
    finding = found_by(check_cache)
    assert not finding.ok
    assert "cannot be made in /proc/self/fdinfo" in finding.detail
    assert "AIOCUDA_CACHE_DIR" in finding.cure


# -- variables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("AIOCUDA_DRIVER", "gpu", "set AIOCUDA_DRIVER to auto, cuda, host or simulated, or unset it"),
        ("AIOCUDA_GIL", "maybe", "set AIOCUDA_GIL to keep or release, or unset it"),
        ("AIOCUDA_GIL", "", "set AIOCUDA_GIL to keep or release, or unset it"),
        ("AIOCUDA_CHECK", "yes", "set AIOCUDA_CHECK to 0 or 1, or unset it"),
        ("AIOCUDA_ASYNC", "\udcff\n", "set AIOCUDA_ASYNC to 0 or 1, or unset it"),
        ("AIOCUDA_DRIVR", "host", "unset AIOCUDA_DRIVR, or set AIOCUDA_DRIVER instead"),
        ("AIOCUDA_XYZZY", "1", "unset AIOCUDA_XYZZY"),
        ("CUDA_LAUNCH_BLOCKING", "1", "unset CUDA_LAUNCH_BLOCKING"),
    ],
)
def test_a_wrong_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str, cure: str) -> None:
    monkeypatch.setenv(name, value)
    finding = found_by(check_environment)
    assert (finding.ok, finding.cure) == (False, cure)
    assert name in finding.detail


def test_right_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AIOCUDA_DRIVER": "host", "AIOCUDA_GIL": "release", "AIOCUDA_CHECK": ""}.items():
        monkeypatch.setenv(name, value)
    finding = found_by(check_environment)
    assert finding.ok
    assert "AIOCUDA_GIL='release'" in finding.detail


def test_the_variables_are_those_of_the_documentation() -> None:
    page = (ROOT / "docs" / "how-to" / "deploy.md").read_text("utf-8")
    assert set(re.findall(r"^\| `(AIOCUDA_\w+)` \|", page, re.MULTILINE)) == VARIABLES.keys()


@pytest.mark.parametrize(("value", "queues"), [("8", 8), ("1", 1), ("many", 8), ("", 8)])
def test_few_hardware_queues(value: str, queues: int) -> None:
    finding = found_by(check_queues, Machine("auto", value))
    assert not finding.ok
    assert f"CUDA_DEVICE_MAX_CONNECTIONS={value!r} gives CUDA {queues} hardware queues" in finding.detail
    assert finding.cure.startswith("set CUDA_DEVICE_MAX_CONNECTIONS=32")


@pytest.mark.parametrize("value", [None, "32", "64"])
def test_enough_hardware_queues(value: str | None) -> None:
    assert found_by(check_queues, Machine("auto", value)).ok


@pytest.mark.parametrize("installed", [[], ["torch"], ["torch", "numba-cuda"]])
def test_libraries_that_start_cuda_themselves_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: list[str]
) -> None:
    """The command uses none of them, so it cannot see what a program has."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for name in installed:
        install(tmp_path, name, "2.9")
    finding = found_by(check_queues, Machine("auto", None))
    assert finding.ok
    assert ("has 8, unless its environment sets CUDA_DEVICE_MAX_CONNECTIONS=32" in finding.detail) == bool(installed)
    assert " or ".join(installed) in finding.detail


# -- packages ----------------------------------------------------------------------------------------------------------


def test_required_versions_are_those_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    pathfinder = "cuda-pathfinder"
    for name, least in {**REQUIRED, pathfinder: REQUIRED_FOR_CUDA[pathfinder]}.items():
        assert re.search(rf'"{name}>={re.escape(least)}[";]', project)


def install(folder: Path, name: str, version: str) -> None:
    """What pip writes for a package, as far as versions go."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_package_that_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path, "numpy", "1.26.4")
    monkeypatch.syspath_prepend(tmp_path)
    finding = found_by(check_versions)
    assert not finding.ok
    assert "numpy 1.26.4 is older than 2.1" in finding.detail
    assert finding.cure == 'pip install "numpy>=2.1"'


def test_a_package_for_a_newer_cuda_than_the_drivers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path, "nvidia-cuda-nvrtc", "14.1.2")
    monkeypatch.syspath_prepend(tmp_path)
    finding = found_by(check_versions, Machine("cuda", None, used="cuda", versions={"cuda-driver": "13.2"}))
    assert not finding.ok
    assert "nvidia-cuda-nvrtc 14.1.2 is made for CUDA 14, and the driver supports CUDA 13.2" in finding.detail
    assert 'pip install "nvidia-cuda-nvrtc<14"' in finding.cure


@pytest.fixture
def no_python() -> Iterator[None]:
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable("/nonexistent/python")
    yield
    multiprocessing.set_executable(before)


@pytest.mark.usefixtures("no_python")
def test_no_python_for_the_compiler() -> None:
    pytest.importorskip("cuda.pathfinder")
    finding = found_by(check_nvrtc, Machine("cuda", None))
    if "not installed" in finding.detail:
        pytest.skip("NVRTC is not installed")
    assert not finding.ok
    assert "/nonexistent/python cannot be started" in finding.detail
    assert "multiprocessing.set_executable" in finding.cure
    assert found_by(check_nvrtc).ok  # the host driver needs no compiler


# -- a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("visible", "ok"), [(None, False), ("0", False), ("", True), ("-1", True)])
def test_a_gpu_without_a_driver_is_a_problem_unless_it_is_hidden(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, ok: bool
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    async def check(_: Machine) -> Result:
        host = await Machine.look("host")
        reason = "no NVIDIA driver: libcuda.so.1: no such file"
        machine = dataclasses.replace(host, asked="auto", gpu_files=("/dev/nvidia0",), reason=reason)
        assert machine.needs_cuda is not ok
        return await check_driver(machine)

    finding = found_by(check)
    assert finding.ok is ok
    assert "no NVIDIA driver: libcuda.so.1" in finding.detail
    if not ok:
        assert "there is a GPU (/dev/nvidia0), and CUDA is not available" in finding.detail
        assert ("R580" if visible is None else "CUDA_VISIBLE_DEVICES") in finding.cure


# -- times -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def computing(threads: int) -> Iterator[None]:
    """Threads that compute in Python and never wait."""
    stop = threading.Event()

    def compute() -> None:
        for _ in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
            sum(range(100))

    started = [threading.Thread(target=compute) for _ in range(threads)]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in started:
            thread.join()


@pytest.mark.heavy
@pytest.mark.slow
def test_threads_that_compute_keep_the_gil() -> None:
    with computing(20):
        finding = found_by(check_gil)
    assert not finding.ok
    assert "for the GIL, more than 20 ms" in finding.detail
    assert "processes" in finding.cure


@pytest.mark.heavy
@pytest.mark.slow
def test_a_long_switch_interval() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.08)
    try:
        finding = found_by(check_gil)
    finally:
        sys.setswitchinterval(before)
    assert not finding.ok
    assert "sys.getswitchinterval() is 80 ms" in finding.detail
    assert finding.cure == "sys.setswitchinterval(0.005)"


@pytest.mark.slow
def test_timers_of_a_blocked_loop_are_late() -> None:
    async def check(machine: Machine) -> Result:
        blocking = asyncio.create_task(block())
        try:
            return await check_timers(machine)
        finally:
            blocking.cancel()

    async def block() -> None:
        while True:
            end = time.perf_counter() + 0.02
            while time.perf_counter() < end:
                pass
            await asyncio.sleep(0)

    finding = found_by(check)
    assert not finding.ok
    assert "timers are later than the bounds" in finding.detail
    assert "renice" in finding.cure


# -- the event loop ----------------------------------------------------------------------------------------------------


def test_debug_mode_of_asyncio() -> None:
    async def check(machine: Machine) -> Result:
        asyncio.get_running_loop().set_debug(True)
        return await check_event_loop(machine)

    finding = found_by(check)
    assert not finding.ok
    assert "unset PYTHONASYNCIODEBUG" in finding.cure
    assert found_by(check_event_loop).ok


class WithoutDescriptors(asyncio.SelectorEventLoop):
    """As the loop of Windows."""

    def add_reader(self, *arguments: object) -> None:
        raise NotImplementedError


def test_a_loop_that_watches_no_descriptors() -> None:
    with asyncio.Runner(loop_factory=WithoutDescriptors) as runner:
        finding = Finding.of("event_loop", runner.run(check_event_loop(MACHINE)))
    assert not finding.ok
    assert "does not watch descriptors" in finding.detail
    assert "SelectorEventLoop" in finding.cure


# -- the command as a whole --------------------------------------------------------------------------------------------


def test_an_error_of_a_check_is_a_finding() -> None:
    async def broken(machine: Machine) -> Result:
        raise OSError("the disk is on fire")

    finding = asyncio.run(_finding("cache", broken, MACHINE))
    assert (finding.name, finding.ok) == ("cache", False)
    assert "OSError: the disk is on fire" in finding.detail
    assert "aiocuda info" in finding.cure


def test_a_check_that_does_not_end_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(machine: Machine) -> Result:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr("aiocuda.cli._doctor.CHECK_SECONDS", 0.01)
    assert "no answer within 0.01 s" in asyncio.run(_finding("cache", endless, MACHINE)).detail


def test_problems_come_before_facts_and_cures_once() -> None:
    result = Result(["a fact"], [Problem("one", "cure"), Problem("two", "cure")])
    assert Finding.of("name", result) == Finding("name", False, "one; two; a fact", "cure")


@pytest.mark.slow
def test_each_check_has_a_finding() -> None:
    assert [each.name for each in asyncio.run(diagnose("host"))] == list(CHECKS)


def test_an_unknown_driver_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no driver is called 'gpu'"):
        asyncio.run(diagnose("gpu"))  # type: ignore[arg-type]
