"""A forked child. Each test forks in a process of its own: this one has threads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.driver.cuda.fake import Fake
from tests.project.tree import python_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork"),
]

_ROOT = Path(__file__).parents[3]

_BEGIN = """
import os, select, sys
from pathlib import Path
from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.cuda._probe import find
from aiocuda.errors import DriverNotAvailableError, ForkedProcessError
from tests.driver.cuda.fake import Fake
from tests.driver.cuda.methods import things, methods

fake = Fake(Path({path!r}))
fake.value("cuDeviceGetCount", 2)

def in_child(work):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        work()
        sys.stdout.flush()
        sys.exit(0)  # not os._exit: libc's own exit flushes what it finds
    assert os.waitpid(child, 0)[1] == 0, "the child failed"
"""


def _run(fake: Fake, program: str) -> int:
    """Its exit status."""
    text = _BEGIN.format(path=fake.path) + textwrap.dedent(program)
    environment = {**os.environ, "PYTHONPATH": python_path(_ROOT / "src", _ROOT)}
    return subprocess.run([sys.executable, "-c", text], check=False, timeout=60, env=environment, cwd=_ROOT).returncode


def test_every_method_is_refused_in_the_child(fake: Fake) -> None:
    status = _run(
        fake,
        """
        driver = CudaDriver(fake.path)
        made = things(driver, fake)
        calls = methods(driver, made)
        calls["offload"] = lambda: driver.offload(lambda: None, made.port, 1)
        calls["open_port"] = lambda: driver.open_port(lambda: None)
        calls["worker_threads"] = lambda: driver.worker_threads(1, "thread", bool, made.port, 1)

        def child():
            for name, call in calls.items():
                try:
                    call()
                except ForkedProcessError as error:
                    assert "spawn" in str(error), error
                else:
                    raise AssertionError(name)
            assert fake.calls() == [], fake.names()
            driver.close()

        in_child(child)
        for name, call in calls.items():
            call()
        """,
    )
    assert status == 0


def test_armed_notifier_notifies_once_and_in_the_parent(fake: Fake) -> None:
    status = _run(
        fake,
        """
        driver = CudaDriver(fake.path)
        driver.device_open(0)
        port = driver.open_port(lambda: None)
        notifier, event = driver.notifier(0, port), driver.event_create(0, False)
        fake.hold()
        notifier.ring(event, 42)
        in_child(lambda: None)  # whose exit would write its copy of the tag into the shared pipe
        assert not select.select([port.fileno()], [], [], 0)[0]
        fake.release()
        assert select.select([port.fileno()], [], [], 10)[0]
        assert port.drain() == [42]
        assert not select.select([port.fileno()], [], [], 0)[0]
        """,
    )
    assert status == 0


def test_child_of_a_parent_that_only_looked(fake: Fake) -> None:
    status = _run(
        fake,
        """
        assert find(fake.path) is None
        fake.forget()

        def child():
            for call in (lambda: find(fake.path), lambda: CudaDriver(fake.path).device_open(0)):
                try:
                    call()
                except ForkedProcessError:
                    continue
                raise AssertionError
            assert fake.calls() == []

        in_child(child)
        """,
    )
    assert status == 0


def test_child_opens_its_own_where_the_parent_did_not(fake: Fake) -> None:
    status = _run(
        fake,
        """
        driver = CudaDriver(fake.path)
        in_child(lambda: driver.device_open(0))
        """,
    )
    assert status == 0


def test_child_of_a_parent_without_a_gpu_may_look_for_itself(fake: Fake) -> None:
    status = _run(
        fake,
        """
        fake.answer("cuInit", 100)
        assert "(100)" in find(fake.path)

        def child():
            assert "(100)" in find(fake.path)

        in_child(child)
        """,
    )
    assert status == 0


def test_fault_of_the_parent_is_a_fork_to_the_child(fake: Fake) -> None:
    status = _run(
        fake,
        """
        driver = CudaDriver(fake.path)
        made = things(driver, fake)
        fake.answer("cuEventQuery", 700)
        try:
            driver.event_query(made.event)
        except RuntimeError:
            pass

        def child():
            for call in (lambda: driver.event_query(made.event), lambda: driver.event_destroy(made.event)):
                try:
                    call()
                except ForkedProcessError:
                    continue
                raise AssertionError

        in_child(child)
        """,
    )
    assert status == 0
