"""Memory traffic of a compiled program, kernel by kernel, from its HLO text.

The compiler's own count takes the whole operand of a gather, of a slice and of an in-place update for read or written, and a
library or Pallas call for nothing. Here each kernel counts what it touches: results once, operands once, of a sliced operand
only what is taken, of one updated in place only the update. Loop bodies and branches count once.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from polestar_jax.aot.inspect import _INSTRUCTION, _bytes

_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "iota"}
_NAME = re.compile(r"%([\w.\-]+)")


class _Op(NamedTuple):
    name: str
    result: str
    kind: str
    operands: tuple[str, ...]
    rest: str
    root: bool


class Moved(NamedTuple):
    """One kernel's traffic in bytes, and where it comes from in the traced program ("" where unknown)."""

    bytes: int
    name: str
    source: str


def moved(text: str) -> list[Moved]:
    """Every kernel of the entry computation and the bodies it runs, the largest first."""
    programs = _computations(text)
    entry = re.search(r"^ENTRY %([\w.\-]+)", text, re.M)
    found: list[Moved] = []
    waiting, seen = [entry[1]], set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in programs:
            continue
        seen.add(name)
        ops = programs[name]
        sizes = {op.name: _bytes(op.result) for op in ops}
        for op in ops:
            if op.kind in ("while", "conditional", "call"):
                waiting += _called(op)
            elif op.kind not in _FREE and not op.kind.endswith("-done"):
                source = re.search(r'op_name="([^"]*)"', op.rest)
                found.append(Moved(_traffic(op, sizes, programs), op.name, source[1] if source else ""))
    return sorted(found, reverse=True)


def bytes_moved(text: str) -> int:
    """The traffic of all kernels, in bytes."""
    return sum(kernel.bytes for kernel in moved(text))


def _computations(text: str) -> dict[str, list[_Op]]:
    programs: dict[str, list[_Op]] = {}
    for head, body in re.findall(r"^(?:ENTRY )?%([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S):
        ops = []
        for match in _INSTRUCTION.finditer(body):
            name, result, kind, rest = match.groups()
            operands = tuple(_NAME.findall(_arguments(rest)))
            ops.append(_Op(name, result, kind, operands, rest, match[0].lstrip().startswith("ROOT")))
        programs[head] = ops
    return programs


def _arguments(rest: str) -> str:
    """The text up to the parenthesis that closes an instruction's operands."""
    depth = 1
    for i, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if not depth:
            return rest[:i]
    return rest


def _called(op: _Op) -> list[str]:
    lists = re.findall(r"(?:body|condition|to_apply|true_computation|false_computation)=%([\w.\-]+)", op.rest)
    branches = re.search(r"branch_computations=\{([^}]*)\}", op.rest)
    return lists + (_NAME.findall(branches[1]) if branches else [])


def _traffic(op: _Op, sizes: dict[str, int], programs: dict[str, list[_Op]]) -> int:
    inner = re.search(r"calls=%([\w.\-]+)", op.rest)
    if op.kind == "fusion" and inner and inner[1] in programs:
        return _fusion(op, sizes, programs[inner[1]])
    if op.kind in ("gather", "dynamic-slice"):
        return 2 * sizes[op.name]
    if op.kind == "copy-start":  # its result holds the copy, the operand again and a token
        return 2 * sizes.get(op.operands[0], 0)
    if op.kind == "dynamic-update-slice":
        return 2 * sizes.get(op.operands[1], 0)
    return sizes[op.name] + sum(sizes.get(operand, 0) for operand in op.operands)


def _fusion(op: _Op, sizes: dict[str, int], body: list[_Op]) -> int:
    local = {inner.name: _bytes(inner.result) for inner in body}
    by_name = {inner.name: inner for inner in body}
    users: dict[str, list[_Op]] = {}
    for inner in body:
        for operand in set(inner.operands):
            users.setdefault(operand, []).append(inner)

    def read(name: str) -> int:
        """Bytes read of a parameter, or of what it is viewed as."""
        total = 0
        for user in users.get(name, []):
            first = user.operands[:1] == (name,) and name not in user.operands[1:]
            if user.kind == "bitcast":
                total += read(user.name)
            elif user.kind in ("gather", "dynamic-slice", "slice") and first:
                total += local[user.name]
            elif user.kind == "dynamic-update-slice" and first:
                continue
            else:
                return local[name]
        return min(total, local[name])

    def written(inner: _Op) -> int:
        if inner.kind == "tuple":
            return sum(written(by_name[part]) for part in inner.operands if part in by_name)
        if inner.kind == "bitcast" and inner.operands[0] in by_name:
            return written(by_name[inner.operands[0]])
        if inner.kind == "dynamic-update-slice":
            return local.get(inner.operands[1], 0)
        return local[inner.name]

    reads = sum(read(inner.name) for inner in body if inner.kind == "parameter")
    return reads + sum(written(inner) for inner in body if inner.root)
