"""What was measured, for people and for scripts."""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax

from polestar_jax.bench.measure import Kind, Measured, spread
from polestar_jax.decoders.variants import BASELINES, is_baseline
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec

NOTES = (
    "x vanilla, x parallel: tokens per second, all positions counted, against that method: the median of the rounds' ratios, and",
    "the lowest and highest; only where both are measured. ms, bare: a pass (above, the loop's time shared out; below, one",
    "called alone, the call included), and its products with the weights alone. spread: of those times, largest less smallest,",
    "over the median. overhead: share of the time that is not bare: attention, cache, scores, commits, the loop. rows: through",
    "q, k and v / the rest of a layer / the head. floor: the weights that a pass must read; GB/s: those over its time; touched:",
    "what its compiled operations read and write, by the compiler's count.",
)


def machine() -> dict[str, Any]:
    """What the numbers hold for: processor, cores in use and in all, device, jax, and compiler flags if any are set."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = jax.devices()[0]
    about = {
        "cpu": _cpu(),
        "cores": usable,
        "cores_all": os.cpu_count(),
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "jax": jax.__version__,
    }
    flags = os.environ.get("XLA_FLAGS", "").strip()
    return about | ({"xla_flags": flags} if flags else {}) | allocator(device)


def allocator(device: jax.Device) -> dict[str, int]:
    """Device memory by the process's own allocator: the most in use at once so far, and the most it may take. What it has
    reserved (75 % of a GPU unless XLA_PYTHON_CLIENT_PREALLOCATE=false), which nvidia-smi shows, says nothing of a method.
    Empty where the backend does not count, as on a CPU."""
    stats = device.memory_stats() or {}
    names = {"allocator_peak_bytes": "peak_bytes_in_use", "allocator_limit_bytes": "bytes_limit"}
    return {name: int(stats[key]) for name, key in names.items() if key in stats}


def _cpu() -> str:
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0].strip() if names else platform.processor() or platform.machine()


def sizes(spec: ModelSpec) -> dict[str, Any]:
    return {
        "family": spec.family, "layers": spec.n_layers, "d_model": spec.d_model, "heads": spec.n_heads,
        "kv_heads": spec.n_kv_heads, "d_ff": spec.d_ff, "vocab": spec.vocab_size, "parameters": spec.parameters,
    }  # fmt: skip


def speedups(measured: Measured, results: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Against each of BASELINES, in tokens a second: median, lowest and highest of the rounds; {} unless all were measured."""
    bases = {
        name: [each for each in results if is_baseline(name, each.decoder.name, each.decoder.settings())]
        for name in BASELINES
    }
    if not all(bases.values()):
        return {}
    ratios = {name: measured.faster(base) for name, (base, *_) in bases.items()}
    return {name: {"median": statistics.median(r), "lowest": min(r), "highest": max(r)} for name, r in ratios.items()}


def as_json(measured: Measured, results: Sequence[Measured]) -> dict[str, Any]:
    """One run's numbers, of ``results``; times in seconds, or in milliseconds where the name says so, medians unless lists."""
    m = measured
    return {
        "run": m.run,
        "method": m.decoder.name,
        "block_length": m.decoder.settings()["block_length"],
        "compile_seconds": m.compile_seconds,
        "passes": m.passes,
        "nfe": m.nfe,
        "tokens": m.tokens,
        "tokens_non_eos": m.tokens_non_eos,
        "tpf": m.tokens_non_eos / m.nfe,
        "tps": m.tokens_non_eos / m.median_seconds,
        "tpf_all": m.tokens / m.nfe,
        "tps_all": m.tps_all,
        "speedups": speedups(m, results),
        "seconds": m.median_seconds,
        "spread": spread(m.seconds),
        "seconds_each": list(m.seconds),
        "ms_per_forward": m.ms,
        "bare_ms_per_forward": m.bare_ms,
        "overhead_share": m.overhead_share,
        "peak_memory_bytes": m.peak_bytes,
        "kinds": [_kind_json(kind) for kind in m.kinds],
    }


