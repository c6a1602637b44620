"""What a run on a GPU found, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polestar_jax.bench.kernels import Outcome
from polestar_jax.bench.loops import Row
from polestar_jax.bench.report import aligned, machine, sizes

if TYPE_CHECKING:
    from polestar_jax.bench.gpu import Session

NOTES = (
    "error: the one nearest to its tolerance, a difference over the largest magnitude or a number of values. us: a call of the",
    "kernel, and of its plain definition through XLA, several in one program; GB/s: operands and results, each once, over that;",
    "what is smaller than a cache comes from there, and the kernel's drift copies first what it overwrites in a decode. ms: a",
    "pass, several in a row, or the whole loop's time over its passes. floor: the weights that the pass must read, at the speed",
    "at which a plain sum reads all weights.",
)


def text(session: Session) -> str:
    """The report of a session."""
    about, setup = machine(), session.setup
    lines = [f"machine: {about['platform']} {about['device']} x {about['devices']}; {about['cpu']}; jax {about['jax']}"]
    if session.outcomes:
        lines += ["", *aligned([_CHECK, *map(_check_row, session.outcomes)], words={0, 1, 4})]
    if session.rows:
        shape, bandwidth = sizes(setup.spec), session.bandwidth
        speed = "an unknown speed" if bandwidth is None else f"{bandwidth / 1e9:,.1f} GB/s"
        lines += [
            "",
            f"decodes: {shape['family']}, {shape['layers']} layers, d {shape['d_model']}, {shape['parameters'] / 1e6:,.1f} M "
            f"random parameters, {setup.dtype}; batch 1, prompt {setup.prompt}, gen {setup.gen}, block {setup.block}; all "
            f"weights read at {speed}",
            *aligned([_PASS, *(_pass_row(row, bandwidth) for row in session.rows)], words={0, 1, 2}),
        ]
    lines += ["", *session.notes] if session.notes else []
    lines += ["", *NOTES]
    lines += [f"skipped, no time left: {name}" for name in session.skipped]
    lines += [f"failed: {name}" for name in session.failures]
    wrong = sum(not outcome.worst.passed for outcome in session.outcomes)
    lines.append(
        f"{len(session.outcomes)} kernel checks, {wrong} beyond tolerance; {len(session.failures)} failures, "
        f"{len(session.skipped)} skipped"
    )
    return "\n".join(lines)


_CHECK = "check|of|error|tolerance|result|kernel us|XLA us|x|kernel GB/s|XLA GB/s".split("|")
_PASS = "method|setting|pass|count|ms|floor ms|x floor|weights GB/s|compile s".split("|")


def _check_row(outcome: Outcome) -> list[str]:
    worst, kernel, plain = outcome.worst, outcome.seconds, outcome.plain_seconds
    return [
        outcome.name, worst.field, f"{worst.value:.2g}", f"{worst.tolerance:.2g}", "pass" if worst.passed else "FAIL",
        f"{1e6 * kernel:,.1f}", f"{1e6 * plain:,.1f}", f"{plain / kernel:.2f}", f"{outcome.bytes / kernel / 1e9:,.1f}",
        f"{outcome.bytes / plain / 1e9:,.1f}",
    ]  # fmt: skip


def _pass_row(row: Row, bandwidth: float | None) -> list[str]:
    floor, over, speed = "-", "-", "-"
    if row.weight_bytes is not None:
        speed = f"{row.weight_bytes / row.seconds / 1e9:,.1f}"
        if bandwidth is not None:
            floor = f"{1e3 * row.weight_bytes / bandwidth:.3f}"
            over = f"{row.seconds * bandwidth / row.weight_bytes:.2f}"
    return [
        row.method, row.how, row.kind, str(row.passes), f"{1e3 * row.seconds:.3f}", floor, over, speed,
        f"{row.compile_seconds:.1f}",
    ]  # fmt: skip
