"""The README of each package lists its files and classes, and names nothing that does not exist."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.project.readmes import (
    PAGE,
    Sources,
    classes_of,
    defined_in,
    has_page_between,
    modules_in_docstring,
    packages_without_page,
    prose_problems,
    rows_of,
    table_problems,
)
from tests.project.tree import PACKAGE, ROOT

FOLDERS = [page.parent for page in sorted(PACKAGE.rglob(PAGE))]

#: Pages outside of the package whose files a page may name.
OTHERS = ("docs", "tests", "examples")


def shown(folder: Path) -> str:
    return folder.relative_to(PACKAGE).as_posix()


@cache
def sources() -> Sources:
    return Sources.below(PACKAGE)


@cache
def files() -> set[str]:
    found = [path for path in PACKAGE.rglob("*") if path.is_file()]
    found += [path for folder in OTHERS for path in (ROOT / folder).rglob("*.*") if "_build" not in path.parts]
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_each_package_of_more_than_five_files_has_a_page() -> None:
    assert packages_without_page(PACKAGE) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=shown)
def test_tables_list_each_file_and_class(folder: Path) -> None:
    assert table_problems(folder) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=shown)
def test_names_in_a_page_exist(folder: Path) -> None:
    assert prose_problems(folder / PAGE, sources(), files()) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=shown)
def test_docstring_of_a_package_with_a_page_lists_no_modules(folder: Path) -> None:
    """There is one list, and not two."""
    inits = [init for init in sorted(folder.rglob("__init__.py")) if not has_page_between(init, folder)]
    assert {shown(init): found for init in inits if (found := modules_in_docstring(init))} == {}


# -- the checks themselves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS, ids=shown)
def test_a_file_and_a_class_that_a_page_leaves_out_are_found(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "package")
    page = copy / PAGE
    text = page.read_text(encoding="utf-8")
    rows = [(file, row.names) for row in rows_of(text) for file in row.files if file.endswith(".py")]

    last = rows[-1][0]
    page.write_text(re.sub(rf"^\| `{re.escape(last)}`.*\n", "", text, flags=re.MULTILINE), encoding="utf-8")
    assert f"{last} is in no row" in table_problems(copy)

    file, name = next((file, name) for file, names in rows for name in names if name in classes_of(copy / file))
    lines = (line.replace(f"`{name}`", "", 1) if line.startswith(f"| `{file}`") else line for line in text.splitlines())
    page.write_text("\n".join(lines), encoding="utf-8")
    assert f"{file}: its row lacks {name}" in table_problems(copy)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a page that is right."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "own").mkdir()
    code = {
        "__init__.py": '"""A package. README.md describes it."""\n',
        "_ring.py": "class Ring:\n    def turn(self): self._at = 0\n\nclass _Slot: pass\n",
        "_tools.py": "LIMIT = 3\n\ndef tidy(): pass\n",
        "inner/__init__.py": "",
        "inner/_part.py": "class Part(Base): pass\n\nclass Base: at: int\n",
        "own/_far.py": "class Far: pass\n",
        "own/README.md": "| file | names | content |\n|---|---|---|\n| `_far.py` | `Far` | away |\n",
        PAGE: (
            "`Ring.turn` sets `Ring._at`; see `_tools.py`.\n\n"
            "```text\nRing.turn ─► a Hoop\n```\n\n"
            "| file | main names | content |\n"
            "|---|---|---|\n"
            "| `_ring.py` | `Ring` | a ring |\n"
            "| `_tools.py` | `tidy`, `LIMIT` | tools |\n"
            "| `inner/_part.py` | `Part`, `Base` | parts |\n"
            "| `own/` | | [its page](own/README.md) |\n"
        ),
    }
    for name, text in code.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def problems(package: Path) -> list[str]:
    names = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    return table_problems(package) + prose_problems(package / PAGE, Sources.below(package), names)


def test_page_that_is_right_has_no_problems(package: Path) -> None:
    assert problems(package) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda p: (p / "_new.py").write_text(""), ["_new.py is in no row"]),
        (lambda p: (p / "inner" / "_new.py").write_text(""), ["inner/_new.py is in no row"]),
        (lambda p: (p / "own" / "_new.py").write_text(""), []),  # its own page lists it
        (lambda p: (p / "_ring.py").write_text("class Ring:\n    _at = turn = 0\nclass New: pass\n"),
         ["_ring.py: its row lacks New"]),
        (lambda p: (p / "inner" / "_part.py").rename(p / "inner" / "_piece.py"),
         ["inner/_part.py does not exist", "inner/_piece.py is in no row", "the file inner/_part.py does not exist"]),
        (lambda p: edit(p / "_tools.py", "tidy", "clean"), ["_tools.py does not define tidy"]),
        (lambda p: edit(p / "_ring.py", "turn", "roll"), ["Ring.turn does not exist"] * 2),  # in the picture, too
        (lambda p: edit(p / PAGE, "`Ring._at`", "`Rong._at`"), ["Rong._at does not exist"]),
        (lambda p: edit(p / PAGE, "`Ring._at`", "`_spin`"), ["_spin does not exist"]),
        (lambda p: edit(p / PAGE, "`Ring._at`", "`Part.at`"), []),  # of its base
        (lambda p: edit(p / PAGE, "see `_tools.py`", "see `_tolls.py`"), ["the file _tolls.py does not exist"]),
        (lambda p: edit(p / PAGE, "| `Ring` |", "| `Ring`, `Hoop` |"),
         ["_ring.py does not define Hoop", "Hoop does not exist"]),
        (lambda p: edit(p / PAGE, "| `Ring` |", "| |"), ["_ring.py: its row lacks Ring"]),
        (lambda p: edit(p / PAGE, "| `own/` | | [its page](own/README.md) |\n", ""), ["own/ is in no row"]),
        (lambda p: edit(p / PAGE, "| `_tools.py` |", "| `_ring.py` |"),
         ["_ring.py has two rows", "_ring.py does not define tidy", "_ring.py does not define LIMIT",
          "_ring.py: its row lacks Ring", "_tools.py is in no row"]),
        (lambda p: edit(p / PAGE, "| `_tools.py` |", "| `_tools.py`, `_ring.py` |"),
         ["a row has one file, not ['_tools.py', '_ring.py'], with ['tidy', 'LIMIT']", "_tools.py is in no row"]),
    ],
)  # fmt: skip
def test_each_mistake_is_found(package: Path, change: Callable[[Path], object], found: list[str]) -> None:
    change(package)
    assert problems(package) == found


def test_package_without_a_page_is_found(tmp_path: Path) -> None:
    for name, count in (("small", 5), ("large", 4)):
        (tmp_path / name / "inner").mkdir(parents=True)
        for file in ("__init__.py", *(f"_{number}.py" for number in range(count))):
            (tmp_path / name / file).write_text("")
    assert packages_without_page(tmp_path) == []
    for number in range(2):  # those of a folder in the package count
        (tmp_path / "large" / "inner" / f"_{number}.py").write_text("")
    assert packages_without_page(tmp_path) == ["large"]
    (tmp_path / "large" / PAGE).write_text("")
    assert packages_without_page(tmp_path) == []


def test_modules_in_a_docstring_are_found(package: Path) -> None:
    init = package / "__init__.py"
    assert modules_in_docstring(init) == []
    init.write_text('"""A package.\n\n``ring``\n    A ring.\n`_tools`\n    Tools.\n"""\n', encoding="utf-8")
    assert modules_in_docstring(init) == ["ring", "tools"]


def test_names_of_blocks_are_defined(tmp_path: Path) -> None:
    path = tmp_path / "_blocks.py"
    path.write_text("if True:\n    a = 1\nelse:\n    b: int\ntry:\n    class C: pass\nexcept: pass\nd, e = 1, 2\n")
    assert defined_in(path) == {"a", "b", "C", "d", "e"}
