"""The structure of the package: module names, whole classes, encapsulation, import cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import aiocuda
from tests.project.tree import PACKAGE, SOURCE

#: Modules that users may import. Every other module has a leading underscore, or is in a package of this list.
PUBLIC_MODULES = {
    "aiocuda.__main__",
    "aiocuda._core.build",  # a command
    "aiocuda.driver.protocol",
    "aiocuda.errors",
    "aiocuda.graph",
    "aiocuda.integrations.cuda_core",
    "aiocuda.integrations.cupy",
    "aiocuda.integrations.numba",
    "aiocuda.integrations.torch",
    "aiocuda.lowlevel",
    "aiocuda.stream",
    "aiocuda.testing.fixtures",
    "aiocuda.testing.kernels",
    "aiocuda.testing.plugin",
}

#: Uses of another object's private attributes per 1 000 lines of code.
MOST_PRIVATE_USES = 5.0

#: Files of `src` that import each other in a cycle when the program runs. Types of one package may name each other.
MOST_IN_CYCLES = 0

#: Lines of one function, and the functions that are longer.
MOST_LINES = 60
LONGER: list[str] = []


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_module_that_is_not_public_has_a_leading_underscore() -> None:
    modules = {dotted(path) for path in trees() if path.name != "__init__.py"}
    assert {name for name in modules if not name.rpartition(".")[2].startswith("_")} <= PUBLIC_MODULES


def test_no_module_has_the_name_of_a_public_function_or_class() -> None:
    public = {name for name in aiocuda.__all__ if name != "__version__"}
    assert public.isdisjoint(dotted(path).rpartition(".")[2] for path in trees())


def test_class_of_an_object_does_not_change() -> None:
    """A mode of an object is a field."""
    changes = [
        f"{path.name}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store)
    ]
    assert changes == []


def test_methods_are_defined_in_their_class() -> None:
    """No ``poll = resolve.poll`` in a class body, where ``resolve`` is a module."""
    pasted = []
    for path, tree in trees().items():
        modules = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module is None or node.level)
            for alias in node.names
            if alias.name.islower()
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                pasted += [
                    f"{path.name}:{statement.lineno}"
                    for statement in node.body
                    if isinstance(statement, ast.Assign)
                    and isinstance(statement.value, ast.Attribute)
                    and isinstance(statement.value.value, ast.Name)
                    and statement.value.value.id in modules
                    and isinstance(statement.targets[0], ast.Name)
                    and statement.targets[0].id == statement.value.attr
                ]
    assert pasted == []


def private_uses(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Private attributes of objects other than ``self`` and ``cls``."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
            and not (isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()")
        ):
            yield node


def test_private_attributes_are_used_by_their_own_class() -> None:
    uses = sum(1 for tree in trees().values() for _ in private_uses(tree))
    lines = sum(
        1
        for path in trees()
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.strip().startswith("#")
    )
    assert 1000 * uses / lines <= MOST_PRIVATE_USES


def imports() -> dict[str, set[str]]:
    """The modules of the package that each of them imports, at any place but not for type checkers only."""
    modules = {dotted(path): path for path in trees()}
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        typing = {
            id(node)
            for test in ast.walk(trees()[path])
            if isinstance(test, ast.If) and ast.unparse(test.test) == "TYPE_CHECKING"
            for part in test.body
            for node in ast.walk(part)
        }
        for node in ast.walk(trees()[path]):
            if id(node) in typing:
                continue
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                origin = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    target = f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in modules else origin
                    if target in modules and target != name:
                        found[name].add(target)
    return found


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph[name]
    return seen


def test_import_cycles_are_few() -> None:
    graph = imports()
    del graph["aiocuda"]  # it imports names when they are used
    graph = {name: {target for target in targets if target in graph} for name, targets in graph.items()}
    assert len([name for name in graph if name in reachable(graph, name)]) <= MOST_IN_CYCLES


def test_functions_are_short() -> None:
    long = [
        f"{path.name}:{node.name}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES
    ]
    assert sorted(long) == sorted(LONGER)
