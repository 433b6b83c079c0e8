"""Read the tables of docs/reference: features.md (row, public names, tests) and promises.md (row, figure, tests)."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re

import aiocuda
from tests.project.tree import PACKAGE

_CODE = re.compile(r"`([^`]+)`")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    id: str
    figure: str  #: the text of the third cell
    names: tuple[str, ...]  #: the names in backticks in that cell
    tests: tuple[str, ...]


def read(text: str) -> list[Row]:
    """Return the rows of the table in a page. Names and tests are in backticks in the last two cells."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and re.fullmatch(r"[A-Z]\d+", cells[0]):
            if len(cells) != 4:
                raise ValueError(f"row {cells[0]} has {len(cells)} cells, not 4: {line}")
            rows.append(Row(cells[0], cells[2], tuple(_CODE.findall(cells[2])), tuple(_CODE.findall(cells[3]))))
    return rows


def resolve(name: str) -> object:
    """Return the object of a public name such as ``Stream.copy()`` or ``aiocuda.driver.host.HostDriver``.

    Raises
    ------
    AttributeError, ModuleNotFoundError
        The name does not exist.
    """
    if name.startswith("aiocuda.integrations."):
        return listed(name.partition("(")[0])
    found: object = aiocuda
    for part in name.partition("(")[0].removeprefix("aiocuda.").split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            if not inspect.ismodule(found):
                raise
            found = importlib.import_module(f"{found.__name__}.{part}")
    return found


def listed(name: str) -> str:
    """Return a name of an integration that is in the ``__all__`` of its module, whose library may not be installed."""
    module, _, attribute = name.removeprefix("aiocuda.").rpartition(".")
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            if attribute in ast.literal_eval(node.value):
                return name
    raise AttributeError(f"{module} has no {attribute}")
