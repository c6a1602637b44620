"""The program in an answer: found in prose and fences, completed from the prompt, and bound to the name that is tested.

Nothing is cut from an answer before it comes here: the stop strings of lm-eval's ``humaneval`` (a line that begins with
``def``, ``class``, ``if``, ``print`` or ``#``) would cut an answer that repeats the function before the function begins.
"""

from __future__ import annotations

import ast
import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Literal

from polestar_jax.eval.fences import split
from polestar_jax.eval.statements import Function, Statement, kept, longest, parse, statements


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extraction:
    """What was found in an answer.

    Attributes:
      code: a program that gives ``entry_point`` a value; "" where the answer has none.
      form: what the answer was: a function's body, a function (or whatever else gives the name a value), or neither.
      fenced: whether it had a fence.
      renamed: whether the function has another name in it, or is a method.
    """

    code: str = ""
    form: Literal["body", "function", "none"] = "none"
    fenced: bool = False
    renamed: bool = False


def extract(text: str, *, entry_point: str, arguments: int | None = None, prompt: str = "") -> Extraction:
    """The program in an answer.

    Looked for, in this order: with a prompt, a body that the answer begins with; something that gives ``entry_point`` a value,
    in each block and then outside of them; a method of that name; with a prompt, a body anywhere; the one function that takes
    ``arguments`` arguments, else the last. What that needs from the other blocks comes along, as do the prompt's imports and
    helper functions.

    Args:
      text: what a model wrote.
      entry_point: the name that is tested.
      arguments: with how many positional arguments it is called.
      prompt: Python up to the body that was asked for, which ends with the signature and docstring of ``entry_point``.
    """
    text = _plain(text)
    parts = split(text)
    sources = [*parts.blocks, parts.outside]
    pieces = [statements(source) for source in sources]
    before = [item for item in statements(prompt) if entry_point not in item.binds] if prompt else []

    def body(candidates: Sequence[str]) -> Extraction | None:
        items = _body(prompt, entry_point, candidates) if prompt else []
        code = _program([], items, pieces, entry_point)
        return Extraction(code=code, form="body", fenced=parts.fenced) if items else None

    def function(piece: list[Statement], value: str = "") -> Extraction:
        code = _program(before, piece, pieces, entry_point) + (f"{entry_point} = {value}\n" if value else "")
        return Extraction(code=code, form="function", fenced=parts.fenced, renamed=bool(value))

    if text.lstrip("\n")[:1] in (" ", "\t") and (found := body([parts.outside])):
        return found
    for imported in (False, True):  # a test that imports the name comes after what defines it
        for piece in pieces:
            if any(_gives(item, entry_point, imported) for item in kept([*before, *piece], entry_point)):
                return function(piece)
    for piece in pieces:
        for item in piece:
            if _method(item, entry_point):
                return function(piece, f"{item.node.name}().{entry_point}")
    if found := body(sources):
        return found
    renamed = _renamed(pieces, arguments, {name for item in before for name in item.binds})
    return function(*renamed) if renamed else Extraction(fenced=parts.fenced)


def positional(node: ast.AST, entry_point: str) -> int | None:
    """How many positional arguments the function of that name has in a tree, or is first called with; None: in neither."""
    for inner in ast.walk(node):
        if isinstance(inner, Function) and inner.name == entry_point:
            return len(inner.args.posonlyargs) + len(inner.args.args)
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == entry_point:
            return None if any(isinstance(value, ast.Starred) for value in inner.args) else len(inner.args)
    return None


def _gives(item: Statement, name: str, imported: bool) -> bool:
    return name in item.binds and not item.empty and isinstance(item.node, ast.Import | ast.ImportFrom) == imported


def _plain(text: str) -> str:
    """Line ends ``\\n``, and no byte-order marks."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\ufeff", "")


def _program(before: list[Statement], piece: list[Statement], pieces: list[list[Statement]], entry_point: str) -> str:
    """Source of: what comes before, what the piece needs from other pieces, and the piece, future imports first."""
    piece = kept([*before, *piece], entry_point)
    have = {name for item in piece for name in item.binds}
    wanted = {name for item in piece for name in item.reads} - have
    others = [item for other in pieces for item in other]
    added: list[Statement] = []
    while wanted:
        found = [item for item in others if item.binds & wanted and item not in added]
        added += found
        have |= {name for item in found for name in item.binds}
        wanted = {name for item in found for name in item.reads} - have
    added.sort(key=others.index)
    items = [*kept(added, entry_point), *piece]
    items.sort(key=lambda item: not (isinstance(item.node, ast.ImportFrom) and item.node.module == "__future__"))
    return "".join(f"{item.text}\n" for item in items)


def _body(prompt: str, entry_point: str, sources: Sequence[str]) -> list[Statement]:
    """The statements of the prompt continued by as many lines of a source as make its function complete; none where none do.

    A model that goes on may begin the function anew, and be cut off in it: the first is taken.
    """
    before = prompt.rstrip("\n") + "\n"
    for source in sources:
        best, most = "", 0
        for variant in _variants(source):
            lines = variant.split("\n")
            lines = lines[: longest(lines, after=before)]
            size = sum(bool(line.strip()) for line in lines)
            code = before + "\n".join([*lines, ""])
            if size > most and _complete(code, entry_point):
                best, most = code, size
        items = statements(best)
        first = next((item for item in items if entry_point in item.binds), None)
        if first is not None:
            return [item for item in items if item is first or entry_point not in item.binds]
    return []


def _variants(source: str) -> list[str]:
    """A body as it stands, with its indentation lost, with that of its first line lost, and after prose."""
    lines = source.strip("\n").split("\n")
    indented = next((at for at, line in enumerate(lines) if line[:1] in (" ", "\t") and line.strip()), len(lines))
    result = [source, textwrap.indent(textwrap.dedent(source), "    "), "    " + source.lstrip()]
    if not any(line.startswith(("def ", "class ", "async def ", "@")) for line in lines[:indented]):
        result.append("\n".join(lines[indented:]))
    return result


def _complete(code: str, entry_point: str) -> bool:
    """Whether the first function of that name returns, yields or raises something itself."""
    tree = parse(code)
    found = [node for node in tree.body if isinstance(node, Function) and node.name == entry_point] if tree else []
    inner = list(found[0].body) if found else []
    while inner:
        node = inner.pop()
        if isinstance(node, ast.Return | ast.Raise | ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.ClassDef | Function | ast.Lambda):
            inner.extend(ast.iter_child_nodes(node))
    return False


def _renamed(
    pieces: list[list[Statement]], arguments: int | None, helpers: set[str]
) -> tuple[list[Statement], str] | None:
    """(piece, name) of the function that stands in for the one that is tested; never one of the prompt's helpers."""
    found = ((piece, item) for piece in pieces for item in piece if not item.empty and not item.binds <= helpers)
    functions = [(piece, item.node) for piece, item in found if isinstance(item.node, Function)]
    matching = [pair for pair in functions if arguments is not None and _takes(pair[1].args, arguments)]
    chosen = matching or functions
    return (chosen[-1][0], chosen[-1][1].name) if chosen else None


def _method(item: Statement, name: str) -> bool:
    return isinstance(item.node, ast.ClassDef) and any(
        isinstance(node, Function) and node.name == name for node in item.node.body
    )


def _takes(args: ast.arguments, count: int) -> bool:
    most = len(args.posonlyargs) + len(args.args)
    needed = sum(default is None for default in args.kw_defaults)
    return not needed and most - len(args.defaults) <= count and (count <= most or args.vararg is not None)