def _kind_json(kind: Kind) -> dict[str, Any]:
    return {
        "kind": kind.name,
        "passes": kind.passes,
        "samples": len(kind.seconds),
        "compile_seconds": kind.compile_seconds,
        "ms": kind.ms,
        "bare_ms": kind.bare_ms,
        "spread": spread(kind.seconds),
        "overhead_share": kind.overhead_share,
        "rows": {
            "embedded": kind.rows.embedded,
            "projected": list(kind.rows.projected),
            "finished": list(kind.rows.finished),
            "scored": kind.rows.scored,
        },
        "floor_bytes": kind.weight_bytes,
        "floor_bytes_per_second": kind.weight_bytes_per_second,
        "bytes": kind.accessed_bytes,
        "bytes_over_floor": None if kind.accessed_bytes is None else kind.accessed_bytes / kind.weight_bytes,
    }


def table(results: Sequence[Measured], model: Denoiser, run: dict[str, Any]) -> str:
    """The report for people; ``run`` as in the JSON objects: model, sizes of the run, repeats."""
    about, shape = machine(), sizes(model.spec)
    flags = f", XLA_FLAGS={about['xla_flags']}" if "xla_flags" in about else ""
    used = "".join(
        f"; {name.split('_')[1]} of device memory {_mebibytes(about[name])} MiB"
        for name in ("allocator_peak_bytes", "allocator_limit_bytes")
        if name in about
    )
    blocks = "/".join(dict.fromkeys(str(each.decoder.settings()["block_length"]) for each in results))
    lines = [
        f"machine: {about['cpu']}, {about['cores']} of {about['cores_all']} cores; {about['platform']} {about['device']} "
        f"x {about['devices']}{used}; jax {about['jax']}{flags}",
        f"model: {run['model']}, {shape['family']}, {shape['layers']} layers, d {shape['d_model']}, vocabulary "
        f"{shape['vocab']}, {shape['parameters'] / 1e6:,.1f} M parameters, {model.dtype}",
        f"run: batch {run['batch_size']}, prompt {run['prompt_length']}, gen {run['gen_length']}, block {blocks}; "
        f"medians of {run['repeats']} repeats, interleaved",
        "",
        *aligned([_RUN, *(_run_row(m, results) for m in results)], words={0}),
        "",
        *aligned([_PASS, *(_kind_row(m, kind) for m in results for kind in m.kinds)], words={0, 1}),
        "",
        *NOTES,
    ]
    return "\n".join(lines)


_RUN = [*"run|tokens|passes|NFE|TPF|TPS".split("|"), *(f"x {name}" for name in BASELINES)]
_RUN += "ms|spread|bare|overhead|peak MiB|compile s".split("|")
_PASS = "run|pass|count|ms|spread|bare|overhead|rows|floor MiB|GB/s|touched/floor|compile s".split("|")


def _run_row(m: Measured, results: Sequence[Measured]) -> list[str]:
    row = as_json(m, results)
    faster = [row["speedups"].get(name) for name in BASELINES]
    return [
        row["run"], str(row["tokens_non_eos"]), str(row["passes"]), str(row["nfe"]), f"{row['tpf']:.2f}", f"{row['tps']:.2f}",
        *(f"{x['median']:.2f} ({x['lowest']:.2f}-{x['highest']:.2f})" if x else "-" for x in faster),
        f"{row['ms_per_forward']:.3f}", f"{row['spread']:.0%}", f"{row['bare_ms_per_forward']:.3f}",
        f"{row['overhead_share']:.1%}", _mebibytes(row["peak_memory_bytes"]), f"{row['compile_seconds']:.1f}",
    ]  # fmt: skip


def _kind_row(m: Measured, kind: Kind) -> list[str]:
    row = _kind_json(kind)
    through = "/".join(_range(values) for values in (kind.rows.projected, kind.rows.finished, (kind.rows.scored,)))
    over = "-" if row["bytes_over_floor"] is None else f"{row['bytes_over_floor']:.1f}"
    return [
        m.run, row["kind"], str(row["passes"]), f"{row['ms']:.3f}", f"{row['spread']:.0%}", f"{row['bare_ms']:.3f}",
        f"{row['overhead_share']:.1%}", through, _mebibytes(row["floor_bytes"]),
        f"{row['floor_bytes_per_second'] / 1e9:.2f}", over, f"{row['compile_seconds']:.1f}",
    ]  # fmt: skip


def _range(rows: Sequence[int]) -> str:
    return str(min(rows)) if min(rows) == max(rows) else f"{min(rows)}-{max(rows)}"


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f}"


def aligned(rows: Sequence[Sequence[str]], *, words: Collection[int]) -> list[str]:
    """Rows as lines; the columns ``words`` are words, the others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
