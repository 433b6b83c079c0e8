"""`Page`: an SVG picture with its own background, readable on light and on dark pages."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias
from xml.sax.saxutils import escape

__all__ = ["COLOURS", "DARK", "LIGHT", "WIDTH", "Axis", "Colour", "Page", "width_of"]

#: A phone shows a picture of this width with half the size: one that must be read there is narrower.
WIDTH: Final = 720

Colour: TypeAlias = Literal["blue", "orange", "green", "purple", "red", "teal", "grey"]
Anchor: TypeAlias = Literal["start", "middle", "end"]
Kind: TypeAlias = Literal["ink", "note", "on"]

#: Colours of each mode. ``on`` is text on a solid colour.
LIGHT: Final = {"page": "#ffffff", "ink": "#1c2430", "note": "#45505d", "line": "#c3cad3", "on": "#ffffff"}
DARK: Final = {"page": "#0f141a", "ink": "#e6ebf1", "note": "#b4bfca", "line": "#465361", "on": "#0f141a"}

#: The solid and the soft colour on a light page, then on a dark one.
COLOURS: Final[dict[Colour, tuple[str, str, str, str]]] = {
    "blue": ("#2a65a3", "#dfeaf6", "#7fb4ec", "#1b3350"),
    "orange": ("#9c5500", "#faead3", "#f0a94a", "#46300f"),
    "green": ("#2a7442", "#dcf0e2", "#72c78d", "#17402a"),
    "purple": ("#6f4fa0", "#ebe4f6", "#b79be0", "#352a50"),
    "red": ("#b03e5a", "#f9e1e7", "#ec8aa0", "#4d1f2b"),
    "teal": ("#1f7373", "#d8f0ef", "#6cc5c3", "#123f3f"),
    "grey": ("#5d6874", "#eceff2", "#9aa6b2", "#29323d"),
}

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def width_of(text: str, size: float = 15) -> float:
    """Return the approximate width of a text in pixels, rather too much than too little."""
    return size * sum(0.32 if letter in "iljtfr.,:;'|!() " else 0.9 if letter in "mwMW@→←" else 0.58 for letter in text)


class Axis:
    """A horizontal axis from ``low`` at the pixel ``left`` to ``high`` at the pixel ``right``."""

    def __init__(self, low: float, high: float, left: float, right: float, *, logarithmic: bool = False) -> None:
        self._low, self._high, self.left, self.right, self._logarithmic = low, high, left, right, logarithmic

    def at(self, value: float) -> float:
        """Return the pixel of a value; values beyond the ends are at the ends."""
        value = min(max(value, self._low), self._high)
        if self._logarithmic:
            share = math.log(value / self._low) / math.log(self._high / self._low)
        else:
            share = (value - self._low) / (self._high - self._low)
        return self.left + share * (self.right - self.left)

    def ticks(self, most: int = 8) -> list[float]:
        """Return at most ``most`` round values."""
        if self._logarithmic:
            powers = range(math.ceil(math.log10(self._low)), math.floor(math.log10(self._high)) + 1)
            return [10.0**power for power in powers]
        rough = (self._high - self._low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        return [step * n for n in range(math.ceil(self._low / step), math.floor(self._high / step + 1e-9) + 1)]


class Page:
    """A picture. The methods add to it; `svg` returns it.

    A text that would be cut off at the edge of the picture is a ValueError.
    """

    def __init__(self, title: str, description: str, height: float, width: float = WIDTH) -> None:
        self._title, self._description, self._height, self._width = title, description, height, width
        self._parts: list[str] = []
        self._used: set[str] = set()
        self.text(20, 32, title, size=19, bold=True)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 15,
        anchor: Anchor = "start",
        kind: Kind = "ink",
        bold: bool = False,
    ) -> None:
        """Add a line of text; ``y`` is its base line."""
        width = width_of(text, size) * (1.1 if bold else 1.0)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        if left < 2 or left + width > self._width - 2 or not size <= y <= self._height - 4:
            raise ValueError(f"{text!r} at {x:.0f}, {y:.0f} does not fit into the picture {self._title!r}")
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        weight = ' font-weight="600"' if bold else ""
        height = "" if size == 15 else f' font-size="{size:g}"'
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{place}{height}{weight} class="{kind}">{_xml(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, colour: Colour = "grey") -> None:
        """Add a rectangle with a soft colour and a border, for text of kind ``ink``."""
        self._used.add(colour)
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="6" class="{colour}-soft"/>'
        )

    def labelled(self, x: float, y: float, width: float, height: float, *lines: str, colour: Colour = "grey") -> None:
        """Add a box with centred lines, the first one bold."""
        self.box(x, y, width, height, colour)
        first = y + height / 2 + 5 - 10 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + 20 * number, line, anchor="middle", bold=number == 0)

    def bar(
        self, x: float, y: float, width: float, height: float, colour: Colour, *, label: str = "", tooltip: str = ""
    ) -> None:
        """Add a rectangle with a solid colour, and its label if the label fits."""
        self._used.add(colour)
        title = f"<title>{_xml(tooltip)}</title>" if tooltip else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1.5):.1f}" height="{height:.1f}" '
            f'class="{colour} edge">{title}</rect>'
        )
        if label and width_of(label, 14) <= width - 3:
            self.text(x + width / 2, y + height / 2 + 5, label, size=14, anchor="middle", kind="on", bold=True)

    def line(
        self,
        *points: tuple[float, float],
        colour: Colour | None = None,
        dashed: bool = False,
        width: float = 1.5,
    ) -> None:
        """Add a line through points."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<path d="M{path}" fill="none" stroke-width="{width:g}"{dashes} class="{self._stroke(colour)}"/>'
        )

    def arrow(self, *points: tuple[float, float], colour: Colour | None = None, dashed: bool = False) -> None:
        """Add a line through points, with a head at its end."""
        (x1, y1), (x2, y2) = points[-2:]
        length = math.hypot(x2 - x1, y2 - y1)
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        base = (x2 - 9 * dx, y2 - 9 * dy)
        self.line(*points[:-1], base, colour=colour, dashed=dashed, width=1.8)
        corners = [(x2, y2), (base[0] - 5 * dy, base[1] + 5 * dx), (base[0] + 5 * dy, base[1] - 5 * dx)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
        self._parts.append(f'<path d="M{path}z" class="{colour or "note"}"/>')

    def area(self, points: Sequence[tuple[float, float]], colour: Colour) -> None:
        """Add a filled polygon."""
        self._used.add(colour)
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self._parts.append(f'<path d="M{path}z" class="{colour}"/>')

    def dot(self, x: float, y: float, colour: Colour, *, ring: bool = False, tooltip: str = "") -> None:
        """Add a circle, filled or not."""
        self._used.add(colour)
        title = f"<title>{_xml(tooltip)}</title>" if tooltip else ""
        look = f'fill="none" stroke-width="2.5" class="{colour}-line"' if ring else f'class="{colour}"'
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" {look}>{title}</circle>')

    def cross(self, x: float, y: float, colour: Colour, size: float = 6) -> None:
        """Add a cross, for an error."""
        self.line((x - size, y - size), (x + size, y + size), colour=colour, width=3)
        self.line((x - size, y + size), (x + size, y - size), colour=colour, width=3)

    def axis(self, axis: Axis, top: float, bottom: float, label: str, *, most: int = 8) -> None:
        """Add the ticks of an axis from one height to another, with their values and the label below."""
        for value in axis.ticks(most):
            x = axis.at(value)
            self.line((x, top), (x, bottom + 5), dashed=True, width=1)
            self.text(x, bottom + 22, f"{value:g}", size=14, anchor="middle", kind="note")
        self.text((axis.left + axis.right) / 2, bottom + 44, label, size=14, anchor="middle", kind="note")

    def legend(self, x: float, y: float, entries: Sequence[tuple[Colour, str]]) -> None:
        """Add a row of colours and their meanings; ``y`` is the base line."""
        for colour, label in entries:
            self.bar(x, y - 12, 14, 14, colour)
            self.text(x + 20, y, label, kind="note")
            x += 44 + width_of(label)

    def svg(self) -> str:
        """Return the picture as SVG text."""
        width, height = f"{self._width:g}", f"{self._height:g}"
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="img" font-family="system-ui, sans-serif" font-size="15">',
            f"<title>{_xml(self._title)}</title>",
            f"<desc>{_xml(self._description)}</desc>",
            self._style(),
            f'<path d="M0 0h{width}v{height}h-{width}z" class="page"/>',
        ]
        return "\n".join([*head, *self._parts, "</svg>\n"])

    def _stroke(self, colour: Colour | None) -> str:
        if colour is None:
            return "line"
        self._used.add(colour)
        return f"{colour}-line"

    def _style(self) -> str:
        used = [colour for colour in COLOURS if colour in self._used]
        return f"<style>{_rules(LIGHT, used, 0)}@media(prefers-color-scheme:dark){{{_rules(DARK, used, 2)}}}</style>"


def _rules(mode: dict[str, str], used: Sequence[Colour], first: int) -> str:
    """Return the CSS of one mode; its colours are at ``first`` in `COLOURS`."""
    rules = [f".{name}{{fill:{mode[name]}}}" for name in ("page", "ink", "note", "on")]
    rules += [f".line{{stroke:{mode['line']}}}", f".edge{{stroke:{mode['page']};stroke-width:1}}"]
    for colour in used:
        solid, soft = COLOURS[colour][first : first + 2]
        rules.append(f".{colour}{{fill:{solid}}}.{colour}-line{{stroke:{solid}}}")
        rules.append(f".{colour}-soft{{fill:{soft};stroke:{solid};stroke-width:1.5}}")
    return "".join(rules)


def _xml(text: str) -> str:
    return escape(_NOT_XML.sub("\ufffd", text))
