"""The private names of aiocuda that tests of the packages from pool to cluster import.

Tests of `_base`, `_core`, `completion`, `device`, `driver` and `memory` test what no public name shows. The others use
public names and `aiocuda.lowlevel`, where these suffice. ``python -m tests.project.private_imports`` counts the rest.
"""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tests.project.tree import ROOT

FOLDERS = "pool coordination pipeline context data serving cluster integrations observe cli".split()


class PrivateImport(NamedTuple):
    """One name that a test imports from a private module, or that is private itself."""

    folder: str
    file: str
    module: str
    name: str

    def public_home(self) -> str | None:
        """Return the public module that has the same object by the same name; None if there is none."""
        package = self.module.partition("._")[0]
        for home in (package, "aiocuda.lowlevel"):
            public = importlib.import_module(home)
            if home != self.module and self.name in {*dir(public), *getattr(public, "__all__", ())}:
                found = getattr(public, self.name)
                if found is getattr(importlib.import_module(self.module), self.name):
                    return home
        return None


def is_private(name: str) -> bool:
    """True if a part of a dotted name begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_imports() -> Iterator[PrivateImport]:
    """Yield the private imports of the tests, by folder and file."""
    for folder in FOLDERS:
        for path in sorted((ROOT / "tests" / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "aiocuda":
                    module = node.module or ""
                    for each in node.names:
                        if is_private(f"{module}.{each.name}"):
                            yield PrivateImport(folder, str(path.relative_to(ROOT)), module, each.name)


def main() -> None:
    """Print how many there are: in all, by folder, and by module and name."""
    found = list(private_imports())
    print(len(found), "private imports:", dict(Counter(each.folder for each in found)))  # noqa: T201 - a command
    for (module, name), count in sorted(Counter((each.module, each.name) for each in found).items()):
        print(f"{count:4} {module} {name}")  # noqa: T201


if __name__ == "__main__":
    main()
