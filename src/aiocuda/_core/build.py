"""Builds the compiled form of the core: ``python -m aiocuda._core.build``.

The extension has all modules of the core. Cython compiles one file, so the build first joins their sources: it drops
the imports among them, the blocks for type checkers, overloads, and the type parameters of base classes.

It needs a C compiler and the headers of Python; and Cython, unless the generated C is there, as in an sdist. It imports
nothing of aiocuda, because the build hook runs it before aiocuda is installed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "CYTHON", "BuildError", "UnavailableError", "build", "extension_name", "generate", "has_generated_c", "joined",
    "main", "why_not_compiled",
]  # fmt: skip

#: What the build requires where no generated C is there. Before 3.3.1, the C for ``self.keep = None`` released the old
#: object before it stored the new one, so a finaliser that read the attribute crashed.
CYTHON = "cython>=3.3.1"

#: The name of the extension. It is not the name of a source, so a stale extension never hides an edited source.
NAME = "_compiled"

_HERE = Path(__file__).parent

_OPTIONS = ("annotation_typing=False", "binding=True", "auto_pickle=False", "nonecheck=True")


class BuildError(Exception):
    """The core cannot be compiled."""


class UnavailableError(BuildError):
    """Nothing can be compiled here: there is no compiler, no header of Python or no Cython."""


def _sources() -> Any:
    """Return the module `_sources`, loaded from beside this file: aiocuda may not be installed, and is not imported."""
    spec = importlib.util.spec_from_file_location("_aiocuda_core_sources", _HERE / "_sources.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _has_cython() -> bool:
    """Return whether Cython is installed, in a version that `CYTHON` allows."""
    try:
        version = importlib.metadata.version("cython")
    except importlib.metadata.PackageNotFoundError:
        return False
    numbers = [int(number) for number in re.findall(r"\d+", version)[:3]]
    return numbers >= [int(number) for number in re.findall(r"\d+", CYTHON)]


def _marker() -> bytes:
    """Return what a file that was made from these sources contains."""
    return f"aiocuda core {_sources().hash_of_sources()}".encode()


def _bindings(statements: Sequence[ast.stmt], name: str, siblings: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each name that statements of a module bind at run time, and a text of what it is bound to.

    Two modules may bind a name to the same thing: then their texts are equal, too. ``name`` is that of the module, for
    errors. Imports from ``siblings``, the other modules of the core, are left out, since `joined` drops them.

    Raises
    ------
    BuildError
        There is an `else`. `joined` drops it: the compiled form would lack what it does.
    """
    for statement in statements:
        otherwise = getattr(statement, "orelse", [])
        # The one allowed `else` has the class `Generic` of `_operation`: `joined` also drops `Generic[…]` as a base.
        if [getattr(each, "name", None) for each in otherwise] not in ([], ["Generic"]):
            raise BuildError(f"{name}.py has a module-level else in line {otherwise[0].lineno}, and joined() drops it")
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            source = f"{'.' * getattr(statement, 'level', 0)}{getattr(statement, 'module', '')}"
            for each in statement.names if source.removeprefix(".") not in siblings else ():
                yield each.asname or each.name, f"{source} {each.name}"
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, ast.dump(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target in ast.walk(statement):
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    yield target.id, ast.dump(statement)
        else:  # the parts of `if`, `try`, `with` and loops
            for field in ("body", "handlers", "finalbody"):
                yield from _bindings(getattr(statement, field, []), name, siblings)


def _check_names(texts: dict[str, str]) -> None:
    """Raise `BuildError` if two modules bind one name to different things: joined, the second would hide the first."""
    known: dict[str, tuple[str, str]] = {}  # by name: the first module that binds it, and to what
    for module, text in texts.items():
        for name, value in _bindings(ast.parse(text).body, module, (*texts, "_calls")):
            first, earlier = known.setdefault(name, (module, value))
            if first != module and value != earlier and name != "__all__":
                raise BuildError(
                    f"{first}.py and {module}.py bind {name} to different things, and in the compiled core they share "
                    "one namespace: rename one of them"
                )


def joined() -> str:
    """Return the source of one module that has all modules of the core. The docstring of this file says what it lacks.

    Raises
    ------
    BuildError
        The joined module would do something else than the single ones.
    """
    sources = _sources()
    _check_names({name: (_HERE / f"{name}.py").read_text(encoding="utf-8") for name in sources.MODULES})
    texts = ["from __future__ import annotations\n"]
    siblings = "|".join((*sources.MODULES, "_calls"))
    for name in sources.MODULES:
        text = (_HERE / f"{name}.py").read_text(encoding="utf-8")
        text = text.replace("from __future__ import annotations\n", "")
        # Imports from siblings, `__all__`, blocks for type checkers.
        text = re.sub(rf"^from \.(?:{siblings}) import (?:\([^)]*\)|[^\n(]*)\n", "", text, flags=re.M)
        text = re.sub(r"^__all__ = \[[^\]]*\][^\n]*\n", "", text, flags=re.M)
        text = re.sub(r"^if TYPE_CHECKING:\n(?:(?:    .*)?\n)+", "", text, flags=re.M)
        text = re.sub(r"^else:\n(?:(?:    .*)?\n)+", "", text, flags=re.M)  # of such a block
        # The same in classes; there, a line below `if not TYPE_CHECKING` stays. Base classes, overloads.
        text = re.sub(r"^    if TYPE_CHECKING:\n(?:(?:        .*)?\n)+", "", text, flags=re.M)
        text = re.sub(r"^    if not TYPE_CHECKING:\n        ", "    ", text, flags=re.M)
        text = re.sub(r"^class (\w+)\((?:Generic|Awaitable)\[\w+\]\)", r"class \1", text, flags=re.M)
        text = re.sub(r"^class (\w+)\((\w+)\[\w+\]\)", r"class \1(\2)", text, flags=re.M)
        text = re.sub(r"^@overload\n(?:.*\n)+?.*\.\.\.\n", "", text, flags=re.M)
        texts.append(text)
    return "\n".join(texts)


def generate(folder: Path, *options: str) -> Path:
    """Write the extension's source in C to a folder, and return its path. Cython gets the ``options``."""
    if not _has_cython():
        raise UnavailableError(f"Cython is missing or too old: pip install '{CYTHON}'")
    package = folder / "aiocuda" / "_core"
    package.mkdir(parents=True)
    for path in (package, package.parent):  # Cython takes the full name of the module from its packages
        (path / "__init__.py").touch()
    (package / f"{NAME}.py").write_text(joined(), encoding="utf-8")
    shutil.copy(_HERE / f"{NAME}.pxd", package)
    directives = [argument for option in _OPTIONS for argument in ("-X", option)]
    command = [sys.executable, "-m", "cython", "-3", *directives, *options, str(package / f"{NAME}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"Cython failed: {done.stdout}{done.stderr}")
    source = package / f"{NAME}.c"
    with source.open("a", encoding="utf-8") as file:
        # For `_form` and `build`, which look for the hash in the bytes of the extension, without importing it.
        file.write(f'\nstatic const char aiocuda_sources[] __attribute__((used)) = "{_marker().decode()}";\n')
    return source


def has_generated_c() -> bool:
    """Return whether the generated C lies beside this file, as in an sdist, and was generated from these sources."""
    source = _HERE / f"{NAME}.c"
    return source.exists() and _marker() in source.read_bytes()


def extension_name() -> str:
    """Return the name of the extension's file for this Python."""
    return NAME + importlib.machinery.EXTENSION_SUFFIXES[0]


def _compiler() -> list[str]:
    """Return the command of the C compiler, with its options."""
    return shlex.split(os.environ.get("CC", "").strip() or sysconfig.get_config_var("CC") or "cc")


def why_not_compiled() -> str | None:
    """Return the reason why C cannot be compiled for this Python here, or None. Without a look for Cython."""
    if not sys.platform.startswith("linux"):
        return "the compiled core is for Linux, as the CUDA driver is"
    if sys.implementation.name != "cpython":
        return f"the compiled core is for CPython, not {sys.implementation.name}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "the compiled core is for Python with the GIL: free-threaded Python uses the core in Python"
    compiler = _compiler()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler {compiler!r}: install one, or name one in CC"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the headers of Python are missing: install python3-dev"
    return None


def build(target: Path = _HERE, *, force: bool = False) -> Path:
    """Build the extension for this Python in a folder, and return its path.

    One that is there and was built from these sources is kept, unless ``force`` is true.

    Raises
    ------
    UnavailableError
        There is no compiler, no header of Python or no Cython.
    BuildError
        The source does not compile.
    """
    extension = target / extension_name()
    if not force and extension.exists() and _marker() in extension.read_bytes():
        return extension
    reason = why_not_compiled()
    if reason is not None:
        raise UnavailableError(reason)
    with tempfile.TemporaryDirectory(prefix="aiocuda-core-") as folder:
        source = _HERE / f"{NAME}.c" if has_generated_c() else generate(Path(folder))
        made = Path(folder) / extension.name
        command = [
            *_compiler(), "-shared", "-s", "-fPIC", "-O2", "-DNDEBUG", "-fno-strict-aliasing", "-w",
            # Classes on the heap: `lacks` and `refuses` set attributes of `Operation`.
            "-DCYTHON_USE_TYPE_SPECS=1",
            f"-I{sysconfig.get_paths()['include']}", f"-I{_HERE}", str(source), "-o", str(made),
            *shlex.split(os.environ.get("CFLAGS", "")),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{shlex.join(command)} failed: {done.stderr}")
        # Replaced, not overwritten: a process that has loaded the old file keeps it. Another build may run now.
        beside = target / f"{extension.name}.{os.getpid()}"
        try:
            shutil.copy(made, beside)
            beside.replace(extension)
        except OSError as error:
            raise UnavailableError(f"{target} cannot be written: {error}") from error
    return extension


def main() -> int:
    """Build the extension beside its source, as the command line asks. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m aiocuda._core.build", description="Build the compiled core.")
    parser.add_argument("--force", action="store_true", help="build it even if it is of these sources")
    parser.add_argument("--if-possible", action="store_true", help="succeed without a compiler, headers or Cython")
    parser.add_argument("--annotate", type=Path, metavar="FILE", help="only write Cython's page about the source")
    options = parser.parse_args()
    try:
        if options.annotate is not None:
            with tempfile.TemporaryDirectory() as folder:
                shutil.copy(generate(Path(folder), "-a").with_suffix(".html"), options.annotate)
            return 0
        path = build(force=options.force)
    except BuildError as error:
        print(f"aiocuda: the core is not compiled: {error}", file=sys.stderr)  # noqa: T201 - a command
        return 0 if options.if_possible and isinstance(error, UnavailableError) else 1
    print(path)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
