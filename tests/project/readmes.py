"""What the README of a package says of its files and names, compared with the code.

A table of a page whose first column is ``file`` has one row for each file: its path from the page's folder, its main
names, and its content. A folder with a page of its own is one row, and its page lists its files.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

PAGE: Final = "README.md"

#: A package with more files needs a page.
MOST_WITHOUT_PAGE: Final = 5

CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
MEMBER = re.compile(r"\b_*[A-Z]\w*[a-z]\w*\.\w+")

#: A name in prose that has to exist: a class, a member of a class, or a private name.
NAME = re.compile(r"(?P<owner>_*[A-Z]\w*[a-z]\w*)(?:\.(?P<member>\w+))?(?:\(.*\))?|(?P<private>_[a-z]\w*)(?:\(.*\))?")
FILE = re.compile(r"[\w/.]*\w\.(?:py|html|json|md)")


class Row(NamedTuple):
    """A row of a table of files."""

    files: list[str]
    names: list[str]


def rows_of(text: str) -> Iterator[Row]:
    """Yield the rows of the tables of files of a page."""
    in_table = False
    for line in text.splitlines():
        if not line.startswith("|"):
            in_table = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "file":
            in_table = True
        elif in_table and set(cells[0]) - {"-"}:
            yield Row(CODE.findall(cells[0]), CODE.findall(cells[1]) if len(cells) > 2 else [])
        elif in_table and not cells[0]:
            yield Row([], CODE.findall(cells[1]))


def has_page_between(path: Path, folder: Path) -> bool:
    """True if a folder below ``folder`` that contains the path has a page of its own."""
    between = [parent for parent in path.parents if parent != folder and parent.is_relative_to(folder)]
    return any((parent / PAGE).exists() for parent in between)


def files_of(folder: Path) -> set[str]:
    """Return the Python files that a folder's page has to list, as paths from the folder."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if path.name != "__init__.py" and not has_page_between(path, folder)
    }


def pages_below(folder: Path) -> set[str]:
    """Return the nearest folders below a folder that have a page of their own, as the rows name them."""
    return {
        f"{page.parent.relative_to(folder).as_posix()}/"
        for page in folder.rglob(PAGE)
        if page.parent != folder and not has_page_between(page.parent, folder)
    }


def packages_without_page(root: Path) -> list[str]:
    """Return the packages with more than five files, those of their folders included, that have no page."""
    folders = [path for path in sorted(root.iterdir()) if (path / "__init__.py").exists()]
    return [
        folder.name for folder in folders if not (folder / PAGE).exists() and len(files_of(folder)) > MOST_WITHOUT_PAGE
    ]


@cache
def parsed(text: str) -> ast.Module:
    """Return a syntax tree. By its text and not by its file, because a file may change."""
    return ast.parse(text)


def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return parsed(path.read_text(encoding="utf-8"))


def defined_in(path: Path) -> set[str]:
    """Return the names that a file defines at module level, in a block of ``if`` or ``try``, too."""
    names: set[str] = set()
    todo: list[ast.stmt] = list(tree_of(path).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.If | ast.Try):
            todo += [*node.body, *node.orelse]
    return names


def classes_of(path: Path) -> set[str]:
    """Return the classes that a file defines at module level, without private ones."""
    return {
        node.name for node in tree_of(path).body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def table_problems(folder: Path) -> list[str]:
    """Return what is wrong with the tables of files of a folder's page."""
    problems: list[str] = []
    listed: set[str] = set()
    for row in rows_of((folder / PAGE).read_text(encoding="utf-8")):
        if len(row.files) != 1:
            problems.append(f"a row has one file, not {row.files}, with {row.names}")
            continue
        (name,) = row.files
        if name in listed:
            problems.append(f"{name} has two rows")
        listed.add(name)
        path = folder / name
        if not path.exists():
            problems.append(f"{name} does not exist")
        elif path.suffix == ".py":
            problems += [f"{name} does not define {each}" for each in row.names if each not in defined_in(path)]
            problems += [f"{name}: its row lacks {each}" for each in sorted(classes_of(path) - {*row.names})]
    problems += [f"{name} is in no row" for name in sorted((files_of(folder) | pages_below(folder)) - listed)]
    return problems


@dataclass
class Sources:
    """The names of some Python files: all identifiers, and the members of each class."""

    words: set[str] = field(default_factory=set)
    members: dict[str, set[str]] = field(default_factory=dict)
    bases: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def below(cls, root: Path) -> Sources:
        """Return the names of all files below a folder."""
        found = cls()
        for path in sorted(root.rglob("*.py")):
            for node in ast.walk(tree_of(path)):
                found._add(node)
        return found

    def _add(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name):
            self.words.add(node.id)
        elif isinstance(node, ast.Attribute):
            self.words.add(node.attr)
        elif isinstance(node, ast.arg):
            self.words.add(node.arg)
        elif isinstance(node, ast.alias):
            self.words.update(node.name.split("."))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.words.add(node.name)
        elif isinstance(node, ast.ClassDef):
            self.words.add(node.name)
            self.members.setdefault(node.name, set()).update(_members(node))
            bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
            self.bases.setdefault(node.name, set()).update(ast.unparse(base).rpartition(".")[2] for base in bases)

    def has_member(self, owner: str, member: str) -> bool:
        """True if a class, or a base of it, has a member. A class of another library has every member."""
        seen: set[str] = set()
        todo = [owner]
        while todo:
            name = todo.pop()
            if name not in self.members and name not in ("Protocol", "Generic", "ABC", "object"):
                return True
            if member in self.members.get(name, ()):
                return True
            seen.add(name)
            todo += self.bases.get(name, set()) - seen
        return False


def _members(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names that a class defines, and those that its methods set on ``self``."""
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield part.name
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            yield part.attr
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id


def prose_problems(page: Path, sources: Sources, files: set[str]) -> list[str]:
    """Return the names in a page that do not exist: classes, their members, private names, and files.

    In a picture only members of classes are looked at: its other words need not be names.
    """
    problems = []
    text = page.read_text(encoding="utf-8")
    in_pictures = (name for fence in FENCE.findall(text) for name in MEMBER.findall(fence))
    for span in [*CODE.findall(FENCE.sub("", text)), *in_pictures]:
        if FILE.fullmatch(span):
            if not (page.parent / span).exists() and not any(f"/{file}".endswith(f"/{span}") for file in files):
                problems.append(f"the file {span} does not exist")
            continue
        name = NAME.fullmatch(span)
        if name is None:
            continue
        owner, member, private = name["owner"], name["member"], name["private"]
        if (owner or private) not in sources.words or (member and not sources.has_member(owner, member)):
            problems.append(f"{span} does not exist")
    return problems


def modules_in_docstring(init: Path) -> list[str]:
    """Return the private modules that the docstring of a package names: the package's page lists them."""
    docstring = ast.get_docstring(tree_of(init)) or ""
    names = re.findall(r"`+_?(\w+)`+", docstring)
    return [name for name in names if (init.parent / f"_{name}.py").exists()]
