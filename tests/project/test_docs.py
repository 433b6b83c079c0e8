"""The Python blocks of README and of the documentation run without warnings and print the expected output.

Each block of Python in README and below docs runs on its own, as at an asyncio prompt: `await` is allowed outside of
functions. A block of text directly after it is its expected output; after the comment ``<!-- the figures vary -->``,
all numbers in it may differ, after ``<!-- the figures and the order vary -->`` also the order of its lines, and after
``<!-- the figures and the end of "TEXT" vary -->`` also what follows TEXT at the start of a line. An HTML comment
directly before a block of Python changes how it is run:

======================================  ===================================================================
``<!-- run … -->``                      lines around the block, which replaces a line of three dots in them
``<!-- run as above -->``               the lines of the comment before it on the page
``<!-- run in FILE -->``                lines around the block, in a file of ``tests/project/around``
``<!-- run in the program -->``         the first program of the page, with the block above ``asyncio.run(main())``
``<!-- pytest … -->``                   as ``run``, for a file of tests: pytest runs it, with the page's ``toml`` block
``<!-- pytest of FILE, block N -->``    a file of tests beside a block of the page, which is FILE; 1 without ``N``
======================================  ===================================================================
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import re
import runpy
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiocuda
from tests.project.forked import LIBRARIES, ForkingProcess, forking_pytest
from tests.project.tree import PACKAGE, ROOT

DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted(DOCS.glob("*.md")),
    *(
        page
        for folder in ("tutorial", "how-to", "explanation", "reference")
        for page in sorted((DOCS / folder).glob("*.md"))
    ),
]

BLOCK = re.compile(
    r"""
    (?: ^<!--[ ](?P<how>run|pytest)\b (?P<around>(?:(?!-->).)*) -->\n+ )?
    ^```python\n (?P<code>.*?) ^```$
    (?: \n\n (?: <!--[ ]the[ ](?P<vary>figures(?:[ ]and[ ]the[ ](?:order|end[ ]of[ ]"[^"\n]+"))?)[ ]vary[ ]-->\n\n )?
        ```text\n (?P<printed>.*?) ^```$ )?
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)

AROUND = ROOT / "tests" / "project" / "around"

DOTS = re.compile(r"^( *)\.\.\.$", re.MULTILINE)

#: Where an answer of the tutorial is inserted.
END = re.compile(r'^(if __name__ == "__main__":.*\n    )?asyncio\.run\(main\(\)\)$', re.MULTILINE)

TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)

FIGURE = re.compile(r"\d+(\.\d+)?")

#: For a file of tests on a page without a ``toml`` block.
SETTINGS = """
[tool.pytest.ini_options]
asyncio_default_fixture_loop_scope = "function"
filterwarnings = ["error"]
"""

#: asyncio's debug mode reports slow callbacks. On a busy machine the program is not the reason.
SLOW = re.compile(r"^Executing <.* took \d+\.\d+ seconds\n", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of Python on a page.

    Attributes
    ----------
    shown
        The block as the page shows it.
    code
        The block with the lines around it.
    """

    place: str
    shown: str
    code: str
    how: str
    settings: str
    printed: str | None
    vary: str
    files: dict[str, str]

    @property
    def is_tests(self) -> bool:
        """True for a file of tests."""
        return self.how.startswith("pytest")


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    settings = "".join(TOML.findall(text)) or SETTINGS
    found: list[Block] = []
    above = ""
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        around = match["around"] or "..."
        files: dict[str, str] = {}
        if around.strip() == "as above":
            around = above
        elif around.strip() == "in the program":
            around, inserted = END.subn(r"...\n\n\n\g<0>", found[0].code)
            assert inserted == 1, f"{page.name}: the first program has no last line asyncio.run(main())"
        elif around.startswith(" of "):
            file, _, number = around.strip().removeprefix("of ").partition(", block ")
            files = {file: found[int(number or 1) - 1].shown}
            around = "..."
        elif around.startswith(" in "):
            around = (AROUND / around.split()[1]).read_text(encoding="utf-8")
        elif match["around"]:
            above = around
        before, indentation, after = DOTS.split(around, maxsplit=1)
        code = before + textwrap.indent(match["code"], indentation) + after
        how = f"{match['how'] or 'run'}{match['around'] or ''}".rstrip()
        place, vary = f"{page.parent.name}/{page.name}:{line}", match["vary"] or ""
        found.append(Block(place, match["code"], code, how, settings, match["printed"], vary, files))
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]

#: Libraries that are not in the development environment, and whether they need a GPU.
NEEDED = {"torch": False, "cupy": True, "numba": True, "cuda.core": True}


def libraries(block: Block) -> list[str]:
    """Return the libraries that a block imports."""
    return [name for name in NEEDED if re.search(rf"^ *(import|from) (\w+, )*{re.escape(name)}\b", block.code, re.M)]


def runs() -> list[Any]:
    """Return each block with the driver that runs it; some need a GPU."""
    found = []
    for block in BLOCKS:
        needed = libraries(block)
        if not any(NEEDED[name] for name in needed):
            found.append(pytest.param(block, "host", id=block.place))
        if needed:
            found.append(pytest.param(block, "cuda", id=f"{block.place}-cuda", marks=pytest.mark.gpu))
    return found


@pytest.fixture(scope="module")
def programs(request: pytest.FixtureRequest) -> Iterator[ForkingProcess]:
    """A process that forks for each block; for those on a GPU it has imported PyTorch, which takes seconds."""
    on_a_gpu = any(item.nodeid.endswith("-cuda]") for item in request.session.items)
    with contextlib.closing(ForkingProcess([*LIBRARIES, *(["torch"] if on_a_gpu else [])])) as process:
        yield process


@pytest.fixture(scope="module")
def runs_of_pytest() -> Iterator[ForkingProcess]:
    """A process that forks for each block of tests."""
    with contextlib.closing(forking_pytest("-X", "dev")) as process:
        yield process


def test_every_block_is_found() -> None:
    for page in PAGES:
        fences = re.findall(r"^\s*```python", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(blocks(page)) == len(fences), page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_fields_without_names_come_first_on_each_page(page: Path) -> None:
    fields = re.search(r'\bfields"?(?:=|: | = )(.)', "".join(block.shown for block in blocks(page)), re.IGNORECASE)
    assert fields is None or fields[1] == "["


def imported(block: Block) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import from aiocuda in a block, which is compiled for that."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
    for node in ast.walk(compile(block.code, block.place, "exec", flags)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("aiocuda"):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.slow
def test_blocks_compile_and_import_names_that_exist() -> None:
    """Also those that need a library which is not installed."""
    names = {name for block in BLOCKS for name in imported(block)}
    missing = [
        f"{module}.{name}"
        for module, name in sorted(names)
        if not hasattr(importlib.import_module(module), name) and importlib.util.find_spec(f"{module}.{name}") is None
    ]
    assert missing == []


#: How-tos that are about commands, or tables to look something up.
WITHOUT_PROGRAM = {"command-line.md", "coming-from.md", "deploy.md", "install.md", "troubleshooting.md", "which-one.md"}


def test_each_how_to_begins_with_a_complete_program() -> None:
    wrong = []
    for page in sorted((DOCS / "how-to").glob("*.md")):
        before = page.read_text(encoding="utf-8").partition("\n## ")[0]
        first = before.partition("```python\n")[2].partition("\n```")[0]
        ends = r"^(asyncio\.run\(main\(\)\)$|async def test_|app = |if __name__ == )"
        is_complete = re.search(ends, first, re.MULTILINE)
        if page.name not in WITHOUT_PROGRAM and not is_complete:
            wrong.append(page.name)
    assert wrong == []


@pytest.mark.parametrize("page", sorted((DOCS / "tutorial").glob("*.md")), ids=lambda page: page.name)
def test_the_answer_of_each_exercise_runs_in_the_program_of_its_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    exercise = text.count("\n", 0, text.index("\n## Exercise\n"))
    answers = [block.how for block in blocks(page) if int(block.place.partition(":")[2]) > exercise]
    assert answers == ["run in the program"]


def test_each_line_of_the_table_of_which_one_runs(programs: ForkingProcess, tmp_path: Path) -> None:
    text = (DOCS / "how-to" / "which-one.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!you have|---)", text, re.MULTILINE)
    lines = re.findall(r"^\| [^|]+ \| `([^`]+)` \|", text, re.MULTILINE)
    assert len(lines) == len(rows) >= 15
    before, _, after = DOTS.split((AROUND / "which_one.txt").read_text(encoding="utf-8"), maxsplit=1)
    program = before + textwrap.indent("\n".join(lines), " " * 8) + after
    (tmp_path / "page.py").write_text(program, encoding="utf-8")
    finished = programs.run(["page.py"], tmp_path, {"AIOCUDA_DRIVER": "host"})
    assert (finished.status, SLOW.sub("", finished.errors)) == (0, ""), program + finished.errors


def test_the_page_about_installation_names_this_version() -> None:
    text = (DOCS / "how-to" / "install.md").read_text(encoding="utf-8")
    assert f"for version {aiocuda.__version__}." in text
    assert set(re.findall(r"aiocuda-([\d.]+\w*)-py3", text)) == {aiocuda.__version__}


def test_each_environment_variable_is_documented() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    pages = (DOCS / "how-to" / "deploy.md", DOCS / "explanation" / "testing.md")
    explained = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert {name for name in re.findall(r"AIOCUDA_[A-Z_]+", text) if f"`{name}`" not in explained} == set()


def test_built_pages_have_no_comments_and_the_same_lines() -> None:
    without_comments = runpy.run_path(str(DOCS / "conf.py"))["without_comments"]
    fence = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        left = without_comments(text)
        assert "<!--" not in fence.sub("", left), page.name
        assert fence.findall(left) == fence.findall(text), page.name
        assert left.count("\n") == text.count("\n"), page.name


def test_the_search_finds_troubleshooting_first() -> None:
    """A word in a main entry of the index has the score 100, the title of a page 15 at most."""
    with_index = runpy.run_path(str(DOCS / "conf.py"))["with_index"]
    entries = {
        page.stem: re.findall("^```{index} (.*)\n```$", with_index(page.read_text("utf-8")), re.M) for page in PAGES
    }
    words = {page: {word.strip() for line in lines for word in line.split(",")} for page, lines in entries.items()}
    assert {page for page, found in words.items() if found} == {"troubleshooting"}
    assert {"! timeout", "! out of memory", "! 429"} <= words["troubleshooting"]


@pytest.mark.slow
@pytest.mark.parametrize(("block", "driver"), runs())
def test_block_runs_and_prints_the_expected_output(
    block: Block, driver: str, programs: ForkingProcess, runs_of_pytest: ForkingProcess, tmp_path: Path
) -> None:
    others = ("distributed", "fastapi", "prometheus_client", "testclient")  # a GPU machine often has none of them
    needed = (name for name in others if re.search(rf"(?<!torch\.){name}", block.code))
    for name in [*libraries(block), *needed]:
        pytest.importorskip("httpx2" if name == "testclient" else name)
    for name, text in block.files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    if block.is_tests:
        (tmp_path / "pyproject.toml").write_text(block.settings, encoding="utf-8")
        (tmp_path / "test_page.py").write_text(block.code, encoding="utf-8")
        finished = runs_of_pytest.run(["-q", "test_page.py"], tmp_path, {})
        assert (finished.status, finished.errors) == (0, ""), finished.output + finished.errors
        assert re.search(r"^\d+ passed", finished.output, re.MULTILINE), finished.output
    else:
        (tmp_path / "page.py").write_text(block.code, encoding="utf-8")
        finished = programs.run(["page.py"], tmp_path, {"AIOCUDA_DRIVER": driver})
        assert (finished.status, SLOW.sub("", finished.errors)) == (0, ""), finished.output + finished.errors
        printed, expected = finished.output, block.printed or ""
        if block.vary:
            printed, expected = FIGURE.sub("#", printed), FIGURE.sub("#", expected)
        varying = re.search('end of "(.+)"', block.vary)
        if varying is not None:
            line = re.compile(f"^({re.escape(varying[1])}).*", re.MULTILINE)
            printed, expected = line.sub(r"\1", printed), line.sub(r"\1", expected)
        if "order" in block.vary:
            printed, expected = ("\n".join(sorted(lines.splitlines())) for lines in (printed, expected))
        assert printed == expected, printed


def test_tables_of_features_and_promises_are_lists_on_a_phone() -> None:
    """They have four columns, and wider tables scroll. The style names the pages by their headings."""
    style = (DOCS / "_static" / "tables.css").read_text(encoding="utf-8")
    for page in ("features", "promises"):
        text = (DOCS / "reference" / f"{page}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {page.capitalize()}\n")
        assert f"section#{page}" in style.partition("@media")[2]
