"""Prints the public names and signatures of the library: ``python -m tests.project.api > tests/project/api/NAME.json``.

The record has the names in ``__all__`` of each module without an underscore, and the public members of the classes
among them. What can be called has its parameters, as the text of a signature in which each default is 0. A class that
has an earlier name has this name. All others have None.
"""

from __future__ import annotations

import importlib
import inspect
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiocuda
from tests.project.tree import ROOT

#: Of programs, by the name of the module.
COMMANDS = ("aiocuda.__main__", "aiocuda.cli")


def modules() -> list[str]:
    """Return the names of the public modules."""
    root = Path(aiocuda.__file__).parent
    paths = [("aiocuda", *path.relative_to(root).with_suffix("").parts) for path in sorted(root.rglob("*.py"))]
    names = [".".join(path).removesuffix(".__init__") for path in paths]
    return sorted(name for name in names if "._" not in name and not name.startswith(COMMANDS))


def signature(function: Any) -> str | None:
    """Return the parameters of something that can be called; None if it does not tell them."""
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = type(function).__call__  # `health` has another signature for FastAPI
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    # Keywords that are only refused, with a cure, are none. A launch takes some of them.
    return str(
        found.replace(
            parameters=[
                each.replace(annotation=each.empty, default=each.empty if each.default is each.empty else 0)
                for name, each in found.parameters.items()
                if name != "self"
                and each.annotation != "Never"
                and (name != "unknown" or function.__name__ == "launch")
            ],
            return_annotation=found.empty,
        )
    )


def record() -> dict[str, str | None]:
    """Return each public name with its parameters."""
    settings = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    settings["_stub_libraries"]()
    found: dict[str, str | None] = {}
    classes: dict[type, str] = {}
    for module_name in modules():
        module = importlib.import_module(module_name)
        names = set(getattr(module, "__all__", ()))
        if module is aiocuda:  # which has more names than it lists
            names |= {*vars(module)["_MODULES"], *importlib.import_module("aiocuda.errors").__all__}
        for name in sorted(names):
            value, full = getattr(module, name), f"{module_name}.{name}"
            if not inspect.isclass(value):
                found[full] = signature(value) if callable(value) else None
            elif value in classes:
                found[full] = classes[value]
            else:
                classes[value] = full
                found.update(_members(full, value, settings["_MADE_BY_OTHERS"]))
    return found


def _members(name: str, value: type, made_by_others: set[str]) -> Iterator[tuple[str, str | None]]:
    """Yield a class and its public members. Programs do not call the classes that other objects make."""
    is_made = value.__name__ in made_by_others or getattr(value, "_is_protocol", False)
    yield name, None if is_made else signature(value)
    bases = [vars(base) for base in value.__mro__ if base.__module__.startswith("aiocuda")]
    for member in sorted({each for base in bases for each in (*base, *base.get("__annotations__", ()))}):
        static = inspect.getattr_static(value, member, None)  # None: an attribute of instances
        if not member.startswith("_") and (
            static is None or hasattr(value, member)
        ):  # else a name that raises the cure
            yield f"{name}.{member}", signature(getattr(value, member)) if inspect.isroutine(static) else None


def main() -> None:
    """Print the record of the library that Python imports."""
    json.dump(record(), sys.stdout, indent=0)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
