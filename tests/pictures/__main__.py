"""Draws pictures into docs/pictures: ``python -m tests.pictures [NAME…]``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .table import FOLDER, PICTURES


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pictures", description="draw pictures into docs/pictures")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, if left out: {', '.join(PICTURES)}")
    given = parser.parse_args(argv)
    unknown = sorted(set(given.names) - set(PICTURES))
    if unknown:
        parser.error(f"there is no picture {unknown[0]!r}; the names are {', '.join(PICTURES)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in given.names or PICTURES:
        path = FOLDER / f"{name}.svg"
        path.write_text(PICTURES[name].draw(), encoding="utf-8")
        print(f"{path}: {path.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
