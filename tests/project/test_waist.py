"""`aiocuda.lowlevel` is the only way from the packages above the core into the core."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiocuda import lowlevel
from tests.project.tree import PACKAGE, ROOT

#: The packages above the core.
ABOVE = (
    "pool", "coordination", "pipeline", "context", "observe", "data", "serving", "cluster", "integrations", "cli",
    "testing",
)  # fmt: skip

#: Packages and modules that every other one may import as it likes.
SHARED = ("_base", "_processes", "errors", "lowlevel")

#: The most names of `lowlevel`, and the most members of queues and operations that the packages above use.
MOST_NAMES, MOST_MEMBERS = 40, 20

PAGE = ROOT / "docs" / "reference" / "lowlevel.md"


def trees(*packages: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        inner = path.relative_to(PACKAGE)
        if not packages or inner.parts[0] in packages:
            yield inner, ast.parse(path.read_text(encoding="utf-8"))


def imported(inner: Path, tree: ast.Module) -> Iterator[tuple[int, tuple[str, ...], str]]:
    """The imports from aiocuda in a file: line, the parts of the module's name below aiocuda, and the name."""
    package = inner.parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                target = (*package[: len(package) - node.level + 1], *module)
            elif module[:1] == ("aiocuda",):
                target = module[1:]
            else:
                continue
            for alias in node.names:
                yield node.lineno, target, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "aiocuda":
                    yield node.lineno, tuple(parts[1:-1]), parts[-1]


def private_imports(inner: Path, tree: ast.Module) -> list[str]:
    """The imports of a file above the core that go neither through `lowlevel` nor by names of a package itself."""
    return [
        f"{inner}:{line} {'.'.join((*target, name))}"
        for line, target, name in imported(inner, tree)
        if target
        and target[0] not in (inner.parts[0], *SHARED)
        and any(part.startswith("_") for part in (*target, name))
    ]


def test_packages_above_the_core_import_public_names_and_lowlevel() -> None:
    assert [place for inner, tree in trees(*ABOVE) for place in private_imports(inner, tree)] == []


@pytest.mark.parametrize(
    "line",
    [
        "from ..completion._stream_queue import StreamQueue",
        "from ..coordination._node import Node",
        "from ..device import _event",
        "from aiocuda.memory._block import Block",
        "from ..driver.cuda._library import QUEUES",
    ],
)
def test_an_import_around_lowlevel_is_found(line: str) -> None:
    assert len(private_imports(Path("pool/_place.py"), ast.parse(line))) == 1


def test_only_the_version_is_imported_from_the_root() -> None:
    modules = {*SHARED, *(path.name.removesuffix(".py") for path in PACKAGE.iterdir())}
    found = [
        f"{inner}:{line} {name}"
        for inner, tree in trees()
        if inner.name != "__init__.py" or len(inner.parts) > 1
        for line, target, name in imported(inner, tree)
        if not target and name != "__version__" and name not in modules
    ]
    assert found == []


def test_base_knows_only_errors() -> None:
    found = {target[0] for inner, tree in trees("_base") for _, target, _ in imported(inner, tree) if target}
    assert found <= {"_base", "errors"}


def rows(heading: str) -> list[str]:
    """The names in the first column of the table below a heading of the page."""
    _, _, text = PAGE.read_text(encoding="utf-8").partition(f"\n{heading}\n")
    table = re.split(r"\n## ", text)[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(\w+)", cell)]


def test_the_page_lists_all_names() -> None:
    assert sorted(rows("## Names")) == sorted(lowlevel.__all__)
    assert len(lowlevel.__all__) <= MOST_NAMES


QUEUE = rows("## Members of `Queue`")
OPERATION = rows("## Members of `StreamOperation`")


def test_the_page_lists_few_members() -> None:
    assert [name for name in QUEUE if not hasattr(lowlevel.Queue, name)] == []
    assert [name for name in OPERATION if not hasattr(lowlevel.StreamOperation, name)] == []
    assert len(QUEUE) + len(OPERATION) <= MOST_MEMBERS


def members(file: str, *classes: str) -> set[str]:
    """The attributes and methods of classes, without those with a leading underscore."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name in classes:
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(part.name)
                elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                    found.add(part.attr)
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    found.add(part.target.id)
    return {name for name in found if not name.startswith("_")}


#: Names of variables and attributes for a queue, and for an operation, in the packages above the core.
QUEUES = ("queue", "queues", "leader", "first_queue")
OPERATIONS = ("operation", "substitute", "mark", "tail", "end", "last", "own", "newest", "waiting")


def uses(tree: ast.Module, receivers: tuple[str, ...]) -> Iterator[ast.Attribute]:
    """The attributes of objects that have one of these names, or come from `queue_of` or ``.queue``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node.value).split("(")[0].rpartition(".")[2].removeprefix("_")
            if name in receivers:
                yield node


def test_packages_above_the_core_use_the_listed_members() -> None:
    of_queues = members("completion/_stream_queue.py", "StreamQueue")
    of_queues |= members("_core/_ring.py", "Ring")
    of_operations = members("_core/_stream_operation.py", "StreamOperation")
    public = members("_core/_operation.py", "Operation")
    unlisted = [
        f"{inner}:{node.lineno} {ast.unparse(node)}"
        for inner, tree in trees(*ABOVE)
        for receivers, known, listed in (
            ((*QUEUES, "queue_of"), of_queues - of_operations, {*QUEUE}),
            (OPERATIONS, of_operations, {*OPERATION, *public}),
        )
        for node in uses(tree, receivers)
        if node.attr in known - listed
    ]
    assert unlisted == []


def test_no_attribute_of_the_core_is_written_from_above() -> None:
    resources = ("resources", "device_state", "loop_state", "reactor", "block")
    written = [
        f"{inner}:{node.lineno} {ast.unparse(node)}"
        for inner, tree in trees(*ABOVE)
        for node in uses(tree, (*QUEUES, "queue_of", *OPERATIONS, *resources))
        if isinstance(node.ctx, ast.Store | ast.Del)
    ]
    assert written == []
