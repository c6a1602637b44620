"""Reading what a compile left behind: the optimised program's text, the launch plan and the PTX."""

from __future__ import annotations

import collections
import importlib.util
import math
import pathlib
import re
import shutil
import subprocess
from typing import NamedTuple

BIG_COPY = 1 << 19  # elements
PALLAS = "__gpu$xla.gpu.triton"
HOST_SPACE = "S(5)"  # in the layout of an array in pinned host memory
_NO_MOVE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "opt-barrier", "after-all",
}  # fmt: skip
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z\-]*)\((.*)$", re.M)
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")


class Resources(NamedTuple):
    """What the assembler gave one kernel."""

    arch: str
    registers: int
    spill_bytes: int


def big_copies(text: str) -> list[str]:
    """Copies of more than BIG_COPY elements in HLO text, inside fusions too, as "dtype[shape]"."""
    found = []
    for _, result, op, _ in _INSTRUCTION.findall(text):
        if op in ("copy", "copy-start"):
            dtype, shape = _ARRAY.search(result).groups()
            if _elements(shape) > BIG_COPY:
                found.append(f"{dtype}[{shape}]")
    return found


def custom_calls(text: str) -> dict[str, int]:
    """Number of calls in HLO text by their target."""
    return dict(collections.Counter(re.findall(r'custom_call_target="([^"]+)"', text)))


def pallas_kernels(text: str) -> dict[str, int]:
    """Number of calls of each Pallas kernel in HLO text, by the kernel's name; a loop body counts once."""
    found = []
    for _, _, op, rest in _INSTRUCTION.findall(text):
        if op == "custom-call" and f'custom_call_target="{PALLAS}"' in rest:
            name = re.search(r', name = "([^"]+)"', rest) or re.search(r'op_name="[^"]*?([^/"]+)/pallas_call', rest)
            found.append(name[1] if name else "unnamed")
    return dict(collections.Counter(found))


def host_transfers(text: str) -> dict[str, int]:
    """Number of moves between device and pinned host memory in HLO text: "to_host" and "from_host"; a loop body counts once.

    A move is any instruction that runs by itself, so none within a fusion, and reads the one memory and writes the other, or
    updates an array in host memory from the device; one split into start and done counts once.
    """
    found = {"to_host": 0, "from_host": 0}
    fused = set(re.findall(r"calls=%([\w.\-]+)", text))
    for name, body in re.findall(r"^(?:ENTRY )?%([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S):
        if name in fused:
            continue
        instructions = _INSTRUCTION.findall(body)
        types = {result: kind for result, kind, _, _ in instructions}
        types |= {_operands(rest)[0]: kind for _, kind, op, rest in instructions if op.endswith("-done")}
        for result, _, op, rest in instructions:
            if op in _NO_MOVE or op.endswith("-done"):
                continue
            read = [types.get(operand, "") for operand in _operands(rest)]
            from_host = any(HOST_SPACE in kind for kind in read)
            from_device = any(HOST_SPACE not in kind and re.search(r"\[\d", kind) for kind in read)  # scalars aside
            if HOST_SPACE in types[result]:
                found["to_host"] += from_device or not from_host
            else:
                found["from_host"] += from_host
    return found


def overlapped_transfers(text: str) -> int:
    """How many of the copies between device and pinned host memory have a matrix product between their start and their end."""
    found = 0
    for _, body in re.findall(r"^(?:ENTRY )?%([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S):
        products, started = 0, {}
        for name, kind, op, rest in _INSTRUCTION.findall(body):
            if op == "copy-start" and HOST_SPACE in kind:
                started[name] = products
            elif op == "copy-done" and (start := _operands(rest)[0]) in started:
                found += products > started[start]
            else:
                products += "gemm" in name or "matmul" in rest
    return found


def custom_call_bytes(text: str) -> int:
    """Bytes of all operands and results of the custom calls in HLO text."""
    results, total = {}, 0
    for name, result, op, rest in _INSTRUCTION.findall(text):
        results[name] = _bytes(result)
        if op == "custom-call":
            operands = re.findall(r"%([\w.\-]+)", rest.partition("), custom_call_target=")[0])
            total += results[name] + sum(results.get(operand, 0) for operand in operands)
    return total


def launches(dump: pathlib.Path) -> dict[str, int]:
    """What the host dispatches, by kind, from the compiler's dump; empty where it wrote no plan."""
    for pattern in ("*thunk_sequence_after_thunk_passes.txt", "*thunk_sequence.txt"):
        plans = sorted(dump.glob(pattern), key=lambda path: path.stat().st_size)
        if plans:
            return dict(collections.Counter(re.findall(r"^\s*\d+: k(\w+)", plans[-1].read_text(), re.M)))
    return {}


def kernel_resources(dump: pathlib.Path) -> dict[str, Resources] | None:
    """Registers and spills of every kernel whose PTX was dumped; None without an assembler.

    Raises:
      RuntimeError: the assembler refused a kernel.
    """
    ptxas = find_ptxas()
    if ptxas is None:
        return None
    kernels = {}
    for path in sorted(dump.glob("*.ptx")):
        arch = re.search(r"\.target (\w+)", path.read_text())
        if arch is None:
            continue
        command = [ptxas, "-v", f"-arch={arch[1]}", str(path), "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas refused {path.name}: {done.stderr.strip()[-300:]}")
        for name, report in re.findall(r"entry function '(\w+)'(.*?)(?=entry function|\Z)", done.stderr, re.S):
            registers = int(re.search(r"Used (\d+) registers", report)[1])
            spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report))
            kernels[name] = Resources(arch[1], registers, spills)
    return kernels


def find_ptxas() -> str | None:
    """NVIDIA's assembler: from the installed compiler package, else from PATH."""
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations if package else ():
        for inside in ("cuda_nvcc/bin/ptxas", "cu13/bin/ptxas"):
            if (path := pathlib.Path(folder, inside)).is_file():
                return str(path)
    return shutil.which("ptxas")


def _operands(rest: str) -> list[str]:
    """Names of an instruction's operands, from its text behind the opening parenthesis."""
    return re.findall(r"%([\w.\-]+)", re.split(r"\), [a-z_]+=", rest, maxsplit=1)[0])


def _elements(shape: str) -> int:
    return math.prod(int(n) for n in shape.split(",") if n)


def _bytes(result: str) -> int:
    """Bytes of a result type, tuples included."""
    total = 0
    for dtype, shape in _ARRAY.findall(result):
        named = re.search(r"\d+", dtype)  # f32, bf16, s8, f8e4m3fn, u4
        bits = int(named[0]) if named else 8 * (dtype == "pred")  # tokens have no size
        total += _elements(shape) * bits // 8
    return total
