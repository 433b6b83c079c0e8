"""A new stream method changes four places: hooks, graphs, checker, groups, pools, pictures and tests know it then."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.tree import PACKAGE, ROOT

TRANSFERS = """\
    def zero(self, buffer: DeviceBuffer) -> StreamOperation[None]:
        queue = self._queue
        queue.check()
        if not isinstance(buffer, DeviceBuffer):
            check_awaited(buffer, "the buffer to zero")
            raise InvalidTypeError(f"zero takes a device buffer, not {type(buffer).__name__}")
        block = block_of(buffer)
        self._access.prepare(block)
        call = (queue.handle, buffer.address, bytes(1), buffer.nbytes)
        operation = queue.enqueue("zero", self._estimate("zero", buffer.nbytes), self._driver.fill, call, buffer)
        block.uses[queue] = operation
        self._note(buffer, "zero", writes=True)
        return operation

"""

NODE = """\
def zero_node(resources: DeviceResources, buffer: Any) -> GraphNode:
    return dataclasses.replace(fill_node(resources, buffer, 0), kind="zero")


"""

METHOD = '''\
    def zero(self, buffer: DeviceBuffer, *, label: str | None = None) -> Operation[None]:
        """Set every byte of a buffer to zero."""
        if label is not None:
            return labelled(label, self.zero, buffer)
        if self._hook is not None:
            return self._hook.call("zero", self._transfers.zero, buffer)
        return self._transfers.zero(buffer)

'''

ROW = """\
        Method(
            "zero",
            Kind("zero", "memory", "#123456", size="set"),
            accesses=((0, "writes"),),
            graph="node",
        ),
"""

ARGUMENTS = """\
    "zero": lambda world: (world.buffer,),
"""

#: The places that `aiocuda.device.streams`' README lists: for each the file, a text in it, and what comes before that.
PLACES = [
    [
        ("src/aiocuda/device/streams/_transfers.py", "    def prefetch(", TRANSFERS),
        ("src/aiocuda/device/graphs/_nodes.py", "#: The functions that make the node", NODE),
        ("src/aiocuda/device/graphs/_nodes.py", '    "fill": fill_node,', '    "zero": zero_node,\n'),
    ],
    [("src/aiocuda/device/streams/_stream.py", "    def prefetch(", METHOD)],
    [("src/aiocuda/completion/_methods.py", '        Method(\n            "prefetch",', ROW)],
    [("tests/stream/methods.py", '    "prefetch": ', ARGUMENTS)],
]

#: The tests of all methods that are run for the new one, and the files that they need.
TESTS = (
    "tests/stream/test_methods.py",
    "tests/stream/test_unawaited.py",
    "tests/stream/test_not_blocking.py::test_no_verb_waits_for_the_device",
    "tests/observe/test_labels.py::test_every_method_of_a_stream_takes_a_label",
    "tests/coordination/test_group.py::test_any_verb_waits",
)
FILES = ("pyproject.toml", "tests/__init__.py", "tests/conftest.py", "tests/helpers.py", "tests/stream/methods.py",
         "tests/task_factories.py")  # fmt: skip

#: Tests that have a case for each method, or for each kind of operation.
CASES = {
    "test_any_verb_waits[host-zero]",
    "test_checker_reports_what_the_operation_reads_and_writes[zero]",
    "test_each_kind_has_its_colour_and_workload[zero]",
    "test_graph_contains_the_work_or_names_the_cure[host-zero]",
    "test_node_takes_other_arguments[host-zero]",
}


def copied(folder: Path) -> Path:
    """Copy the package and the tests of all methods."""
    shutil.copytree(PACKAGE, folder / "src" / "aiocuda")
    for name in (*FILES, *(test.partition("::")[0] for test in TESTS)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def add(folder: Path, place: list[tuple[str, str, str]]) -> None:
    for name, mark, text in place:
        before, found, after = (folder / name).read_text(encoding="utf-8").partition(mark)
        assert found, f"{name} has no {mark!r}"
        (folder / name).write_text(f"{before}{text}{mark}{after}", encoding="utf-8")


def run(folder: Path, outcome: str, *tests: str) -> set[str]:
    """Run tests of the copy, and return those with this outcome: ``"PASSED"``, where all must pass, or ``"FAILED"``."""
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-m", "not gpu", *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "src"), str(folder)])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.returncode == (outcome == "FAILED"), finished.stdout + finished.stderr
    return set(re.findall(rf"^{outcome} \S+::(\S+)", finished.stdout, re.MULTILINE))


@pytest.mark.slow
def test_new_method_changes_four_places(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    for place in PLACES:
        add(folder, place)
    assert {case for case in run(folder, "PASSED", *TESTS) if "zero" in case} == CASES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forgotten", "found"),
    [
        (2, "test_table_has_each_method_that_calls_a_hook"),
        (3, "test_each_method_that_makes_operations_has_arguments_for_tests"),
    ],
    ids=["row", "arguments"],
)
def test_place_that_was_forgotten_is_found(tmp_path: Path, forgotten: int, found: str) -> None:
    folder = copied(tmp_path)
    for place in [*PLACES[:forgotten], *PLACES[forgotten + 1 :]]:
        add(folder, place)
    assert found in run(folder, "FAILED", TESTS[0])
