"""Finds the declaration of a kernel in CUDA C++ source, without a compiler.

It parses only the grammar that this needs. It expands no macros and instantiates no templates: a kernel with a
parameter list that needs them is refused with an error.
"""

from __future__ import annotations

import re

from ..errors import CompileError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from ._object_code import kind_of
from ._signature import Parameter, Signature, pointer, scalar

__all__ = ["MAX_SOURCE_BYTES", "find_kernel", "has_dynamic_shared", "read_parameters", "read_source", "refuse_includes"]

MAX_SOURCE_BYTES = 16 << 20

# Every pattern takes linear time, even if the end of a comment or literal is missing: a source may be 16 MiB of "/*".
_SPLICED = re.compile(r"^(?:[^\n]*\\\r?\n)+[^\n]*", re.MULTILINE)
_SPLICE = re.compile(r"\\\r?\n")
_BLANKED = re.compile(
    r"""
      //[^\n]*
    | /\*.*?(?:\*/|\Z)
    | (?:u8|[uUL])?R"(?P<raw>[^\s()\\]{0,16})\(.*?(?:\)(?P=raw)"|\Z)
    | "(?:[^"\\\n]|\\.)*(?:"|(?=\n)|\Z)
    | (?<!\w)(?:u8|[uUL])?'(?:[^'\\\n]|\\.)*(?:'|(?=\n)|\Z)   # not the separator in 1'000
    """,
    re.DOTALL | re.VERBOSE,
)
_DIRECTIVE = re.compile(r"^[ \t\f\v]*(?:\#|%:)[ \t]*(?P<name>\w*)[^\n]*", re.MULTILINE)
_STATEMENT = re.compile(r"[^;{}]+")
_SCOPE = re.compile(r"\bnamespace\b(?P<names>[^;{}()=]*)\{|(?P<brace>[{}])")
_BODY = re.compile(r"[{}]|\bextern\s+__shared__\b")
_ATTRIBUTE = re.compile(r"\[\[.*?\]\]", re.DOTALL)
_TOKEN = re.compile(r"(?:::\s*)?[A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)*|\.\.\.|\S")

#: One line without a parenthesis, which every kernel has, that ends like the name of a file.
_PATH = re.compile(r"[^\n(]{1,4096}\.(?:cu|cuh|c|cc|cpp|cxx|h|hh|hpp|inl)")

# Directives that open no file.
_CLOSED_DIRECTIVES = frozenset(
    {"", "define", "undef", "if", "ifdef", "ifndef", "elif", "elifdef", "elifndef", "else", "endif"}
    | {"error", "warning", "pragma", "line"}
)
_QUALIFIERS = frozenset({"volatile", "__restrict__", "__restrict", "__grid_constant__", "struct"})
_FUNDAMENTAL = frozenset({"unsigned", "signed", "short", "long", "int", "char", "float", "double", "bool", "void"})

#: What a kernel may not return, before its name.
_RETURNED = re.compile(rf"\b(?:{'|'.join(sorted(_FUNDAMENTAL - {'void'}))})(?=\s*\Z)")


def read_source(source: str | bytes) -> str:
    """Return the source as text.

    Raises
    ------
    InvalidTypeError
        The source is neither str nor bytes.
    InvalidArgumentError
        The source has a NUL, has more than 16 MiB, is not valid UTF-8, is compiled code or the path of a file.
    """
    if not isinstance(source, str | bytes):
        raise InvalidTypeError(
            f"source must be str or bytes, not {type(source).__name__}: read the file first, source=path.read_text()"
        )
    try:
        encoded = source.encode() if isinstance(source, str) else bytes(source)
        if (kind := kind_of(encoded)) and b"__global__" not in encoded:
            raise InvalidArgumentError(
                f"source is {kind}, which is compiled already: Kernel.from_object_code(code, name, parameters)"
            )
        text = encoded.decode()
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"source is not valid UTF-8: {error.reason} at position {error.start}") from None
    if len(encoded) > MAX_SOURCE_BYTES:
        raise InvalidArgumentError(
            f"source has {len(encoded)} bytes; at most {MAX_SOURCE_BYTES} (16 MiB) are compiled",
            size=len(encoded),
            limit=MAX_SOURCE_BYTES,
        )
    if "\0" in text:
        raise InvalidArgumentError(f"source has a NUL character at position {text.index(chr(0))}")
    if _PATH.fullmatch(text):
        raise InvalidArgumentError(f"source is {text!r}, a path: read the file, source=Path({text!r}).read_text()")
    return text


