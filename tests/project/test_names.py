"""The public names are listed, sorted, importable and documented."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import aiocuda
from aiocuda import errors
from aiocuda._base._names import CURES
from tests.project.tree import PACKAGE, ROOT, SOURCE

PUBLIC = [name for name in aiocuda.__all__ if name != "__version__"]

#: The errors and warnings among them; `aiocuda.errors` has all.
PUBLIC_ERRORS = {
    "AiocudaError", "BusyError", "ClosedError", "CompileError", "DeadlockError", "DeviceFault", "DeviceOutOfMemory",
    "HostDriverWarning", "InvalidArgumentError", "InvalidTypeError", "PerformanceWarning", "QueueFullError",
    "SkippedError", "UnsupportedError",
}  # fmt: skip

#: What `aiocuda` has without listing it.
UNLISTED = sorted(
    {
        *("CompletionPolicy", "DeviceProperties", "DeviceStatistics", "MemoryStatistics"),
        *("PipelineStats", "StreamStatistics"),
        *(set(errors.__all__) - PUBLIC_ERRORS),
    }
)


def imported() -> dict[str, str | None]:
    """Return the names that `aiocuda/__init__.py` imports for type checkers, with those under which it exports them."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.If) and not node.orelse).body
    return {alias.name: alias.asname for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_all_is_sorted_and_has_no_name_twice() -> None:
    assert aiocuda.__all__ == sorted(set(aiocuda.__all__))


def test_all_lists_the_imported_names_and_few_errors() -> None:
    assert {name for name, exported in imported().items() if exported is None} == set(PUBLIC)
    assert set(PUBLIC).intersection(errors.__all__) == PUBLIC_ERRORS


def test_other_names_are_exported_to_type_checkers() -> None:
    """``import X as X`` exports a name that is not in ``__all__``; the tests import many of them, under mypy."""
    assert {name: exported for name, exported in imported().items() if exported} == {name: name for name in UNLISTED}


def test_other_names_are_imported_without_being_listed() -> None:
    program = f"from aiocuda import {', '.join(UNLISTED)}; import aiocuda; print(*dir(aiocuda))"
    command = [sys.executable, "-W", "error", "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert set(finished.stdout.split()).isdisjoint(UNLISTED)
    assert finished.stderr == ""


def test_dir_lists_the_public_names_and_no_modules() -> None:
    offered = dir(aiocuda)
    assert [name for name in offered if not name.startswith("__")] == sorted(PUBLIC)
    assert {"__version__", "__doc__", "__path__"} <= set(offered)


def test_every_error_and_warning_is_public_and_listed_in_the_tree() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == errors.__name__
    }
    # The last three are exported by `serving`, `cluster` and `data`.
    public = {*errors.__all__, "DeadlineError", "ReplicaLostError", "WorkerLostError"}
    assert defined == public
    assert errors.__doc__ is not None
    drawn = re.findall(r"─ (\w+)", errors.__doc__)
    assert sorted([*drawn, "AiocudaError"]) == sorted(public)


@pytest.mark.parametrize("name", [*PUBLIC, *UNLISTED])
def test_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(aiocuda, name)
    assert value.__name__ == name
    assert value.__module__ == ("aiocuda.errors" if name in errors.__all__ else "aiocuda")
    assert inspect.getdoc(value)


@pytest.mark.parametrize("name", [name for name in (*PUBLIC, *UNLISTED) if name[0].isupper()])
def test_public_members_are_documented(name: str) -> None:
    undocumented = [
        member
        for member, value in vars(getattr(aiocuda, name)).items()
        if not member.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
        and not inspect.getdoc(value)
    ]
    assert undocumented == []


@pytest.mark.parametrize("name", [*PUBLIC, *UNLISTED])
def test_name_is_in_the_reference_once(name: str) -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    directive = re.compile(rf"^\.\. auto\w+:: aiocuda\.{name}$", re.MULTILINE)
    assert sum(len(directive.findall(page.read_text(encoding="utf-8"))) for page in pages) == 1


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'aiocuda' has no attribute 'Devise'"):
        _ = getattr(aiocuda, "Devise")  # noqa: B009 - a type checker must not see it


def dotted(path: Path) -> str:
    """Return the module name of a file."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


#: Libraries that are not in the development environment, by the name of the integration.
OPTIONAL = {"cupy": "cupy", "numba": "numba_cuda", "nvtx": "nvtx", "torch": "torch"}


def is_importable(module: str) -> bool:
    """Return whether the library of an integration or an exporter is installed; True for all other modules."""
    name = module.rpartition(".")[2].lstrip("_").partition("_")[0]
    if not module.startswith(("aiocuda.integrations.", "aiocuda.observe.")) or name not in OPTIONAL:
        return True
    try:
        return importlib.util.find_spec(OPTIONAL[name]) is not None
    except ModuleNotFoundError:  # where a test hides it
        return False


MODULES = [
    name for path in sorted(PACKAGE.rglob("*.py")) if path.stem != "__main__" and is_importable(name := dotted(path))
]


@pytest.mark.parametrize("name", MODULES)
def test_all_of_each_module_lists_existing_names(name: str) -> None:
    if name == "aiocuda.observe":
        pytest.importorskip("nvtx")  # has no wheel for the newest Python at first
    module = importlib.import_module(name)
    listed = list(getattr(module, "__all__", ()))
    assert len(listed) == len(set(listed))
    assert [entry for entry in listed if not hasattr(module, entry)] == []


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_each_module_can_be_imported_first(part: int) -> None:
    """Each module can be imported directly after `import aiocuda`, before all other modules."""
    program = """
        import importlib, sys, traceback
        import aiocuda
        first = set(sys.modules)
        for name in sys.argv[1:]:
            if name in first:
                continue
            for loaded in [loaded for loaded in sys.modules if loaded.startswith("aiocuda.") and loaded not in first]:
                del sys.modules[loaded]
            try:
                importlib.import_module(name)
            except ImportError:
                print(name)
                traceback.print_exc(file=sys.stdout)
    """
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program), *MODULES[part::4]],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert finished.stdout == ""


def documented_classes() -> dict[str, tuple[type, bool]]:
    """Return the classes that have a directive in the reference, and whether it lists inherited members."""
    directive = re.compile(r"^\.\. autoclass:: (aiocuda[\w.]*)\.(\w+)$((?:\n +:.*)*)", re.MULTILINE)
    pages = (page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
    found = (match.groups() for page in pages for match in directive.finditer(page))
    return {
        f"{module}.{name}": (getattr(importlib.import_module(module), name), ":inherited-members:" in options)
        for module, name, options in found
        if is_importable(module)
    }


def test_every_public_method_is_in_the_reference() -> None:
    """A method that a class has from a base class without a directive needs the option ``:inherited-members:``.

    A method of a protocol is documented there, for all classes that have it; one of Python's library in Python's.
    """
    pytest.importorskip("nvtx")  # has no wheel for the newest Python at first
    documented = documented_classes()
    listed = {base for value, inherits in documented.values() for base in (value.__mro__ if inherits else [value])}
    protocols = {base for value in listed if getattr(value, "_is_protocol", False) for base in value.__mro__}
    missing = []
    for name, (value, _) in documented.items():
        if "._" in name or "Conformance" in name:
            continue
        from_python = {base for base in value.__mro__ if not base.__module__.startswith("aiocuda")}
        known = set().union(*map(vars, from_python | protocols | listed.intersection(value.__mro__)))
        known |= {member for base in value.__mro__ for member in CURES.get(base.__name__, ())}  # raise with a cure
        missing += [
            f"{name}.{member}"
            for member, attribute in inspect.getmembers(value)
            if not member.startswith("_") and member not in known
            if (inspect.isroutine(attribute) or isinstance(attribute, property)) and inspect.getdoc(attribute)
        ]
    assert missing == []
