"""The Python statements of a text that is code, or code among prose."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import re
import textwrap
import warnings
from collections.abc import Iterable, Sequence

_BUILTINS = frozenset(dir(builtins))
# How a statement's first line may begin; everything else is prose, and not worth a parse.
_FIRST_LINE = re.compile(
    r"(@|(async|def|class|import|from|if|for|while|with|try)\b|[A-Za-z_][\w.]*\s*([-+*/%&|^@:]?=|[(\[.:,]))"
)
_CONTINUES = re.compile(r"(elif|else|except|finally)\b|[)\]}]")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
# Bounds on the search, in lines: for a bracket or string that is open to close, and of all that is parsed in it. A model that
# repeats itself writes a thousand open brackets.
_MOST_OPEN, _MOST_PARSED = 120, 50_000
_OPEN = ("was never closed", "unterminated triple-quoted", "unexpected EOF")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Statement:
    """One statement at the top level: its tree, and its text without indentation."""

    node: ast.stmt
    text: str

    @functools.cached_property
    def binds(self) -> frozenset[str]:
        """The names it gives a value to, at the top level."""
        if isinstance(self.node, ast.ClassDef | Function):
            return frozenset({self.node.name})
        names = {
            alias.asname or alias.name.split(".")[0]
            for node in self._all(ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        return frozenset(names | self._stored() | {node.name for node in self._all(ast.ClassDef | Function)})

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """The names it takes from elsewhere, now or when called; builtin ones left out."""
        loaded = {node.id for node in self._all(ast.Name) if isinstance(node.ctx, ast.Load)}
        own = (
            self._stored()
            | {node.arg for node in self._all(ast.arg)}
            | {node.name for node in self._all(ast.ExceptHandler)}
        )
        inner = {node.name for node in self._all(ast.ClassDef | Function)}
        return frozenset(loaded - own - inner - _BUILTINS)

    @property
    def defines(self) -> bool:
        """Whether it is an import, a function or a class."""
        return isinstance(self.node, _DEFINITIONS)

    @property
    def empty(self) -> bool:
        """Whether it is a function with nothing in it: a signature, repeated."""
        return isinstance(self.node, Function) and all(_nothing(node) for node in self.node.body)

    def _all(self, kind: type) -> Iterable:
        return (node for node in ast.walk(self.node) if isinstance(node, kind))

    def _stored(self) -> set[str]:
        return {node.id for node in self._all(ast.Name) if not isinstance(node.ctx, ast.Load)}


@dataclasses.dataclass(frozen=True)
class Fault:
    """Why a source is no Python: the line (from 1; 0: unknown), and whether something was open there to the end."""

    line: int = 0
    is_open: bool = False


def parsed(source: str) -> ast.Module | Fault:
    """The tree of a source, or what is wrong with it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in what a model wrote
            return ast.parse(source)
    except SyntaxError as error:
        return Fault(error.lineno or 0, any(text in error.msg for text in _OPEN))
    except (ValueError, RecursionError, MemoryError):  # null bytes, lone surrogates, a thousand brackets
        return Fault()


def parse(source: str) -> ast.Module | None:
    """The tree of a source, None where it is no Python."""
    tree = parsed(source)
    return tree if isinstance(tree, ast.Module) else None


def longest(lines: Sequence[str], *, after: str = "") -> int:
    """How many of the lines, from the first, make Python after some other; 0: not even one does.

    Args:
      lines: tried from all downward, past everything from a fault on.
      after: Python that comes first; its last line is complete.
    """
    before, end, spent = after.count("\n"), len(lines), 0
    while end > 0 and spent < _MOST_PARSED:
        spent += before + end
        fault = parsed(after + "\n".join(lines[:end]) + "\n")
        if isinstance(fault, ast.Module):
            return end
        end = min(end - 1, fault.line - 1 - before) if fault.line else end - 1
    return 0


def statements(source: str) -> list[Statement]:
    """The statements at the top level of a text; lines that are no Python are passed over.

    Of a function or class that ends in something that is no Python, the lines before that are taken.
    """
    source = textwrap.dedent(source)
    tree = parse(source)
    if tree is not None:
        return _of(tree, source)
    lines, found, start, spent = source.split("\n"), [], 0, 0
    while start < len(lines) and spent < _MOST_PARSED:
        end, part = start + 1, ""
        if _FIRST_LINE.match(lines[start]):
            end, part, used = _first(lines, start)
            spent += used
        if part:
            found += _of(ast.parse(part), part)
        start = end
    return found


def kept(found: Iterable[Statement], entry_point: str) -> list[Statement]:
    """Imports, definitions and what they need; not the examples of use, tests and prose around them.

    Left out: assertions, expressions other than calls on an imported or assigned name, and
    whatever reads ``entry_point``, ``print``, ``input``, a name that has no value, or one that only a statement left out gives.
    """
    found = list(found)
    full = {name for item in found if item.defines and not item.empty for name in item.binds}
    found = [item for item in found if not (item.empty and item.binds <= full)]
    everything = any(isinstance(item.node, ast.ImportFrom) and item.node.names[0].name == "*" for item in found)
    result: list[Statement] = []
    functions = {item.node.name for item in found if isinstance(item.node, Function)}
    known = {name for item in found if item.defines for name in item.binds}
    for item in found:
        if item.defines or _harmless(item, known, functions, entry_point, everything):
            known |= item.binds
            result.append(item)
    return result


def _harmless(item: Statement, known: set[str], functions: set[str], entry_point: str, everything: bool) -> bool:
    used = {node.id for node in ast.walk(item.node) if isinstance(node, ast.Name)}
    if isinstance(item.node, ast.Assert):
        return False
    if any(isinstance(node, _DEFINITIONS) for node in ast.walk(item.node)):
        return True  # try: import ..., if ...: def ...
    if used & {"print", "input", "exit", "quit"}:
        return False
    if entry_point in item.reads and entry_point not in item.binds:
        return False
    if isinstance(item.node, ast.Expr):
        call = item.node.value
        root = call.func if isinstance(call, ast.Call) else None
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or root.id in functions:
            return False
    return everything or item.reads <= known


def _of(tree: ast.Module, source: str) -> list[Statement]:
    lines = source.split("\n")
    result = []
    for place, node in enumerate(tree.body):
        first = min([node.lineno, *(inner.lineno for inner in getattr(node, "decorator_list", ()))])
        neighbours = tree.body[max(place - 1, 0) : place + 2]
        if any(
            other is not node and node.end_lineno >= other.lineno and other.end_lineno >= first for other in neighbours
        ):
            text = ast.get_source_segment(source, node) or ""  # a = 1; b = 2
        else:
            text = "\n".join(lines[first - 1 : node.end_lineno])
        result.append(Statement(node, text))
    return result


def _first(lines: list[str], start: int) -> tuple[int, str, int]:
    """(line after it, text, lines parsed) of the statement that begins at a line; the text is empty where none does."""
    ends = [at for at in range(start + 1, len(lines)) if lines[at][:1].strip() and not _CONTINUES.match(lines[at])]
    ends.append(len(lines))
    spent = 0
    for end in ends:
        text = "\n".join(lines[start:end])
        spent += end - start
        fault = parsed(text)
        if isinstance(fault, ast.Module):
            return end, text, spent
        if (not fault.is_open and fault.line < end - start) or end - start > _MOST_OPEN:
            break  # no further line makes that good
    count = longest(lines[start : ends[0]])
    spent += ends[0] - start
    if count > 1:
        return ends[0], "\n".join(lines[start : start + count]), spent
    return start + 1, "", spent


def _nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
