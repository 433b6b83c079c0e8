"""Checks of this process and of the program's main module, which the processes of a loader or a cluster import."""

from __future__ import annotations

import ast
import functools
import multiprocessing
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

from ..errors import InvalidArgumentError, InvalidTypeError

__all__ = ["check_main_guard", "check_pickle", "imported_main"]

#: In a pickle, the name of the main module: a string of 8 characters, which an object of this module begins with.
_MAIN_IN_PICKLE: Final = b"\x8c\x08__main__"


def check_main_guard(functions: dict[str, Any], user: str, otherwise: str = "") -> None:
    """Raise if this process may start none, or others cannot import the main module, or would run the program by that.

    Parameters
    ----------
    functions
        The objects of the program that the other processes use, by the argument's name.
    user
        The call that starts the processes, for messages.
    otherwise
        Another cure than to move the objects into a module, for messages.

    Raises
    ------
    InvalidTypeError
        One of them is defined in a main module that other processes do not import: a notebook, a REPL, ``python -c``,
        or a file ``__main__.py``.
    InvalidArgumentError
        The main module makes the call outside of ``if __name__ == "__main__":``, or is read from standard input. Or
        this process is daemonic.
    """
    if multiprocessing.current_process().daemon:
        raise InvalidArgumentError(
            f"{user} starts processes, and this process is daemonic, from which multiprocessing starts none: start it "
            f"with daemon=False{otherwise}"
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise _no_guard(user, "it starts processes again when one of them imports it")
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) == "<stdin>":
        raise InvalidArgumentError(
            f"{user} starts processes that import the main module of the program, and Python reads it from standard "
            "input: save the program as a file, and run the file"
        )
    if main is not None and not _is_imported(main):
        for name, thing in functions.items():
            owner = thing if hasattr(thing, "__qualname__") else type(thing)
            if getattr(owner, "__module__", None) == "__main__":
                raise _not_imported(user, f"{name}={thing!r}: it", otherwise)
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            guarded = _guarded_lines(frame.f_code.co_filename)
            if guarded is not None and not any(frame.f_lineno in lines for lines in guarded):
                raise _no_guard(user, f"line {frame.f_lineno} of {frame.f_code.co_filename} runs when one imports it")
        frame = frame.f_back


def check_pickle(pickle: bytes, user: str, otherwise: str) -> None:
    """Raise `InvalidTypeError` if a pickle has an object of a main module that other processes do not import.

    The arguments are those of `check_main_guard`, which sees only the objects themselves, and not their parts.
    """
    main = sys.modules.get("__main__")
    if main is not None and _MAIN_IN_PICKLE in pickle and not _is_imported(main):
        raise _not_imported(user, "these objects: a part of them", otherwise)


def _not_imported(user: str, what: str, otherwise: str) -> InvalidTypeError:
    return InvalidTypeError(
        f"{user} cannot use {what} is defined in a notebook, an interactive session, `python -c` or __main__.py, which "
        f"other processes do not import: put it into a module{otherwise}"
    )


def imported_main() -> ModuleType | None:
    """Return the main module of the program, if other processes import it."""
    main = sys.modules.get("__main__")
    return main if main is not None and _is_imported(main) else None


def _is_imported(main: Any) -> bool:
    """True if other processes import the main module. `multiprocessing` leaves out files ``__main__.py``."""
    spec = getattr(main, "__spec__", None)
    if spec is None:
        return getattr(main, "__file__", None) is not None
    return spec.name != "__main__" and not spec.name.endswith(".__main__")


def _no_guard(user: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{user} starts processes that import the main module of the program, and {why}: put the code that "
        "starts the program below `if __name__ == '__main__':`"
    )


@functools.cache
def _guarded_lines(file: str) -> list[range] | None:
    """Return the lines of a file inside of tests of ``__name__``; None if there is no such file."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, SystemError):  # SystemError: a parse in a finaliser, in Python 3.11
        return None
    return [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(tree)
        if isinstance(node, (ast.If, ast.IfExp))
        and any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test))
    ]