def refuse_includes(text: str) -> None:
    """Refuse every directive that could open a file.

    Raises
    ------
    CompileError
        There is such a directive. The message has its name and line, and no text of a file.
    """
    code = _blank(text)
    for match in _DIRECTIVE.finditer(code):
        if match["name"] not in _CLOSED_DIRECTIVES:
            line = code.count("\n", 0, match.start()) + 1
            raise CompileError(f"line {line}: #{match['name']} is refused, because includes=False", log="")


def find_kernel(text: str, name: str, parameters: str | None = None) -> tuple[str, Signature]:
    """Return the name of a kernel, qualified by its namespaces, and its signature.

    ``parameters`` is the parameter list of an instance of a template, whose name has the template's arguments.

    Raises
    ------
    CompileError
        The source declares no kernel of that name.
    InvalidTypeError, InvalidArgumentError
        The parameter list cannot be read, see `read_parameters`.
    UnsupportedError
        The kernel is a template and has no ``parameters``, or is none and has them. It has two different declarations,
        or a parameter type that cannot be passed.
    """
    code = _DIRECTIVE.sub("", _blank(text))
    base = name.partition("<")[0].strip()
    instance = None if parameters is None else read_parameters(name, parameters)
    spelled = re.compile(rf"\b{base}\s*\(")
    found: dict[tuple[str, str], Signature] = {}
    for statement in _STATEMENT.finditer(code):
        head, mark, _ = statement[0].partition("__global__")
        match = spelled.search(code, statement.start() + len(head), statement.end()) if mark else None
        if match is None:
            continue
        returned = _RETURNED.search(code, statement.start() + len(head), match.start())
        if returned is not None:
            raise CompileError(f"kernel {base!r} returns {returned[0]}: a `__global__` function returns void", log="")
        is_template = re.search(r"\btemplate\b", head) is not None
        if is_template and instance is None:
            raise UnsupportedError(
                f"kernel {name!r} is a template: name an instance and its parameter list, as in "
                f"Kernel('{name}<float>', source=source, parameters='float* x, int n')"
            )
        if not is_template and instance is not None:
            raise UnsupportedError(f"kernel {base!r} is no template: use Kernel({base!r}, source=source)")
        signature = instance or Signature(name, _parameters(name, code, match.end()))
        qualified = "::".join([*_namespaces(code, statement.start()), name])
        found[qualified, ", ".join(parameter.type for parameter in signature.parameters)] = signature
    if not found:
        raise CompileError(
            f"no kernel {base!r} in the source: it must hold `__global__ void {base}(…)` spelled out, or a declaration "
            f"of it if a header or a macro defines it",
            log="",
        )
    if len(found) > 1:
        choices = " and ".join(f"{qualified}({types})" for qualified, types in found)
        raise UnsupportedError(f"kernel {name!r} is ambiguous: the source declares {choices}; give each its own name")
    ((qualified, _), signature), *_ = found.items()
    return qualified, signature


def has_dynamic_shared(text: str, name: str) -> bool:
    """Return whether the body of a kernel declares dynamic shared memory: ``extern __shared__``."""
    if "__shared__" not in text:
        return False
    spelled = re.compile(rf"\b{name.partition('<')[0].strip()}\s*\(")
    for part in _DIRECTIVE.sub("", _blank(text)).split("__global__")[1:]:
        head, _, body = part.partition("{")
        if ";" in head or not spelled.search(head):
            continue
        depth = 1
        for mark in _BODY.finditer(body):
            depth += {"{": 1, "}": -1}.get(mark[0], 0)
            if not depth:
                break
            if mark[0] not in "{}":
                return True
    return False


