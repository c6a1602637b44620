"""What the passes of methods need on NVIDIA GPUs, from programs compiled with none at hand: ``polestar bench --aot``."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from polestar_jax.aot import cases, launch
from polestar_jax.aot.cases import Size
from polestar_jax.aot.inspect import PALLAS
from polestar_jax.aot.targets import TARGETS
from polestar_jax.bench.report import aligned
from polestar_jax.errors import RunError

NOTES = (
    "Compiled, not run: memory, traffic and launches hold on the device, speed does not follow from them. moved: what kernels",
    "read and write in a pass, every operand and result once, of a gather, slice or update in place what it touches, loop",
    "bodies once (polestar_jax/aot/traffic.py); x all, x read: that over all weights, and over those that a pass reads. Gflops:",
    "by the compiler's count, where library and Pallas calls are 0. to, from host: copies between device and pinned host memory.",
    "library: calls that are not Pallas kernels. copies: those of more than 512 Ki elements. kernels: calls of each Pallas",
    "kernel; r: registers a thread of its variants, B: bytes they spill, where any (--ptx).",
)
CHEAP_PTX = (0, 11)  # from this jax on, PTX comes only with every stage of every kernel: minutes a layer


def passes(method: str) -> list[str]:
    """The cases that compile one pass of a method each, such as "polestar-refresh-step"."""
    return [name for name, (owner, plan) in cases._decodings().items() if owner == method and plan is not None]


def gives_ptx() -> bool:
    """Whether registers and spills come at next to no cost with the jax that is installed."""
    return tuple(int(part) for part in importlib.metadata.version("jax").split(".")[:2]) < CHEAP_PTX


def compile_all(
    target: str,
    sizes: Sequence[Size],
    methods: Sequence[str],
    *,
    ptx: bool,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Compile every pass of every method at every size, each in a process of its own.

    Args:
      target: a key of TARGETS.
      ptx: report registers and spills of the kernels, too.
      on_progress: called with a line on what is done now.

    Yields:
      The JSON object of each, see :func:`as_json`. One that did not compile has "error" in place of the report.

    Raises:
      InputError: sizes that do not go together.
      RunError: jax's CUDA plug-in is missing.
    """
    if (reason := launch.missing()) is not None:
        raise RunError(reason)
    todo = [(size, name) for size in sizes for method in methods for name in passes(method)]
    for i, (size, name) in enumerate(todo):
        on_progress(f"compiling {size.model} {name} for {target} ({i + 1} of {len(todo)})")
        try:
            report = launch.run(target, name, size, ptx=ptx)
        except RunError as error:
            report = {"error": str(error)}
        yield as_json(name, size, report)


def as_json(name: str, size: Size, report: dict[str, Any]) -> dict[str, Any]:
    """One case: its name, the size, the bytes of the weights, and the fields of :class:`polestar_jax.aot.compile.Report`.

    ``read_weight_bytes`` leave the embedding table out, of which a pass reads its rows only.
    """
    item = jnp.dtype(size.dtype).itemsize
    weights = size.spec.parameters * item
    about = {
        "pass": name,
        "model": size.model,
        "layers": size.spec.n_layers,
        "prompt_length": size.prompt,
        "gen_length": size.gen,
        "block_length": size.block,
        "batch_size": size.batch,
        "dtype": size.dtype,
        "weight_bytes": weights,
        "read_weight_bytes": weights - size.spec.vocab_size * size.spec.d_model * item,
    }
    if "error" in report:
        return about | report
    over = {
        "bytes_over_weights": report["bytes_moved"] / weights,
        "bytes_over_read_weights": report["bytes_moved"] / about["read_weight_bytes"],
    }
    return about | report | over


def table(target: str, rows: Sequence[dict[str, Any]]) -> str:
    """The report for people, of what :func:`compile_all` gave for one target."""
    about = TARGETS[target]
    version = next((row["jax"] for row in rows if "jax" in row), "of no compile")
    major, minor = about.capability
    lines = [f"target: {about.device}, sm_{major}{minor}; jax {version}"]
    for model, first in {row["model"]: row for row in reversed(rows)}.items():
        lines.append(
            f"{model}: {first['layers']} layers, {first['dtype']}, weights {_gigabytes(first['weight_bytes'])} GB, of which a "
            f"pass reads {_gigabytes(first['read_weight_bytes'])} GB and rows of the embedding table"
        )
    first = rows[0]
    lines += [
        f"run: batch {first['batch_size']}, prompt {first['prompt_length']}, gen {first['gen_length']}, block "
        f"{first['block_length']}",
        "",
        *aligned([_HEAD, *(_row(row) for row in rows if "error" not in row)], words={0, 1, 10, 11, 12}),
        *(f"{row['model']} {row['pass']}: {row['error']}" for row in rows if "error" in row),
        "",
        *NOTES,
    ]
    return "\n".join(lines)


_HEAD = (
    *"model|pass|compile s|peak GB|moved GB|x all|x read|Gflops|to, from host|host MB".split("|"),
    *("library", "copies", "kernels"),
)


def _row(row: dict[str, Any]) -> list[str]:
    library = {name: count for name, count in row["custom_calls"].items() if name != PALLAS}
    moves = row["host_transfers"]
    return [
        row["model"], row["pass"], f"{row['lower_seconds'] + row['compile_seconds']:.0f}", _gigabytes(row["peak_bytes"]),
        _gigabytes(row["bytes_moved"]), f"{row['bytes_over_weights']:.3f}", f"{row['bytes_over_read_weights']:.3f}",
        f"{row['flops'] / 1e9:,.0f}", f"{moves['to_host']}, {moves['from_host']}", f"{row['host_temp_bytes'] / 1e6:.1f}",
        _counted(library), _counted(_count(row["big_copies"])), _kernels(row["pallas_kernels"], row["kernels"]),
    ]  # fmt: skip


def _kernels(calls: dict[str, int], resources: dict[str, Sequence[Any]] | None) -> str:
    """Calls of each Pallas kernel, with the registers of its variants and the bytes they spill where that is known."""
    words = []
    for name, count in sorted(calls.items()):
        # A kernel that is compiled at several shapes has an entry for each: name, name__1, ...
        variant = re.compile(rf"{re.escape(name)}(__\d+)?")
        found = [each for entry, each in (resources or {}).items() if variant.fullmatch(entry)]
        registers = sorted({each[1] for each in found})
        spilled = sum(each[2] for each in found)
        word = f"{name} x{count}" + (f" {'/'.join(map(str, registers))}r" if registers else "")
        words.append(word + (f" {spilled}B" if spilled else ""))
    return ", ".join(words) or "none"


def _count(names: Sequence[str]) -> dict[str, int]:
    return {name: names.count(name) for name in dict.fromkeys(names)}


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} x{count}" for name, count in sorted(counts.items())) or "none"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f}"
