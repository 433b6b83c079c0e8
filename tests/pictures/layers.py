"""The layers of the package, from ``[tool.importlinter]`` of pyproject.toml."""

from __future__ import annotations

import re
import tomllib

from tests.benchmarks.machine import ROOT

from .svg import WIDTH, Colour, Page, width_of

__all__ = ["draw", "layers"]

#: The last layer of each part, from the highest; the text names the part.
PARTS: tuple[tuple[str, str, Colour], ...] = (
    ("observe", "for programs and services", "purple"),
    ("pool", "for several streams", "blue"),
    ("lowlevel", "the only way into the core", "grey"),
    ("device", "a device and its streams", "teal"),
    ("completion", "memory, kernels, waiting", "green"),
    ("driver", "CUDA, threads, virtual time", "orange"),
    ("errors", "everything may use these", "grey"),
)


def layers() -> list[list[str]]:
    """Return the names of each layer, from the highest; those of one layer do not import each other."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    lines = next(contract["layers"] for contract in contracts if contract["id"] == "floors")
    return [[name.strip(" ()") for name in re.split(r"[|:]", line)] for line in lines]


def draw() -> str:
    """Return the picture."""
    parts: list[tuple[list[list[str]], str, Colour]] = []
    rest = [names for names in layers() if names != ["__main__"]]
    for last, meaning, colour in PARTS:
        count = next(number for number, names in enumerate(rest, 1) if last in names)
        parts.append((rest[:count], meaning, colour))
        rest = rest[count:]
    if rest:
        raise ValueError(f"these layers are in no part of the picture: {rest}")
    rows = [(_lines(names), colour) for layer, _, colour in parts for names in layer]
    height = 64 + sum(10 + 26 * len(lines) for lines, _ in rows) + 10 * len(parts) + 30
    page = Page(
        "Layers of aiocuda: a package imports only from below",
        "Rows of packages, from the command line at the top to the errors at the bottom. "
        "A package imports only from rows below its own.",
        height,
    )
    y = 56.0
    for layer, meaning, colour in parts:
        top = y
        for names in layer:
            lines = _lines(names)
            size = 4 + 26 * len(lines)
            page.box(20, y, 446, size, colour)
            for number, line in enumerate(lines):
                page.text(243, y + 20 + 26 * number, line, anchor="middle", bold=True)
            y += size + 6
        page.line((478, top), (486, top), (486, y - 6), (478, y - 6), colour=colour, width=2)
        page.text(498, (top + y) / 2 + 2, meaning, kind="note")
        y += 10
    page.text(WIDTH / 2, height - 12, "drawn from [tool.importlinter] of pyproject.toml", kind="note", anchor="middle")
    return page.svg()


def _lines(names: list[str]) -> list[str]:
    """Return the names in lines that fit into a box."""
    lines: list[str] = []
    for name in names:
        if lines and width_of(f"{lines[-1]} · {name}") < 360:
            lines[-1] += f" · {name}"
        else:
            lines.append(name)
    return lines