def read_parameters(name: str, parameters: str) -> Signature:
    """Return the signature of a kernel from its name and its parameter list in C: ``"const float* x, int n"``.

    Raises
    ------
    InvalidTypeError
        The parameter list is not a str.
    InvalidArgumentError
        It has parentheses or other characters that no parameter list has.
    UnsupportedError
        A parameter has a type that cannot be passed.
    """
    if not isinstance(parameters, str):
        raise InvalidTypeError(
            f"parameters is a str, the parameter list in C such as 'const float* x, int n', not {parameters!r}"
        )
    code = _blank(parameters)
    if re.search(r"[(){};#]", code):
        raise InvalidArgumentError(
            f"parameters is {parameters!r}: write the parameter list only, without the name of the kernel and without "
            "parentheses, such as 'const float* x, int n'"
        )
    return Signature(name, _parameters(name, code + ")", 0))


def _blank(text: str) -> str:
    """Return the text without line splices, comments and the contents of literals. Line numbers stay the same."""

    def join(match: re.Match[str]) -> str:
        line, splices = _SPLICE.subn("", match[0])
        return line + "\n" * splices

    def replace(match: re.Match[str]) -> str:
        lines = "\n" * match[0].count("\n")
        return lines or (" " if match[0].startswith("/") else '""')

    return _BLANKED.sub(replace, _SPLICED.sub(join, text))


def _namespaces(code: str, end: int) -> list[str]:
    """Return the names of the namespaces around a position. An unnamed namespace adds none."""
    scopes: list[list[str]] = []
    for match in _SCOPE.finditer(code, 0, end):
        if match["brace"] == "}":
            del scopes[-1:]
        else:
            words = re.findall(r"\w+", _ATTRIBUTE.sub("", match["names"] or ""))
            scopes.append([word for word in words if word != "inline"])
    return [name for scope in scopes for name in scope]


def _parameters(kernel: str, code: str, start: int) -> tuple[Parameter, ...]:
    """Parse the parameter list that begins at a position after the opening parenthesis."""
    texts, depth, last = [], 0, start
    for match in re.compile(r"[()\[\]{}<>,]").finditer(code, start):
        mark = match[0]
        if mark in "([{<":
            depth += 1
        elif mark == "," and depth == 0:
            texts.append(code[last : match.start()])
            last = match.end()
        elif mark == ")" and depth == 0:
            texts.append(code[last : match.start()])
            break
        elif mark != ",":
            depth -= 1
    else:
        raise CompileError(f"the parameter list of kernel {kernel!r} does not end", log="")
    if len(texts) == 1 and texts[0].strip() in ("", "void"):
        return ()
    return tuple(_parameter(kernel, index, " ".join(text.split())) for index, text in enumerate(texts))


def _parameter(kernel: str, index: int, text: str) -> Parameter:
    """Parse one parameter: words of the type, stars with their ``const``, a name, brackets."""
    words: list[str] = []  # the type, and the name if no star is between them
    levels: list[bool] = []  # one per star or bracket: True if it points to a const type
    const = False
    name = ""
    tokens = _TOKEN.findall(_ATTRIBUTE.sub("", text.partition("=")[0]))
    for token in tokens:
        if token in _QUALIFIERS:
            continue
        if token == "const":
            const = True
        elif token == "*":
            levels.append(const)
            const = False
        elif token == "[":  # `float x[4]` is a pointer; the size has no meaning
            levels.append(const)
            break
        elif re.match(r"[A-Za-z_:]", token):
            if levels:
                name = token
            else:
                words.append(re.sub(r"\s", "", token))
        else:
            raise _unsupported(kernel, index, text)
    size = max(1, sum(word in _FUNDAMENTAL for word in words))
    names = words[size:] + ([name] if name else [])
    if not words or len(names) > 1:
        raise _unsupported(kernel, index, text)
    spelled = " ".join(words[:size])
    label = names[0] if names else ""
    made = pointer(label, spelled, tuple(levels)) if levels else scalar(label, spelled)
    if made is None:
        raise _unsupported(kernel, index, text)
    return made


def _unsupported(kernel: str, index: int, text: str) -> UnsupportedError:
    return UnsupportedError(
        f"parameter {index + 1} of kernel {kernel!r}, `{text}`, has a type that cannot be passed. Supported are bool, "
        f"char, short, int, long, long long and their unsigned forms, size_t, (u)intN_t, float, double and __half by "
        f"value, and pointers to these, to void, __nv_bfloat16, CUDA's vector and complex types, and structures. A "
        "structure is passed by its address: declare `const S*`, and pass a buffer with one item. A typedef or a macro "
        "is not looked up: write the type itself",
        kernel=kernel,
        index=index,
    )
